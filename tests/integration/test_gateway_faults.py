"""Gateways on a Valkey that stands still, restarts, or is not what it should be."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import redis

from dispatch.config import GatewaySettings
from dispatch.contract import Reply
from dispatch.errors import ConfigurationError, FabricUnavailable, LibraryProblem
from dispatch.gateway import Gateway
from dispatch.producer.client import DispatchClient
from tests.support.executors import HeldExecutor
from tests.support.producing import MESSAGES, until, wide_group
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio


class Slow(HeldExecutor):
    """Takes 50 to 150 ms."""

    def __init__(self) -> None:
        super().__init__(held=False)
        self._chance = random.Random(3)

    async def execute(self, *call: Any) -> Any:
        await anyio.sleep(self._chance.uniform(0.05, 0.15))
        return await super().execute(*call)


@asynccontextmanager
async def admin_of(server: ValkeyProcess) -> AsyncIterator[redis.Redis]:
    """An independent client."""
    with redis.Redis(port=server.port) as client:
        yield client


def gateway_on(url: str, group: str, executor: HeldExecutor, **more: Any) -> Gateway:
    settings = {"valkey_url": url, "fabric_group": group, "drain_timeout_ms": 1000} | more
    return Gateway(GatewaySettings(**settings), executor=executor)


async def test_a_server_that_stands_still_loses_nothing_and_runs_nothing_twice(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    group = wide_group(server.url, lease_ms=3000)
    executor, chance = Slow(), random.Random(1)
    async with (
        gateway_on(server.url, group, executor, slots=4),
        gateway_on(server.url, group, executor, slots=4, valkey_client="redis"),
        DispatchClient(server.url, fabric_group=group) as client,
    ):
        calls = [asyncio.create_task(client.complete(model="m", messages=MESSAGES, timeout=30)) for _ in range(200)]
        for _ in range(4):
            await anyio.sleep(chance.uniform(0.05, 0.3))
            server.pause()
            await anyio.sleep(0.6)
            server.resume()
        replies = await asyncio.gather(*calls, return_exceptions=True)
    assert [one for one in replies if not isinstance(one, Reply)] == []
    assert executor.begun.total() == 200
    assert max(executor.begun.values()) == 1


async def test_a_restarted_server_is_served_again_at_once(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(aof=True)
    group = wide_group(server.url)
    executor = HeldExecutor()
    async with (
        gateway_on(server.url, group, executor, gateway_id="one") as gateway,
        DispatchClient(server.url, fabric_group=group) as client,
    ):
        running = asyncio.create_task(client.complete(model="m", messages=MESSAGES))
        await executor.until_begun(1)
        server.kill()
        await until(lambda: not gateway.status().fabric_reachable)
        assert gateway.in_flight == 1
        executor.release()
        await executor.until_idle()
        server.start()
        assert (await running).succeeded
        started = time.monotonic()
        assert (await client.complete(model="m", messages=MESSAGES)).succeeded
        assert time.monotonic() - started < 2
        assert gateway.status().fabric_reachable


async def test_a_connection_killed_under_an_idle_gateway_is_noticed(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    executor = HeldExecutor(held=False)
    async with (
        gateway_on(server.url, group, executor),
        DispatchClient(server.url, fabric_group=group) as client,
        admin_of(server) as admin,
    ):
        for _ in range(3):
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            started = time.monotonic()
            assert (await client.complete(model="m", messages=MESSAGES)).succeeded
            assert time.monotonic() - started < 2
    assert executor.begun.total() == 3


async def test_a_missing_library_refuses_the_start(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(library=False)
    with pytest.raises(LibraryProblem, match="dispatch scripts load"):
        await gateway_on(server.url, "g", HeldExecutor()).start()


async def test_a_library_that_goes_away_is_outlived(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    executor = HeldExecutor()
    async with (
        gateway_on(server.url, group, executor) as gateway,
        DispatchClient(server.url, fabric_group=group) as client,
        admin_of(server) as admin,
    ):
        call = asyncio.create_task(client.complete(model="m", messages=MESSAGES))
        await executor.until_begun(1)
        library = admin.execute_command("FUNCTION", "DUMP")
        admin.execute_command("FUNCTION", "FLUSH")
        executor.release()
        await until(lambda: "dispatch scripts load" in gateway.status().fabric_problem)
        admin.execute_command("FUNCTION", "RESTORE", library)
        assert (await call).succeeded
        await until(lambda: gateway.status().fabric_reachable)  # the reply may be there before the settle's answer is


async def test_a_wrong_password_is_said_without_showing_it(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    async with admin_of(server) as admin:
        admin.config_set("requirepass", "right")
    for client in ("glide", "redis"):
        url = f"valkey://:hunter2@127.0.0.1:{server.port}"
        with pytest.raises(ConfigurationError, match="password") as caught:
            await gateway_on(url, "g", HeldExecutor(), valkey_client=client).start()
        assert "hunter2" not in str(caught.value)


async def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(FabricUnavailable, match=r"127\.0\.0\.1:1.*refused"):
        await gateway_on("valkey://127.0.0.1:1", "g", HeldExecutor()).start()

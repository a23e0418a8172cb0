"""A server that is silent, gone, or back again."""

from __future__ import annotations

import time

import anyio
import pytest
import redis

from dispatch.errors import FabricUnavailable
from dispatch.fabric import functions as f
from tests.support.fake_server import FakeServer

pytestmark = [pytest.mark.anyio, pytest.mark.container]


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("glide", "redis_client"):
        monkeypatch.setattr(f"dispatch.fabric.{module}.REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr("tests.support.blocking.TIMEOUT_S", 0.5)


async def test_a_silent_server_is_unavailable_in_time_and_usable_again(start_valkey, open_connection) -> None:
    server = start_valkey()
    connection = await open_connection(server.url)
    server.pause()
    started = time.monotonic()
    with pytest.raises(FabricUnavailable, match=r"^Valkey at valkey://127\.0\.0\.1:\d+/0 does not answer: "):
        await connection.get("{g}:x")
    with pytest.raises(FabricUnavailable):
        await connection.run("g", f.library_version())
    with pytest.raises(FabricUnavailable):
        await connection.run_many("g", [f.library_version()] * 3)
    assert time.monotonic() - started < 5
    server.resume()
    await comes_back(connection)


async def test_calls_during_an_outage_all_fail_and_none_hangs(start_valkey, open_connection) -> None:
    server = start_valkey()
    connection = await open_connection(server.url)
    server.pause()
    failures: list[FabricUnavailable] = []

    async def one() -> None:
        try:
            await connection.get("{g}:x")
        except FabricUnavailable as error:
            failures.append(error)

    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(one)
    assert len(failures) == 40
    server.resume()
    await comes_back(connection)


async def test_a_killed_server_is_found_again_after_its_restart(start_valkey, open_connection) -> None:
    server = start_valkey(aof=True)
    connection = await open_connection(server.url)
    await connection.put("{g}:kept", b"1", ttl_ms=60_000)
    server.kill()
    with anyio.fail_after(3), pytest.raises(FabricUnavailable):
        await connection.get("{g}:kept")
    server.start()
    await comes_back(connection)
    assert await connection.get("{g}:kept") == b"1"
    await connection.run("g", f.library_version())


async def test_idle_connections_that_a_restart_cut_cost_no_call(start_valkey, open_connection) -> None:
    server = start_valkey()
    connection = await open_connection(server.url)
    server.restart()
    with anyio.fail_after(5):
        while True:
            try:
                await connection.get("{g}:x")
            except FabricUnavailable:
                continue
            break
    for _ in range(10):
        await connection.get("{g}:x")


async def test_a_connection_the_server_closes_is_replaced(start_valkey, open_connection) -> None:
    server = start_valkey()
    connection = await open_connection(server.url)
    with redis.Redis(port=server.port) as eye:
        eye.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await comes_back(connection)


async def test_a_call_that_lost_its_connection_is_not_repeated(open_connection) -> None:
    """Whether the server did it is unknown: only the caller knows whether it may be done twice."""
    with FakeServer(b"$-1\r\n") as server:
        connection = await open_connection(server.url)
        server.answer = b""
        server.seen.clear()
        with pytest.raises(FabricUnavailable):
            await connection.run("g", f.lease_reap(limit=1))
        with pytest.raises(FabricUnavailable):
            await connection.run_many("g", [f.lease_reap(limit=1)])
        assert server.seen == [b"FCALL", b"FCALL"]


async def comes_back(connection) -> None:
    """The connection serves again within some seconds, without anybody's doing."""
    with anyio.fail_after(6):
        while True:
            try:
                await connection.get("{g}:x")
            except FabricUnavailable:
                await anyio.sleep(0.02)
            else:
                return

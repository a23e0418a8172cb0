"""Gateways on a real Valkey: claims, wake-ups, cancels, reconciling, fair caps."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import redis

from dispatch.config import GatewaySettings
from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from dispatch.fabric import functions
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.schema import LIMITS
from dispatch.gateway import Executor, Gateway, NoopExecutor
from dispatch.producer.client import DispatchClient
from tests.support.executors import HeldExecutor
from tests.support.lossy import LossyConnection
from tests.support.producing import MESSAGES, eye, until, wide_group
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

CHOICE = b'{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}'
COMPLETION = b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[' + CHOICE + b"]}"


def gateway_on(url: str, group: str, executor: Executor | None = None, **more: Any) -> Gateway:
    connection = more.pop("connection", None)
    settings = GatewaySettings(**({"valkey_url": url, "fabric_group": group, "drain_timeout_ms": 1000} | more))
    return Gateway(settings, executor=executor, connection=connection)


class RandomlySlow(HeldExecutor):
    """Takes up to 20 ms."""

    def __init__(self, seed: int) -> None:
        super().__init__(held=False)
        self.chance = random.Random(seed)

    async def execute(self, *call: Any) -> Any:
        await anyio.sleep(self.chance.uniform(0, 0.02))
        return await super().execute(*call)


async def snapshot(connection: Connection, group: str) -> dict[str, Any]:
    found: dict[str, Any] = await connection.run(group, functions.fabric_snapshot("group"))
    return found


async def until_clean(connection: Connection, group: str, within_s: float = 5) -> None:
    """Wait until nothing waits and nothing runs."""
    with anyio.fail_after(within_s):
        while True:
            now = await snapshot(connection, group)
            if now["in_flight"] == 0 and now["pending"] == 0:
                return
            await anyio.sleep(0.02)


async def complete(client: DispatchClient, count: int) -> list[Reply | BaseException]:
    calls = (client.complete(model="m", messages=MESSAGES, timeout=20) for _ in range(count))
    return list(await asyncio.gather(*calls, return_exceptions=True))


@pytest.mark.parametrize("valkey_client", ["glide", "redis"])
async def test_requests_are_claimed_and_settled(
    valkey: ValkeyProcess, connection: Connection, valkey_client: str
) -> None:
    group = wide_group(valkey.url)
    async with (
        gateway_on(
            valkey.url, group, NoopExecutor(COMPLETION), valkey_client=valkey_client, gateway_id="one"
        ) as gateway,
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        replies = await complete(client, 300)
        assert all(isinstance(one, Reply) and one.body == COMPLETION for one in replies)
        assert {one.head.gateway_id for one in replies if isinstance(one, Reply)} == {"one"}
        await until(lambda: gateway.status().settled == {"OK": 300})  # the reply may be there before the answer is
        assert gateway.in_flight == 0
    await until_clean(connection, group)
    with eye(valkey.url) as other:
        assert other.zcard(f"{{{group}}}:zset:llm:leases") == 0


async def test_an_idle_gateway_starts_a_request_within_milliseconds_and_does_not_poll(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    begun: list[float] = []

    class Noting(NoopExecutor):
        async def execute(self, *call: Any) -> Any:
            begun.append(time.perf_counter())
            return await super().execute(*call)

    def fcalls() -> int:
        with redis.Redis(port=server.port) as other:
            stats = other.info("commandstats")
        return sum(int(stats[name]["calls"]) for name in stats if name.startswith("cmdstat_fcall"))

    async with (
        gateway_on(server.url, group, Noting(COMPLETION)),
        DispatchClient(server.url, fabric_group=group) as client,
    ):
        waits = []
        for _ in range(40):
            sent = time.perf_counter()
            await client.complete(model="m", messages=MESSAGES)
            waits.append(begun.pop() - sent)
        assert statistics.median(waits) < 0.020
        before = fcalls()
        await anyio.sleep(1)
        assert fcalls() - before <= 12  # five looks for those who watch the group, two reaps, a heartbeat or two


async def test_two_gateways_at_once_give_a_new_group_one_config(valkey: ValkeyProcess, connection: Connection) -> None:
    group = f"t-{uuid.uuid4().hex[:12]}"
    gateways = [gateway_on(valkey.url, group, NoopExecutor(), endpoint_url="http://127.0.0.1:9/v1") for _ in range(2)]
    await asyncio.gather(*(one.start() for one in gateways))
    try:
        config = await connection.run(group, functions.fabric_snapshot("config"))
        assert config["generation"] == 1
        assert config["actor"] in {f"gateway {one.settings.gateway_id}" for one in gateways}
        pools = {row["pool_id"]: row["quantum"] for row in config["document"]["pools"]}
        assert pools == {"interactive": 4, "document-extract": 2, "backfill": 1, "default": 1}
    finally:
        await asyncio.gather(*(one.stop() for one in gateways))


async def test_the_groups_cap_holds_over_two_gateways(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url, total_concurrent_dispatch=5)
    executor = HeldExecutor()
    async with (
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        calls = asyncio.create_task(complete(client, 60))
        await executor.until_begun(5)
        await anyio.sleep(0.1)
        assert executor.begun.total() == 5
        executor.release()
        assert all(isinstance(one, Reply) for one in await calls)
    assert executor.most == 5


async def test_slots_that_free_up_are_used_though_nobody_submits(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url)
    executor = HeldExecutor()
    async with (
        gateway_on(valkey.url, group, executor, slots=2),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        calls = [asyncio.create_task(complete(client, 1)) for _ in range(6)]
        for begun in (2, 4, 6):
            await executor.until_begun(begun)
            executor.release(*executor.begun)
        await asyncio.gather(*calls)
    assert executor.most == 2


async def test_a_cancelled_call_is_broken_off_at_the_endpoint(valkey: ValkeyProcess, connection: Connection) -> None:
    group = wide_group(valkey.url)
    executor = HeldExecutor()
    async with gateway_on(valkey.url, group, executor), DispatchClient(valkey.url, fabric_group=group) as client:
        call = asyncio.create_task(client.complete(model="m", messages=MESSAGES))
        await executor.until_begun(1)
        call.cancel()
        await executor.until_idle(2)
        await until_clean(connection, group, 2)
    assert executor.broken_off.total() == 1


class Dropping:
    """A connection on which each claim is made once more before, under another nonce, and that answer is dropped."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self.dropped = 0

    async def run(self, group: str, call: FunctionCall[Any]) -> Any:
        if call.function == "lease_claim":
            gateway_id, dispatcher_id, nonce, want = map(str, call.args)
            before = functions.lease_claim(gateway_id, dispatcher_id, nonce=f"{nonce}-dropped", want=int(want))
            self.dropped += len((await self._inner.run(group, before)).leases)
        return await self._inner.run(group, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("slots", [64, 2], ids=["run", "some given back"])
async def test_leases_of_a_claim_that_was_never_answered_are_found_within_a_heartbeat(
    valkey: ValkeyProcess, connection: Connection, slots: int
) -> None:
    group = wide_group(valkey.url, lease_ms=3000)
    executor, dropping = HeldExecutor(held=False), Dropping(connection)
    async with (
        gateway_on(valkey.url, group, executor, connection=dropping, slots=slots),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        started = time.monotonic()
        replies = await complete(client, 6)
        assert all(isinstance(one, Reply) and one.attempt == 1 for one in replies)
        assert time.monotonic() - started < 2.9
        await until_clean(connection, group)
    assert dropping.dropped > 0
    assert executor.begun.total() == 6


@pytest.mark.parametrize("seed", range(3))
async def test_lost_answers_lose_nothing_and_run_nothing_twice(
    valkey: ValkeyProcess, connection: Connection, seed: int
) -> None:
    group = wide_group(valkey.url, lease_ms=1500)
    executor = RandomlySlow(seed)
    loses = frozenset({"lease_claim", "lease_settle", "lease_renew", "lease_reap"})
    lossy = LossyConnection(connection, loses=loses, seed=seed)
    async with (
        DispatchClient(valkey.url, fabric_group=group) as client,
        gateway_on(valkey.url, group, executor, connection=lossy, slots=16),
        gateway_on(valkey.url, group, executor, valkey_client="redis", slots=16),
    ):
        lossy.on = True
        replies = await complete(client, 400)
        assert [one for one in replies if not isinstance(one, Reply)] == []
        await until_clean(connection, group)
    assert lossy.lost["lease_settle"] > 0
    assert executor.begun.total() == 400
    assert max(executor.begun.values()) == 1


async def test_clients_that_leave_at_random_times_leave_nothing_behind(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    group = wide_group(valkey.url, total_concurrent_dispatch=3)
    chance, executor = random.Random(25), RandomlySlow(25)
    async with (
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):

        async def leave_early() -> None:
            with anyio.move_on_after(chance.uniform(0, 0.15)):
                await client.complete(model="m", messages=MESSAGES)

        for _ in range(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(40):
                    tasks.start_soon(leave_early)
        await until_clean(connection, group)
        assert executor.running == 0
        started = time.monotonic()
        await client.complete(model="m", messages=MESSAGES)
        assert time.monotonic() - started < 1
        pools = await connection.run(group, functions.fabric_snapshot("pools"))
        assert all(row["in_flight"] == 0 for row in pools["rows"])


async def test_large_bodies_and_replies_travel_beside_the_functions(valkey: ValkeyProcess) -> None:
    big = COMPLETION.replace(b"hi", b"z" * (LIMITS["inline_reply_bytes"] * 3))
    async with StubBackend(json_answer(big)) as stub:
        group = wide_group(valkey.url, endpoints=[{"endpoint_id": "default", "url": f"{stub.url}/v1"}])
        text = "ü" * 600_000
        async with gateway_on(valkey.url, group), DispatchClient(valkey.url, fabric_group=group) as client:
            reply = await client.complete(model="m", messages=[{"role": "user", "content": text}])
        assert reply.body == big
        assert text in stub.requests[0].body.decode()
    with eye(valkey.url) as other:
        left = [name for name in other.scan_iter(f"{{{group}}}:body:*") if other.ttl(name) < 0]
    assert left == []


async def test_an_endpoint_whose_key_is_missing_here_is_told_with_the_variables_name(
    valkey: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    row = {"endpoint_id": "default", "url": "http://127.0.0.1:9/v1", "api_key_env": "NO_SUCH_KEY"}
    group = wide_group(valkey.url, endpoints=[row])
    async with gateway_on(valkey.url, group) as gateway, DispatchClient(valkey.url, fabric_group=group) as client:
        with pytest.raises(RequestEnded, match="NO_SUCH_KEY") as caught:
            await client.complete(model="m", messages=MESSAGES)
        assert caught.value.reply.ending == "failed"
        error = caught.value.reply.error
        assert error is not None
        assert (error.type, error.source) == ("endpoint_misconfigured", "dispatch")
        assert await gateway.endpoints() == ()


async def test_leaving_tells_the_server_that_nobody_sleeps_here(valkey: ValkeyProcess, connection: Connection) -> None:
    group = wide_group(valkey.url)
    async with gateway_on(valkey.url, group, NoopExecutor()):
        for _ in range(200):
            if (await snapshot(connection, group))["sleeping_gateways"] == 1:
                break
            await anyio.sleep(0.01)
        else:
            pytest.fail("the idle gateway is not known to sleep")
    assert (await snapshot(connection, group))["sleeping_gateways"] == 0

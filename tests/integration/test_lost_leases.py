"""Gateways that freeze, die, come back under their name, or drain while they run requests: one reply, no second run."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import anyio
import pytest

from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from tests.support.calls import COMPLETION
from tests.support.engines import OK, SILENT, Engine, Fabric, call, slow, text_of
from tests.support.gateway_process import GatewayProcess
from tests.support.producing import until
from tests.support.stub import Hold, Script, SeenRequest
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]  # processes take their time to start on a busy machine

LEASE_MS = 1500
SLACK_S = 2.0
AGAIN = {"pool_id": "default", "delivery": "at_least_once"}
ONCE = {"pool_id": "default"}


def fabric_of(valkey: ValkeyProcess, engine: Engine, pool: dict[str, Any], **document: Any) -> Fabric:
    return Fabric(valkey.url, engine.url, pools=[pool], **({"lease_ms": LEASE_MS} | document))


def process(fabric: Fabric, name: str, **settings: Any) -> GatewayProcess:
    return GatewayProcess(fabric.url, fabric.group, gateway_id=name, **settings)


def first_then(first: Script, rest: Script) -> Any:
    """Answer the first call in one way and all others in another."""
    calls: list[str] = []

    def answer(request: SeenRequest) -> Script:
        calls.append(text_of(request))
        return first if len(calls) == 1 else rest

    return answer


def beat_ms(fabric: Fabric, name: str) -> int:
    """Return when a gateway's newest heartbeat was, 0 when it is not known (any more)."""
    rows = fabric.section("gateways")["rows"]
    return int(next((row["beat_ms"] for row in rows if row["gateway_id"] == name), 0))


@pytest.mark.parametrize("pool", [ONCE, AGAIN], ids=["at_most_once", "at_least_once"])
async def test_a_gateway_that_was_frozen_beyond_its_lease_stops_its_calls_when_it_wakes(
    valkey: ValkeyProcess, pool: dict[str, Any]
) -> None:
    async with Engine() as engine:
        engine.calls = first_then(SILENT, OK)
        fabric = fabric_of(valkey, engine, pool)
        async with process(fabric, "zombie") as zombie, fabric.client() as client:
            running = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 1)
            held = engine.last_call.connection
            async with process(fabric, "other"):
                zombie.signal(signal.SIGSTOP)
                try:
                    found = await running
                    if pool is ONCE:
                        assert isinstance(found, RequestEnded)
                        assert found.reply.ending == "lost"
                    else:
                        assert isinstance(found, Reply)
                        assert (found.attempt, found.head.gateway_id) == (2, "other")
                        assert [(one.error_type, one.gateway_id) for one in found.tries] == [("lost", "zombie")]
                    assert not held.closed_by
                finally:
                    woken = time.monotonic()
                    zombie.signal(signal.SIGCONT)
                await engine.stub.until(lambda _: held.closed_by == "client")
                assert held.closed_at is not None
                assert held.closed_at - woken < 1 + SLACK_S
                assert isinstance(await call(client), Reply)
                await fabric.until_clean()
        ended = fabric.endings()
        assert len(ended) == len({one["request_id"] for one in ended}) == 2
        assert engine.count("call") == (2 if pool is ONCE else 3)


async def test_an_answer_that_came_while_its_gateway_was_frozen_is_no_second_reply(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        engine.calls = first_then(slow(LEASE_MS / 1000 * 0.7), OK)
        fabric = fabric_of(valkey, engine, AGAIN)
        both = {name: process(fabric, name) for name in ("one", "two")}
        async with both["one"], both["two"], fabric.client() as client:
            running = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 1)
            [lease] = fabric.section("leases")["rows"]
            zombie = lease["gateway_id"]
            both[zombie].signal(signal.SIGSTOP)
            try:
                found = await running
                assert isinstance(found, Reply)
                assert found.attempt == 2
                assert found.head.gateway_id != zombie
            finally:
                both[zombie].signal(signal.SIGCONT)
            for _ in range(2):  # it has come to itself, and has told what it had to tell
                before = beat_ms(fabric, zombie)
                await until(lambda before=before: beat_ms(fabric, zombie) != before)
            await fabric.until_clean()
        assert [one["ending"] for one in fabric.endings()] == ["succeeded"]


async def test_restarted_under_its_name_it_gives_its_runs_back_with_the_attempt_counted(valkey: ValkeyProcess) -> None:
    order: list[str] = []

    def answer(request: SeenRequest) -> Script:
        order.append(text_of(request))
        return Script((Hold(),)) if len(order) <= 2 else OK

    async with Engine() as engine:
        engine.calls = answer
        fabric = fabric_of(valkey, engine, AGAIN | {"max_concurrent": 2}, lease_ms=30_000)
        async with process(fabric, "named") as before, fabric.client() as client:
            calls = []
            for text in "abcd":
                calls.append(asyncio.create_task(call(client, text)))
                await until(lambda text=text: fabric.pool()["submitted"] > "abcd".index(text))
            await until(lambda: len(order) == 2)
            before.signal(signal.SIGKILL)
            await before.ended(5)
            begun = time.monotonic()
            async with process(fabric, "named"):
                replies = await asyncio.gather(*calls)
                assert time.monotonic() - begun < 15  # by itself, not by the end of the lease
        assert [isinstance(one, Reply) and one.attempt for one in replies] == [2, 2, 1, 1]
        assert sorted(order[2:4]) == ["a", "b"]  # back at the head
        assert all(isinstance(one, Reply) and one.body == COMPLETION for one in replies)
        await fabric.until_clean()


async def test_restarted_under_its_name_it_tells_the_callers_of_an_at_most_once_pool(valkey: ValkeyProcess) -> None:
    async with Engine(SILENT) as engine:
        fabric = fabric_of(valkey, engine, ONCE, lease_ms=30_000)
        async with process(fabric, "named") as before, fabric.client() as client:
            running = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 1)
            before.signal(signal.SIGKILL)
            await before.ended(5)
            async with process(fabric, "named"):
                with anyio.fail_after(15):
                    found = await running
                assert isinstance(found, RequestEnded)
                assert found.reply.ending == "lost"
        assert engine.count("call") == 1
        await fabric.until_clean()


async def test_what_kills_every_gateway_that_runs_it_ends_dead(valkey: ValkeyProcess) -> None:
    async with Engine(SILENT) as engine:
        fabric = fabric_of(valkey, engine, AGAIN | {"max_attempts": 2}, lease_ms=30_000)
        async with fabric.client() as client:
            running = asyncio.create_task(call(client))
            for attempt in (1, 2):
                async with process(fabric, "named") as gateway:
                    await until(lambda attempt=attempt: engine.count("call") == attempt)
                    gateway.signal(signal.SIGKILL)
                    await gateway.ended(5)
            async with process(fabric, "named"):
                found = await running
        assert isinstance(found, RequestEnded)
        assert found.reply.ending == "dead"
        assert engine.count("call") == 2
        await fabric.until_clean()


async def test_a_drain_gives_an_at_least_once_run_back_and_counts_no_attempt(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        engine.calls = first_then(SILENT, OK)
        fabric = fabric_of(valkey, engine, AGAIN)
        async with process(fabric, "first", drain_timeout_ms=300) as first, fabric.client() as client:
            running = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 1)
            held = engine.last_call.connection
            first.signal(signal.SIGTERM)
            assert await first.ended(5) == 0
            await engine.stub.until(lambda _: held.closed_by == "client")
            async with process(fabric, "second"):
                found = await running
        assert isinstance(found, Reply)
        assert (found.attempt, found.head.gateway_id) == (1, "second")
        await fabric.until_clean()


async def test_a_drain_longer_than_the_lease_keeps_its_leases(valkey: ValkeyProcess) -> None:
    async with Engine(slow(2.5 * LEASE_MS / 1000)) as engine:
        fabric = fabric_of(valkey, engine, ONCE)
        async with process(fabric, "first", drain_timeout_ms=20_000) as first, fabric.client() as client:
            running = [asyncio.create_task(call(client)) for _ in range(3)]
            await until(lambda: engine.count("call") == 3)
            async with process(fabric, "second"):
                first.signal(signal.SIGTERM)
                assert await first.ended(10) == 0
                found = await asyncio.gather(*running)
        assert all(isinstance(one, Reply) and one.head.gateway_id == "first" for one in found)
        assert engine.count("call") == 3
        await fabric.until_clean()

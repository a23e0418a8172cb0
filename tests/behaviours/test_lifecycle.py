"""Gateways, producers and servers come and go: what runs is finished or told, what waits goes on, nothing is left."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from dispatch.errors import DispatchError, RequestEnded
from dispatch.fabric import functions as f
from dispatch.producer.client import DispatchClient
from tests.behaviours.scene import (
    BOTH_CLIENTS,
    Caller,
    Watching,
    assert_settled,
    endings,
    gateway_on,
    gateway_process,
    section,
)
from tests.conftest import load_library
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES, eye, owner, said, say, until, wide_group
from tests.support.stub import Hold, Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

AGAIN = {"pool_id": "again", "delivery": "at_least_once", "max_attempts": 5}


def calls(client: DispatchClient, count: int, **more: Any) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(client.complete(**dict[str, Any](model="m", messages=MESSAGES, timeout=40) | more))
        for _ in range(count)
    ]


async def test_a_drain_finishes_what_runs_and_leaves_the_rest_to_others_in_order(valkey: ValkeyProcess) -> None:
    group, executor = wide_group(valkey.url, total_concurrent_dispatch=3), Watching()
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        first = gateway_on(valkey.url, group, executor, gateway_id="first", drain_timeout_ms=20_000)
        await first.start()
        sent = []
        for number in range(9):
            sent += calls(client, 1, request_id=f"r-{number}")
            await until(lambda: section(valkey.url, group, "pools", subject="default")["rows"][0]["submitted"] > number)  # noqa: B023 - awaited in this turn
        await executor.until_begun(3)
        stopping = asyncio.create_task(first.stop())
        await until(lambda: first.draining)
        executor.release("r-0", "r-1", "r-2")
        await stopping
        assert executor.order == ["r-0", "r-1", "r-2"]
        assert section(valkey.url, group, "group")["pending"] == 6
        assert section(valkey.url, group, "gateways")["rows"] == []
        executor.release()
        async with gateway_on(valkey.url, group, executor, slots=1):
            replies = await asyncio.gather(*sent)
    assert {reply.attempt for reply in replies} == {1}
    assert executor.order == [f"r-{number}" for number in range(9)]
    assert_settled(valkey.url, group)


def holders(url: str, group: str) -> Counter[str]:
    """Return how many leases each gateway holds."""
    return Counter(row["gateway_id"] for row in section(url, group, "leases")["rows"])


async def test_a_gateway_that_is_killed_or_frozen_loses_nothing_and_answers_nothing_twice(
    valkey: ValkeyProcess,
) -> None:
    runs: Counter[str] = Counter()

    def answer(request: SeenRequest) -> Script:
        runs[said(request.body)] += 1
        hold = runs[said(request.body)] == 1 and "slow" in said(request.body)
        return Script((Hold(),)) if hold else json_answer(COMPLETION)

    async with StubBackend(answer) as stub:
        group = wide_group(
            valkey.url, lease_ms=1500, liveness_ms=1500, pools=[{"pool_id": "default"}, AGAIN],
            endpoints=[{"endpoint_id": "default", "url": f"{stub.url}/v1", "breaker_failures": 1000}],
        )  # fmt: skip
        async with (
            DispatchClient(valkey.url, fabric_group=group) as client,
            gateway_process(valkey.url, group, gateway_id="first", slots=8) as first,
            gateway_process(valkey.url, group, gateway_id="second", slots=8) as second,
        ):
            once = [*calls(client, 4, messages=say("slow once"))]
            again = [task for n in range(4) for task in calls(client, 1, messages=say(f"slow {n}"), pool="again")]
            await until(lambda: runs.total() == 8)
            held = holders(valkey.url, group)
            name = max(held, key=held.__getitem__)
            victim, other = (first, second) if name == "first" else (second, first)
            victim.signal(signal.SIGSTOP)  # for longer than its leases last
            await until(lambda: holders(valkey.url, group)[name] == 0, within_s=30)
            victim.signal(signal.SIGCONT)
            await until(lambda: victim.event("lease_not_renewed") or victim.code is not None, within_s=10)
            other.signal(signal.SIGKILL)
            replies = await asyncio.gather(*again)
            ended = await asyncio.gather(*once, return_exceptions=True)
            assert {reply.ending for reply in replies} == {"succeeded"}
            assert {one.reply.ending for one in ended if isinstance(one, RequestEnded)} == {"lost"}
            victim.signal(signal.SIGTERM)
            assert await victim.ended(10) == 0
        assert runs["slow once"] == 4  # at most once
        assert len(endings(valkey.url, group)) == 8
        assert_settled(valkey.url, group)


_PRODUCER = """
import sys, threading
from dispatch.sync import DispatchClient
url, group = sys.argv[1:]
client = DispatchClient(url, fabric_group=group, producer_id="victim", liveness_ms=900)
client.__enter__()
work = lambda: client.complete(model="m", messages=[{"role": "user", "content": "x"}], timeout=60)
for _ in range(6):
    threading.Thread(target=work).start()
"""


async def test_a_producer_that_is_killed_leaves_no_work_and_no_slot(valkey: ValkeyProcess) -> None:
    group, executor = wide_group(valkey.url, total_concurrent_dispatch=2), Watching()
    async with gateway_on(valkey.url, group, executor), DispatchClient(valkey.url, fabric_group=group) as client:
        victim = await anyio.open_process(
            [sys.executable, "-c", _PRODUCER, valkey.url, group], stdout=None, stderr=None
        )
        try:
            await executor.until_begun(2, seconds=30)
            await until(lambda: section(valkey.url, group, "group")["pending"] == 4)
            mine = calls(client, 2)
            await until(lambda: section(valkey.url, group, "group")["pending"] == 6)
        finally:
            victim.kill()
            await victim.aclose()
        await until(lambda: owner(valkey.url, group, "victim") is None)
        executor.release()
        assert [reply.ending for reply in await asyncio.gather(*mine)] == ["succeeded"] * 2
    counted = section(valkey.url, group, "pools", subject="default")["rows"][0]["endings"]
    assert counted == {"reply_dropped": 2, "producer_gone": 4, "succeeded": 2}
    assert executor.begun.total() == 4  # what waited for a dead caller never reached the backend
    assert_settled(valkey.url, group)


@pytest.fixture
def durable(start_valkey: Callable[..., ValkeyProcess]) -> tuple[ValkeyProcess, str]:
    """A server that keeps an AOF, with a group whose leases last for a second."""
    server, group = start_valkey(aof=True), unique_group()
    document = default_document() | {"lease_ms": 900, "liveness_ms": 900, "pools": [{"pool_id": "default"}, AGAIN]}
    configure(server.url, group, document)
    return server, group


def test_a_lease_that_is_live_after_an_aof_restart_is_still_its_holders(durable: tuple[ValkeyProcess, str]) -> None:
    server, group = durable
    hand = ByHand(server.url, group)
    hand.beat()
    hand.submit(count=3)
    leases = hand.claim(2)
    server.kill()
    server.start()
    hand.beat(leases)
    assert len(hand.section("leases")["rows"]) == 2
    hand.settle(leases)
    hand.settle(hand.claim(2))
    assert endings(server.url, group) == dict.fromkeys(("r1", "r2", "r3"), "succeeded")
    assert_settled(server.url, group)
    hand.close()


@pytest.mark.parametrize("returns", [True, False], ids=["its gateway returns", "its gateway is gone"])
def test_a_lease_that_ran_out_while_the_server_was_away_is_not_held_against_its_gateway(
    durable: tuple[ValkeyProcess, str], returns: bool
) -> None:
    server, group = durable
    hand = ByHand(server.url, group)
    hand.beat()
    hand.submit("default")
    hand.submit("again")
    leases = hand.claim(2)
    server.kill()
    time.sleep(1.2)
    server.start()
    assert hand.run(f.lease_reap(limit=10)).lost == 0  # nobody is judged by a clock that stood still
    if returns:
        hand.settle(leases)
        assert endings(server.url, group) == dict.fromkeys(("r1", "r2"), "succeeded")
    else:
        while endings(server.url, group) != {"r1": "lost"} or not hand.pool("again")["pending"]:
            hand.beat(gateway="other")
            hand.run(f.lease_reap(limit=10))
            time.sleep(0.02)
    hand.close()


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_an_aof_restart_in_the_middle_of_work_is_not_noticed_by_callers(
    start_valkey: Callable[..., ValkeyProcess], kind: str
) -> None:
    server = start_valkey(aof=True)
    group, executor = wide_group(server.url, total_concurrent_dispatch=4), Watching()
    async with gateway_on(server.url, group, executor), Caller(kind, server.url, fabric_group=group) as caller:
        sent = [asyncio.create_task(caller.complete(request_id=f"r-{number}")) for number in range(12)]
        await executor.until_begun(4)
        await until(lambda: section(server.url, group, "group")["pending"] == 8)
        server.kill()
        executor.release(*executor.order[:2])  # two results have to be kept for when it is back
        await anyio.sleep(0.3)
        server.start()
        executor.release()
        assert {reply.ending for reply in await asyncio.gather(*sent)} == {"succeeded"}
    assert (executor.begun.total(), max(executor.begun.values())) == (12, 1)
    assert_settled(server.url, group)


async def test_a_server_that_comes_back_empty_is_told_to_callers_and_served_again(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    group, executor = unique_group(), Watching()
    gateway = gateway_on(server.url, group, executor, endpoint_url="http://127.0.0.1:9/v1")
    async with gateway, DispatchClient(server.url, fabric_group=group) as client:
        lost = calls(client, 3, timeout=40)
        await executor.until_begun(3)
        server.kill()
        server.start()
        load_library(server.url)
        with anyio.fail_after(15):
            told = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(one, DispatchError) for one in told), told
        executor.release()
        with anyio.fail_after(15):
            assert (await client.complete(model="m", messages=MESSAGES, timeout=20)).succeeded
    assert_settled(server.url, group)


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_a_library_that_is_flushed_under_load_loses_nothing(
    start_valkey: Callable[..., ValkeyProcess], kind: str
) -> None:
    server = start_valkey()
    group, executor = wide_group(server.url, total_concurrent_dispatch=6), Watching(held=False, takes_s=0.02)
    async with (
        gateway_on(server.url, group, executor),
        gateway_on(server.url, group, executor, valkey_client="redis"),
        Caller(kind, server.url, fabric_group=group) as caller,
    ):
        sent = [asyncio.create_task(caller.complete()) for _ in range(24)]
        await executor.until_begun(8)
        await until(lambda: section(server.url, group, "pools", subject="default")["rows"][0]["submitted"] == 24)
        with eye(server.url) as admin:
            admin.execute_command("FUNCTION", "FLUSH")
            await anyio.sleep(0.3)
            load_library(server.url)
        assert {reply.ending for reply in await asyncio.gather(*sent)} == {"succeeded"}
    assert (executor.begun.total(), max(executor.begun.values())) == (24, 1)
    assert_settled(server.url, group)


async def test_any_gateway_goes_on_at_once_where_another_is_never_heard_of_again(valkey: ValkeyProcess) -> None:
    group, executor = wide_group(valkey.url, total_concurrent_dispatch=9), Watching(held=False)
    hand = ByHand(valkey.url, group)
    hand.submit(count=4)
    hand.beat(hand.claim(4, "gone"), "gone")  # its leases last for 30 s
    async with gateway_on(valkey.url, group, executor), DispatchClient(valkey.url, fabric_group=group) as client:
        started = time.monotonic()
        replies = await asyncio.gather(*calls(client, 10))
        assert {reply.ending for reply in replies} == {"succeeded"}
        assert max(reply.queue_ms for reply in replies) < 3000
        assert time.monotonic() - started < 5
    hand.close()

"""Every request ends once, whoever wins, leaves one record of it, and no counter above zero."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from dispatch.errors import RequestEnded
from dispatch.fabric import functions as f
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.records import Cancellation, Lease, Outcome, Settled, Settlement
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from tests.behaviours.scene import (
    BOTH_CLIENTS,
    Caller,
    Watching,
    assert_settled,
    at_once,
    endings,
    gateway_on,
    records,
    section,
)
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES, eye, until, wide_group
from tests.support.stack import stack
from tests.support.stub import Hold, Script, StubBackend
from tests.support.valkey import ValkeyProcess
from tests.support.ways_to_end import end_in_most_ways

pytestmark = pytest.mark.anyio


def settling(lease: Lease, outcome: Outcome, gateway: str = "g") -> FunctionCall[Settled]:
    item = Settlement(request_id=lease.request_id, fence=lease.fence, outcome=outcome)
    return f.lease_settle(gateway, f"{gateway}/1", nonce=uuid.uuid4().hex, want=0, items=[item])


def test_a_race_between_cancel_and_finish_has_one_winner(hand: ByHand) -> None:
    other = ByHand(hand.url, hand.group)
    for _ in range(25):
        hand.submit()
        [lease] = hand.claim(1)
        cancel: Callable[[], Cancellation] = lambda: other.run(  # noqa: E731 - one line of many
            f.request_cancel(lease.request_id, actor="test")  # noqa: B023 - run in this turn
        )
        cancelled, settled = at_once([cancel, lambda: hand.run(settling(lease, Outcome.SUCCEEDED))])  # noqa: B023 - as above
        assert settled.answers == ("OK",)
        assert (cancelled.status, cancelled.ending) in {("CANCELLING", "g"), ("ENDED", "succeeded")}
        assert endings(hand.url, hand.group)[lease.request_id] == "succeeded"  # the work was done, and is told
    other.close()
    assert_settled(hand.url, hand.group)


def test_a_race_between_cancel_and_claim_has_one_winner(hand: ByHand) -> None:
    other = ByHand(hand.url, hand.group)
    won: Counter[str] = Counter()
    for _ in range(25):
        [name] = hand.submit()
        cancelled, leases = at_once(
            [lambda: other.run(f.request_cancel(name, actor="test")), lambda: hand.claim(1)]  # noqa: B023 - run in this turn
        )
        won[cancelled.status] += 1
        assert len(leases) == (cancelled.status == "CANCELLING")
        hand.settle(leases, outcome=Outcome.CANCELLED)
        assert endings(hand.url, hand.group)[name] == "cancelled"
    assert won.total() == won["CANCELLED"] + won["CANCELLING"]
    other.close()
    assert_settled(hand.url, hand.group)


def test_a_second_finish_keeps_the_first(hand: ByHand) -> None:
    hand.submit()
    [lease] = hand.claim(1)
    hand.settle([lease])
    for outcome in Outcome:
        assert hand.run(settling(lease, outcome)).answers == ("LEASE_LOST",)
    assert hand.run(f.request_cancel(lease.request_id, actor="test")) == Cancellation("ENDED", "succeeded")
    assert endings(hand.url, hand.group) == {lease.request_id: "succeeded"}
    assert hand.pool("default")["endings"] == {"succeeded": 1}
    with eye(hand.url) as client:
        assert client.llen(key(hand.group, "replies", producer="p")) == 1
    assert_settled(hand.url, hand.group)


def test_of_many_finishes_at_once_exactly_one_counts(hand: ByHand) -> None:
    hand.submit()
    [lease] = hand.claim(1)
    hands = [ByHand(hand.url, hand.group) for _ in range(6)]
    outcomes = [Outcome.SUCCEEDED, Outcome.FAILED, Outcome.EXPIRED] * 2
    answers = at_once(
        [lambda one=one, how=how: one.run(settling(lease, how)) for one, how in zip(hands, outcomes, strict=True)]
    )
    words = Counter(answer.answers[0] for answer in answers)
    assert words == {"OK": 1, "LEASE_LOST": 5}
    assert len(records(hand.url, hand.group)) == 1
    assert_settled(hand.url, hand.group)
    for one in hands:
        one.close()


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_a_deadline_ends_a_request_that_waits_and_one_that_runs(valkey: ValkeyProcess, kind: str) -> None:
    async with StubBackend(Script((Hold(),))) as stub:
        address = [{"endpoint_id": "default", "url": f"{stub.url}/v1"}]
        pools = [{"pool_id": "default", "max_concurrent": 1}]
        group = wide_group(valkey.url, pools=pools, endpoints=address, lease_ms=900)
        async with gateway_on(valkey.url, group), Caller(kind, valkey.url, fabric_group=group) as caller:
            started = time.monotonic()
            runs = asyncio.create_task(caller.ended(timeout=1.5))
            await stub.until(lambda seen: len(seen.requests) == 1)
            waits = await caller.ended(timeout=0.3)
            assert (waits.ending, waits.execution_ms) == ("expired", None)
            assert not runs.done()
            assert (await runs).ending == "expired"
            assert time.monotonic() - started < 8
            await until(lambda: stub.open_connections == 0)
        assert len(stub.requests) == 1
        assert_settled(valkey.url, group)


async def test_http_and_sdk_cancels_end_waiting_and_running_work_at_once(valkey: ValkeyProcess) -> None:
    body = {"model": "m", "messages": MESSAGES}
    async with (
        StubBackend(Script((Hold(),))) as stub,
        stack(valkey.url, f"{stub.url}/v1", total_concurrent_dispatch=2) as path,
        httpx.AsyncClient(base_url=path.url, timeout=30) as http,
    ):
        calls: list[asyncio.Task[Any]] = []
        for _ in range(2):  # two run, two wait
            calls.append(asyncio.create_task(http.post("/v1/chat/completions", json=body)))
            calls.append(asyncio.create_task(path.client.complete(model="m", messages=MESSAGES)))
            await until(lambda: path.submitted() == len(calls))
        await stub.until(lambda seen: len(seen.requests) == 2)
        for call in calls:
            call.cancel()
        await until(lambda: [row["ending"] for row in path.endings()] == ["cancelled"] * 4)
        await stub.until(lambda seen: seen.open_connections == 0)
        assert len(stub.requests) == 2
        assert_settled(path.valkey_url, path.group)


async def test_an_operators_cancel_stops_running_work_and_tells_the_caller(valkey: ValkeyProcess) -> None:
    group, executor = wide_group(valkey.url), Watching()
    async with gateway_on(valkey.url, group, executor), DispatchClient(valkey.url, fabric_group=group) as client:
        call = asyncio.create_task(client.complete(model="m", messages=MESSAGES, request_id="r", timeout=30))
        await executor.until_begun(1)
        hand = ByHand(valkey.url, group)
        assert hand.run(f.request_cancel("r", actor="operator", reason="runs wild")).status == "CANCELLING"
        hand.close()
        with anyio.fail_after(3), pytest.raises(RequestEnded) as ended:
            await call
        assert ended.value.reply.ending == "cancelled"
    assert executor.broken_off.total() == 1
    assert_settled(valkey.url, group)


def test_every_way_to_end_leaves_one_record_and_one_step_of_one_counter(valkey: ValkeyProcess) -> None:
    group = unique_group()
    pools = [{"pool_id": "default"}, {"pool_id": "twice", "delivery": "at_least_once", "max_attempts": 1}]
    configure(valkey.url, group, default_document() | {"lease_ms": 900, "liveness_ms": 900, "pools": pools})
    hand = ByHand(valkey.url, group)
    ways = end_in_most_ways(hand)
    ways |= dict(zip([*hand.submit("default"), *hand.submit("twice")], ("lost", "dead"), strict=True))
    assert len(hand.claim(2, "dying")) == 2
    while len(records(valkey.url, group)) < len(ways):
        hand.beat(gateway="alive")
        hand.run(f.lease_reap(limit=10))
        time.sleep(0.02)
    assert endings(valkey.url, group) == ways
    counted = Counter(hand.pool("default")["endings"]) + Counter(hand.pool("twice")["endings"])
    assert counted == Counter(ways.values())
    assert_settled(valkey.url, group)
    hand.close()


def test_what_runs_anywhere_is_in_one_view(hand: ByHand) -> None:
    hand.submit(count=3)
    held = {gateway: hand.claim(1, gateway)[0].request_id for gateway in ("one", "two", "three")}
    for gateway in held:
        hand.beat(gateway=gateway)
    rows = hand.section("leases")["rows"]
    assert {row["gateway_id"]: row["request_id"] for row in rows} == held
    assert {row["gateway_id"]: row["in_flight"] for row in hand.section("gateways")["rows"]} == dict.fromkeys(held, 1)
    assert section(hand.url, hand.group, "group")["in_flight"] == 3

"""Limits, pauses and drains that change while work runs: nothing is killed, lost, stuck or started against them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dispatch.config import GatewaySettings, edited, encode_document
from dispatch.errors import RequestRefused
from dispatch.fabric import audit
from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome
from dispatch.gateway import Gateway
from dispatch.producer.client import DispatchClient
from tests.support.by_hand import ByHand
from tests.support.executors import HeldExecutor
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

AT_ONCE_S = 1.0
"""Far below the 5 s after which a gateway that nobody woke looks again; far above what waking takes."""


@pytest.fixture
def hand(valkey: ValkeyProcess, group: str) -> Iterator[ByHand]:
    made = ByHand(valkey.url, group)
    yield made
    made.close()


def change(hand: ByHand, *assignments: str) -> None:
    """Change fields of the config in force."""
    in_force = hand.section("config")
    document = encode_document(edited(in_force["document"], assignments))
    nonce = f"{time.monotonic_ns()}"
    call = f.group_configure(
        document, expected_generation=in_force["generation"], actor="test", reason="", nonce=nonce
    )  # fmt: skip
    answer = hand.run(call)
    assert answer.status == "APPLIED", answer


class Running:
    """Two gateways with one executor, and calls to pool `default`."""

    def __init__(self, hand: ByHand, executor: HeldExecutor, client: DispatchClient) -> None:
        self.hand = hand
        self.executor = executor
        self.calls: list[asyncio.Task[Any]] = []
        self._client = client

    def send(self, count: int) -> None:
        for _ in range(count):
            self.calls.append(asyncio.create_task(self._client.complete(model="m", messages=MESSAGES, timeout=30)))

    async def until_waiting(self, count: int) -> None:
        with anyio.fail_after(5):
            while self.hand.pool("default")["pending"] != count:  # noqa: ASYNC110 - the server's state announces nothing
                await anyio.sleep(0.01)

    async def end(self, count: int) -> None:
        """Let `count` running requests end and wait until their slots are free again, or taken by the next."""
        executor, before = self.executor, self.executor.ended.total()
        running = [name for name in executor.begun if name not in executor.ended]
        executor.release(*running[:count])
        with anyio.fail_after(5):
            while executor.ended.total() < before + count:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.005)

    async def stays_at(self, begun: int) -> None:
        """Nothing starts, though every gateway is told that there may be work."""
        for _ in range(5):
            await anyio.sleep(0.03)
            assert self.executor.begun.total() == begun

    async def finish(self) -> None:
        self.executor.release()
        replies = await asyncio.gather(*self.calls)
        assert all(reply.succeeded for reply in replies)
        assert not self.executor.broken_off
        assert max(self.executor.begun.values()) == 1
        with anyio.fail_after(5):
            while self.hand.section("group")["in_flight"]:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.01)
        assert audit.differences(self.hand.connection, self.hand.group) == []


@asynccontextmanager
async def running(valkey: ValkeyProcess, *assignments: str) -> AsyncIterator[Running]:
    group = unique_group()
    configure(valkey.url, group, edited(default_document(), ["total_concurrent_dispatch=16", *assignments]))
    hand, executor = ByHand(valkey.url, group), HeldExecutor()
    settings = [
        GatewaySettings(valkey_url=valkey.url, fabric_group=group, gateway_id=name, drain_timeout_ms=1000)
        for name in ("one", "two")
    ]
    async with (
        Gateway(settings[0], executor=executor),
        Gateway(settings[1], executor=executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        yield Running(hand, executor, client)
    hand.close()


# ---- limits


async def test_a_raised_cap_starts_more_at_once_though_nobody_submits(valkey: ValkeyProcess) -> None:
    async with running(valkey, "pools.default.max_concurrent=4") as now:
        now.send(20)
        await now.executor.until_begun(4)
        await now.until_waiting(16)
        change(now.hand, "pools.default.max_concurrent=8")
        await now.executor.until_begun(8, AT_ONCE_S)
        await now.stays_at(8)
        await now.finish()


async def test_a_lowered_cap_kills_nothing_and_holds_as_soon_as_it_can(valkey: ValkeyProcess) -> None:
    async with running(valkey, "pools.default.max_concurrent=4") as now:
        now.send(12)
        await now.executor.until_begun(4)
        await now.until_waiting(8)
        change(now.hand, "pools.default.max_concurrent=2")
        await now.end(2)
        await now.stays_at(4)
        await now.end(1)
        await now.executor.until_begun(5, AT_ONCE_S)
        change(now.hand, "pools.default.max_concurrent=null")
        await now.executor.until_begun(12, AT_ONCE_S)
        await now.finish()


async def test_a_lowered_total_kills_nothing_and_a_raised_one_starts_more(valkey: ValkeyProcess) -> None:
    async with running(valkey) as now:
        change(now.hand, "total_concurrent_dispatch=6")
        now.send(14)
        await now.executor.until_begun(6)
        await now.until_waiting(8)
        change(now.hand, "total_concurrent_dispatch=3")
        await now.end(3)
        await now.stays_at(6)
        change(now.hand, "total_concurrent_dispatch=5")
        await now.executor.until_begun(8, AT_ONCE_S)
        await now.finish()


async def test_a_lowered_queue_depth_keeps_what_waits_and_refuses_what_comes(valkey: ValkeyProcess) -> None:
    async with running(valkey, "pools.default.max_concurrent=1") as now:
        now.send(9)
        await now.executor.until_begun(1)
        await now.until_waiting(8)
        change(now.hand, "pools.default.max_queue_depth=3")
        with pytest.raises(RequestRefused) as refused:
            await now._client.complete(model="m", messages=MESSAGES)
        assert (refused.value.reason, refused.value.value, refused.value.limit) == ("pool_full", 8, 3)
        change(now.hand, "pools.default.max_concurrent=null")
        await now.finish()


def test_a_raised_minimum_takes_the_next_free_slot(hand: ByHand) -> None:
    hand.submit("backfill", 20)
    leases = hand.claim(8)
    hand.submit("interactive", 2)
    change(hand, "pools.interactive.quantum=1", "pools.backfill.quantum=100", "pools.interactive.min_concurrent=2")
    hand.settle(leases[:2])
    assert [lease.pool_id for lease in hand.claim(8)] == ["interactive", "interactive"]


def test_a_head_that_was_admitted_under_a_greater_cost_bound_still_launches(hand: ByHand) -> None:
    hand.submit("default", 2, estimated_cost_units=16)
    change(hand, "cost_max=2")
    assert len(hand.claim(2)) == 2


def test_every_gateway_acts_on_the_generation_in_force(hand: ByHand) -> None:
    hand.submit("default", 3)
    change(hand, "total_concurrent_dispatch=2")
    claims = [hand.run(f.lease_claim(name, f"{name}/1", nonce=f"{name}-n", want=1)) for name in ("one", "two", "three")]
    assert [claim.generation for claim in claims] == [2, 2, 2]
    assert [len(claim.leases) for claim in claims] == [1, 1, 0]


# ---- a pause that must not leak


def test_nothing_of_a_paused_pool_starts_whatever_comes_back_to_it(valkey: ValkeyProcess) -> None:
    group = unique_group()
    document = edited(default_document(), ["pools.default.delivery=at_least_once", "lease_ms=300"])
    configure(valkey.url, group, document)
    hand = ByHand(valkey.url, group)
    for gateway in ("one", "two", "three"):
        hand.beat(gateway=gateway)
    hand.submit("default", 6)
    first, second = hand.claim(2, "one")
    [lost] = hand.claim(1, "two")
    assert hand.run(f.pool_pause("default", "pause", actor="t")).state == "paused"
    hand.settle([second], outcome=Outcome.RELEASE, gateway="one")
    while not (reaped := hand.run(f.lease_reap(limit=10))).requeued:  # the lease of a gateway that was killed runs out
        assert reaped.lost == 0
        hand.beat([first], "one")
        time.sleep(0.02)
    hand.submit("default", 2)
    assert [hand.claim(8, gateway) for gateway in ("one", "two", "three")] == [[], [], []]
    hand.settle([first], gateway="one")
    assert hand.claim(8, "three") == []
    row = hand.pool("default")
    assert (row["pending"], row["in_flight"], row["endings"]["succeeded"]) == (7, 0, 1)
    assert audit.differences(hand.connection, group) == []
    hand.run(f.pool_pause("default", "resume", actor="t"))
    assert hand.tokens() > 0
    order = [lease.request_id for lease in hand.claim(8, "three")]
    assert order == [second.request_id, lost.request_id, "r4", "r5", "r6", "r7", "r8"]
    hand.close()


def test_a_pause_survives_a_new_config_and_a_drain_ends_when_the_pool_is_empty(hand: ByHand) -> None:
    hand.submit("backfill", 2)
    hand.run(f.pool_pause("backfill", "pause", actor="t"))
    change(hand, "pools.backfill.quantum=3", "policy=fifo")
    assert hand.claim(4) == []
    hand.run(f.pool_pause("backfill", "drain", actor="t"))
    assert hand.refusal("backfill") == "pool_draining"
    hand.settle(hand.claim(4))
    change(hand, "pools.backfill=null")
    assert "backfill" not in [row["pool_id"] for row in hand.section("pools")["rows"]]
    assert audit.differences(hand.connection, hand.group) == []


def test_a_disabled_pool_keeps_what_waits_and_refuses_what_comes(hand: ByHand) -> None:
    hand.submit("backfill", 2)
    change(hand, "pools.backfill.enabled=false")
    assert hand.refusal("backfill") == "pool_disabled"
    assert hand.pool("backfill")["pending"] == 2

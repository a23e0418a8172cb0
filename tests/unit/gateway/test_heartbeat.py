"""Renewing, losing and finding leases."""

from __future__ import annotations

import asyncio

import pytest

from dispatch.fabric.schema import key
from tests.support.executors import HeldExecutor
from tests.support.fake_fabric import FakeFabric
from tests.unit.gateway.conftest import make_gateway

pytestmark = pytest.mark.anyio


async def test_every_third_of_a_lease_all_held_leases_are_named(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=300)
    async with make_gateway(fabric, executor) as gateway:
        ids = {fabric.submit() for _ in range(3)}
        await executor.until_begun(3)
        seen = len(fabric.beats)
        await fabric.until(lambda: len(fabric.beats) >= seen + 3, 1)
        beat = fabric.beats[-1]
        assert beat[:1] == ["gw"]
        assert set(beat[9 + beat[7] :: 2]) == ids
        age = gateway.status().heartbeat_age_s
        assert age is not None
        assert age < 0.3


async def test_what_time_ends_is_ended_while_nothing_is_claimed(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.calls["lease_reap"] >= 3, 2)


async def test_a_finished_lease_is_named_until_its_settle_is_answered(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=150)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit()
        await executor.until_begun(1)
        fabric.lose("lease_settle", done=False, times=6)
        executor.release()
        await executor.until_idle()
        seen = len(fabric.beats)
        await fabric.until(lambda: len(fabric.beats) > seen + 1)
        assert request_id in fabric.beats[-1]
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")


async def test_a_lost_lease_is_broken_off_and_not_settled(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=300)
    async with make_gateway(fabric, executor) as gateway:
        request_id = fabric.submit()
        await executor.until_begun(1)
        del fabric.leases[request_id]
        await executor.until_idle()
        assert gateway.in_flight == 0
        again = fabric.submit()
        await executor.until_begun(2)
        executor.release()
        await fabric.until(lambda: fabric.ending(again) == "succeeded")
        assert gateway.status().settled == {"OK": 1}
    assert executor.broken_off == {request_id: 1}


async def test_a_lease_that_could_not_be_renewed_is_broken_off_and_told_later(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=300)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit()
        await executor.until_begun(1)
        fabric.go_down()
        await executor.until_idle(1)
        assert executor.broken_off == {request_id: 1}
        assert not fabric.results
        fabric.come_back()
        # The server still counts it as ours: it may have done work, so it is not run again.
        await fabric.until(lambda: fabric.ending(request_id) == "lost")
    assert executor.begun == {request_id: 1}


async def test_heartbeats_go_on_while_a_settle_is_not_answered(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=150)
    async with make_gateway(fabric, executor):
        first, second = fabric.submit(), fabric.submit()
        await executor.until_begun(2)
        fabric.lose("lease_settle", done=False, times=8)
        executor.release(first)
        seen = len(fabric.beats)
        await fabric.until(lambda: len(fabric.beats) > seen + 5)
        assert not executor.broken_off
        executor.release()
        await fabric.until(lambda: fabric.ending(first) == fabric.ending(second) == "succeeded")


async def test_the_nonce_of_an_unanswered_call_is_named(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=150)
    fabric.submit()
    fabric.lose("lease_claim", done=True, times=5)
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: any(beat[7] == 1 for beat in fabric.beats))
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 1)
    assert executor.begun.total() == 1


async def test_an_unknown_lease_is_run_within_two_beats(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=300)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(b"abc", ring=False)
        fabric.lease_behind_its_back(request_id)
        await executor.until_begun(1, 1)
        executor.release()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    assert executor.bodies == {request_id: b"abc"}


async def test_an_unknown_lease_is_given_back_when_no_slot_is_free(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=300)
    async with make_gateway(fabric, executor, slots=1):
        first = fabric.submit()
        await executor.until_begun(1)
        second = fabric.submit(ring=False)
        fabric.lease_behind_its_back(second)
        await fabric.until(lambda: fabric.released == [second], 1)
        executor.release(first)
        await executor.until_begun(2)
        executor.release()
        await fabric.until(lambda: fabric.ending(second) == "succeeded")


async def test_leases_of_an_earlier_life_are_told_before_anything_is_claimed(
    fabric: FakeFabric, executor: HeldExecutor
) -> None:
    request_id = fabric.submit()
    fabric.lease_behind_its_back(request_id)
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.ending(request_id) == "lost")
    assert not executor.begun


async def test_a_shorter_lease_is_obeyed_from_the_answer_that_brings_it(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=30_000)
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.calls["lease_claim"] == 1)
        beats = len(fabric.beats)
        fabric.lease_ms, fabric.generation = 300, 2
        fabric.document["lease_ms"] = 300
        fabric.submit()
        await executor.until_begun(1)
        await fabric.until(lambda: len(fabric.beats) >= beats + 3, 1)
        executor.release()


async def test_a_storm_of_cancels_shares_heartbeats(fabric: FakeFabric, executor: HeldExecutor) -> None:
    async with make_gateway(fabric, executor, slots=64):
        ids = [fabric.submit() for _ in range(64)]
        await executor.until_begun(64)
        seen = len(fabric.beats)
        for request_id in ids:
            fabric.cancel(request_id, "gw")
        await fabric.until(lambda: len(fabric.results) == 64)
        await fabric.until(fabric.tokens[key("g", "wake_gateway", gateway="gw")].empty)
        assert len(fabric.beats) - seen < 64
    assert executor.broken_off == dict.fromkeys(ids, 1)


async def test_the_run_of_an_older_fence_is_broken_off_when_the_request_comes_again(executor: HeldExecutor) -> None:
    fabric = FakeFabric(lease_ms=30_000)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit()
        await executor.until_begun(1)
        fabric.queue.append(fabric.leases.pop(request_id))
        fabric.tokens[key("g", "wake")].put_nowait(None)
        await executor.until_begun(2)
        await asyncio.sleep(0)
        assert executor.broken_off == {request_id: 1}
        executor.release()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")

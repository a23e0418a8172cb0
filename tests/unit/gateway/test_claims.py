"""The claim loop against a fabric in memory: batching, sleeping, tokens, lost answers."""

from __future__ import annotations

import pytest

from dispatch.errors import ScriptFault
from dispatch.fabric.schema import LIMITS, key
from tests.support.executors import DONE, HeldExecutor
from tests.support.fake_fabric import FakeFabric, Fault
from tests.unit.gateway.conftest import make_gateway

pytestmark = pytest.mark.anyio

WAKE = key("g", "wake")


async def test_a_request_is_claimed_run_and_settled(fabric: FakeFabric) -> None:
    executor = HeldExecutor(held=False)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(b'{"x":1}')
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    result = fabric.results[0]
    assert executor.bodies[request_id] == b'{"x":1}'
    assert result.body == DONE.body
    assert (result.head["gateway_id"], result.head["dispatcher_id"], result.head["status"]) == ("gw", "gw/g", 200)


async def test_never_more_run_than_there_are_slots(fabric: FakeFabric, executor: HeldExecutor) -> None:
    ids = [fabric.submit() for _ in range(10)]
    async with make_gateway(fabric, executor, slots=3) as gateway:
        await executor.until_begun(3)
        assert gateway.in_flight == 3
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 10)
    assert executor.most == 3
    assert executor.begun == dict.fromkeys(ids, 1)


async def test_what_finishes_together_is_settled_together(fabric: FakeFabric, executor: HeldExecutor) -> None:
    for _ in range(32):
        fabric.submit()
    async with make_gateway(fabric, executor, slots=16):
        await executor.until_begun(16)
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 32)
        assert len(fabric.batches) <= 6
        assert fabric.calls["lease_settle"] == len(fabric.batches)


async def test_one_settle_is_bounded_in_number(fabric: FakeFabric, executor: HeldExecutor) -> None:
    for _ in range(600):
        fabric.submit()
    async with make_gateway(fabric, executor, slots=600):
        await executor.until_begun(600)
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 600)
    assert max(fabric.batches) <= LIMITS["settle_max"]
    assert max(fabric.wants) <= LIMITS["claim_max"]


async def test_an_idle_gateway_calls_nothing(fabric: FakeFabric, executor: HeldExecutor) -> None:
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.calls["lease_claim"] == 1)
        for _ in range(50):
            await fabric.get("x")  # lets everything else run
        assert fabric.calls["lease_claim"] == 1
        fabric.submit()
        await executor.until_begun(1)


async def test_a_token_that_finds_no_free_slot_is_given_back(fabric: FakeFabric, executor: HeldExecutor) -> None:
    first = fabric.submit()
    async with make_gateway(fabric, executor, slots=2):
        await executor.until_begun(1)
        await fabric.until(lambda: fabric.calls["lease_claim"] == 2 and fabric.listening[WAKE] == 1)
        fabric.submit(ring=False)
        fabric.submit(ring=False)
        executor.release(first)
        await executor.until_begun(3)
        # Both slots are taken by the settle's claim, and the wait from before is still armed.
        fabric.submit()
        await fabric.until(lambda: fabric.calls["push_token"] == 1)
        assert fabric.tokens[WAKE].qsize() == 1
        assert fabric.calls["lease_claim"] == 2
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 4)


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
async def test_a_lost_claim_is_repeated_with_its_nonce(fabric: FakeFabric, *, done: bool) -> None:
    executor = HeldExecutor(held=False)
    ids = [fabric.submit() for _ in range(4)]
    fabric.lose("lease_claim", done=done, times=3)
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: len(fabric.results) == 4)
    assert executor.begun == dict.fromkeys(ids, 1)
    assert all(fabric.ending(one) == "succeeded" for one in ids)


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
async def test_a_lost_settle_is_repeated_with_its_nonce(
    fabric: FakeFabric, executor: HeldExecutor, *, done: bool
) -> None:
    ids = [fabric.submit() for _ in range(8)]
    async with make_gateway(fabric, executor) as gateway:
        await executor.until_begun(4)
        fabric.lose("lease_settle", done=done, times=2)
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 8)
        await fabric.until(lambda: gateway.status().settled == {"OK": 8})
    assert executor.begun == dict.fromkeys(ids, 1)


async def test_results_are_kept_while_the_server_is_away(fabric: FakeFabric, executor: HeldExecutor) -> None:
    ids = [fabric.submit() for _ in range(3)]
    async with make_gateway(fabric, executor) as gateway:
        await executor.until_begun(3)
        fabric.go_down()
        executor.release()
        await executor.until_idle()
        status = gateway.status()
        assert status.in_flight == 0
        while gateway.status().fabric_reachable:
            await fabric_is_asked(fabric)
        assert gateway.status().fabric_problem == "down"
        fabric.come_back()
        await fabric.until(lambda: len(fabric.results) == 3)
        assert gateway.status().fabric_reachable
    assert all(fabric.ending(one) == "succeeded" for one in ids)


async def fabric_is_asked(fabric: FakeFabric) -> None:
    with pytest.raises(Exception, match="down"):
        await fabric.get("x")


async def test_after_an_outage_it_looks_without_a_token(fabric: FakeFabric) -> None:
    executor = HeldExecutor(held=False)
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.listening[WAKE] == 1)
        fabric.go_down()
        request_id = fabric.submit()
        fabric.tokens.clear()  # the token went with the server
        fabric.come_back()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded", 2)


async def test_a_result_that_is_not_taken_does_not_hold_up_the_others(
    fabric: FakeFabric, executor: HeldExecutor
) -> None:
    ids = [fabric.submit() for _ in range(4)]
    fabric.poison = ids[1]
    async with make_gateway(fabric, executor):
        await executor.until_begun(4)
        executor.release()
        await fabric.until(lambda: len(fabric.results) == 4)
    assert [fabric.ending(one) for one in ids] == ["succeeded", "failed", "succeeded", "succeeded"]
    assert next(one for one in fabric.results if one.request_id == ids[1]).error_type == "settle_refused"


async def test_an_error_of_the_library_on_claim_is_outlived(fabric: FakeFabric) -> None:
    executor = HeldExecutor(held=False)
    fabric.faults += [Fault("lease_claim", done=False, error=ScriptFault("state/x.lua:3: boom")) for _ in range(2)]
    request_id = fabric.submit()
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")

"""What is claimed twice, late, or for a probe: one attempt is executed once, and a probe has its time."""

from __future__ import annotations

import asyncio
import time

import pytest

from dispatch.backend.execution import Execution
from dispatch.contract.reply import ReplyError, ReplyHead
from dispatch.fabric.schema import key
from tests.support.executors import HeldExecutor
from tests.support.fake_fabric import FakeFabric
from tests.unit.gateway.conftest import make_gateway

pytestmark = pytest.mark.anyio

WAKE = key("g", "wake")
UNREACHABLE = Execution(
    outcome="failed",
    head=ReplyHead(error=ReplyError(type="endpoint_unreachable", message="x", source="endpoint")),
    verdict="failure",
    retryable=True,
)


async def test_what_runs_goes_on_when_a_server_that_forgot_its_lease_gives_it_out_again(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    async with make_gateway(fabric, executor) as gateway:
        request_id = fabric.submit()
        await executor.until_begun(1)
        fabric.forget_claim(request_id)
        await fabric.until(lambda: request_id in fabric.leases)
        executor.release()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
        assert gateway.in_flight == 0
    assert executor.begun == {request_id: 1}
    assert not executor.broken_off


async def test_a_result_that_waits_is_settled_under_the_lease_that_is_given_out_again(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    async with make_gateway(fabric, executor) as gateway:
        request_id, other = fabric.submit(), fabric.submit()
        await executor.until_begun(2)
        fabric.lose("lease_settle", done=False, times=3)
        executor.release(request_id)
        await fabric.until(lambda: fabric.calls["lease_settle"] >= 1)
        fabric.forget_claim(request_id)
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
        executor.release(other)
        await fabric.until(lambda: fabric.ending(other) == "succeeded")
        await fabric.until(lambda: gateway.in_flight == 0)
    assert executor.begun == {request_id: 1, other: 1}


async def test_an_attempt_that_does_not_run_any_more_is_told_to_be_lost_instead_of_run_again() -> None:
    fabric, executor = FakeFabric(), HeldExecutor(held=False)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
        fabric.results.clear()
        fabric.forget_claim(request_id)
        await fabric.until(lambda: fabric.ending(request_id) == "lost")
    assert executor.begun == {request_id: 1}


async def test_the_same_id_submitted_anew_is_run(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    executor.release()
    async with make_gateway(fabric, executor):
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
        fabric.results.clear()
        fabric.forget_claim(request_id, nonce="another")
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    assert executor.begun == {request_id: 2}


async def test_a_lease_that_ended_on_its_way_here_is_not_begun(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.calls["lease_claim"] == 1)
        fabric.lease_ms = -10
        request_id = fabric.submit()
        await fabric.until(lambda: request_id in fabric.leases)
        fabric.lease_ms = 30_000
        fabric.tokens[key("g", "wake_gateway", gateway="gw")].put_nowait(None)
        await fabric.until(lambda: fabric.released == [request_id])
        executor.release()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    assert executor.begun == {request_id: 1}


async def test_a_probe_is_ended_in_its_time_with_a_failure_of_the_endpoint(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    fabric.probe_ms = 300
    async with make_gateway(fabric, executor):
        begun = time.monotonic()
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "failed")
        assert time.monotonic() - begun < 2
    assert executor.broken_off == {request_id: 1}
    [result] = fabric.results
    assert (result.error_type, result.verdict) == ("endpoint_timeout", "failure")
    assert result.head["error"]["source"] == "endpoint"


async def test_a_probe_whose_answer_is_coming_is_not_cut_off(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    fabric.probe_ms = 300
    async with make_gateway(fabric, executor) as gateway:
        request_id = fabric.submit()
        await executor.until_begun(1)
        assert gateway._service is not None
        [held] = gateway._service.holdings
        held.told = True  # as a run sets it when the first chunk of a stream is there
        await asyncio.sleep(0.6)
        assert not executor.broken_off
        executor.release()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")


async def test_a_probe_that_answers_in_time_is_left_alone() -> None:
    fabric, executor = FakeFabric(), HeldExecutor(held=False)
    fabric.probe_ms = 500
    async with make_gateway(fabric, executor):
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    assert fabric.results[0].verdict == "good"


async def test_a_probe_whose_time_is_over_before_its_call_goes_back(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    fabric.probe_ms = 200
    async with make_gateway(fabric, executor):
        await fabric.until(lambda: fabric.calls["lease_claim"] == 1)
        fabric.lose("get", done=False, times=1000)
        request_id = fabric.submit(b"abc", stored=True)
        await fabric.until(lambda: request_id in fabric.released)
        fabric.faults.clear()
        fabric.probe_ms = 0
        fabric.tokens[WAKE].put_nowait(None)
        await executor.until_begun(1)
        executor.release()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")


async def test_a_probe_with_an_earlier_deadline_of_its_own_expires(executor: HeldExecutor) -> None:
    fabric = FakeFabric()
    fabric.probe_ms = 60_000
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(timeout_s=0.2)
        await fabric.until(lambda: fabric.ending(request_id) == "expired", 3)


async def test_whether_another_attempt_does_no_work_twice_is_told() -> None:
    fabric = FakeFabric()
    async with make_gateway(fabric, HeldExecutor(held=False, answer=UNREACHABLE)):
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "failed")
    assert fabric.results[0].retryable

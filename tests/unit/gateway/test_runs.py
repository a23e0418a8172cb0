"""One run: bodies, results, stops."""

from __future__ import annotations

import msgspec
import pytest

from dispatch.backend.execution import Execution
from dispatch.contract.reply import ReplyError, ReplyHead, Usage
from dispatch.fabric.schema import LIMITS, key
from dispatch.gateway.endpoints import EndpointUnusable
from tests.support.executors import HeldExecutor
from tests.support.fake_fabric import FakeFabric
from tests.unit.gateway.conftest import make_gateway

pytestmark = pytest.mark.anyio


async def test_a_large_body_is_read_from_its_key(fabric: FakeFabric) -> None:
    executor = HeldExecutor(held=False)
    body = b"x" * (LIMITS["inline_body_bytes"] + 1)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(body, stored=True)
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    assert executor.bodies[request_id] == body


async def test_an_empty_body_is_not_looked_for(fabric: FakeFabric) -> None:
    executor = HeldExecutor(held=False)
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(b"")
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    assert executor.bodies[request_id] == b""


async def test_a_missing_body_is_told(fabric: FakeFabric, executor: HeldExecutor) -> None:
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(b"abc", stored=True)
        fabric.stored.clear()
        await fabric.until(lambda: fabric.ending(request_id) == "failed")
    assert fabric.results[0].error_type == "body_missing"
    assert fabric.results[0].head["error"]["source"] == "dispatch"
    assert not executor.begun


@pytest.mark.parametrize("over", [0, 1])
async def test_a_large_reply_is_stored_by_itself(fabric: FakeFabric, over: int) -> None:
    body = b"y" * (LIMITS["inline_reply_bytes"] + over)
    answer = Execution(outcome="succeeded", head=ReplyHead(status=200), body=body, verdict="good")
    async with make_gateway(fabric, HeldExecutor(held=False, answer=answer)):
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "succeeded")
    result = fabric.results[0]
    assert result.by_reference == bool(over)
    assert result.body == (b"" if over else body)
    assert fabric.stored.get(key("g", "reply_body", id=request_id)) == (body if over else None)


async def test_what_the_endpoint_said_travels_whole(fabric: FakeFabric) -> None:
    head = ReplyHead(
        status=429,
        headers=(("retry-after", "2"),),
        error=ReplyError(type="endpoint_overloaded", message="no room", source="endpoint"),
        usage=Usage(input_tokens=3),
        endpoint_id="default",
    )
    answer = Execution(outcome="failed", head=head, body=b"{}", verdict="backpressure", hold_ms=2000)
    async with make_gateway(fabric, HeldExecutor(held=False, answer=answer)):
        request_id = fabric.submit()
        await fabric.until(lambda: fabric.ending(request_id) == "failed")
    result = fabric.results[0]
    assert result.error_type == "endpoint_overloaded"
    read = msgspec.convert(result.head, ReplyHead, strict=False)
    assert read == msgspec.structs.replace(head, gateway_id="gw", dispatcher_id="gw/g")


@pytest.mark.parametrize(
    ("envelope", "error_type"),
    [
        (b"", "envelope_unreadable"),
        (b"\xff\xfe", "envelope_unreadable"),
        (b'{"contract":1}', "envelope_unreadable"),
        (b'{"contract":2,"new":[]}', "contract_mismatch"),
    ],
)
async def test_an_envelope_that_cannot_be_used_is_told(
    fabric: FakeFabric, executor: HeldExecutor, envelope: bytes, error_type: str
) -> None:
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(envelope=envelope or b" ")
        await fabric.until(lambda: fabric.ending(request_id) == "failed")
    assert fabric.results[0].error_type == error_type
    assert not executor.begun


@pytest.mark.parametrize(
    ("error", "error_type"),
    [(ZeroDivisionError("x"), "gateway_fault"), (EndpointUnusable("endpoint_unknown", "gone"), "endpoint_unknown")],
    ids=["fault", "endpoint"],
)
async def test_an_executor_that_raises_ends_one_request_only(
    fabric: FakeFabric, error: Exception, error_type: str
) -> None:
    executor = HeldExecutor(held=False)
    executor.error = error
    async with make_gateway(fabric, executor) as gateway:
        first = fabric.submit()
        await fabric.until(lambda: fabric.ending(first) == "failed")
        executor.error = None
        second = fabric.submit()
        await fabric.until(lambda: fabric.ending(second) == "succeeded")
        assert gateway.running
    assert fabric.results[0].error_type == error_type


async def test_a_cancelled_request_is_broken_off_at_once(fabric: FakeFabric, executor: HeldExecutor) -> None:
    async with make_gateway(fabric, executor):
        request_id, other = fabric.submit(), fabric.submit()
        await executor.until_begun(2)
        fabric.cancel(request_id, "gw")
        await fabric.until(lambda: fabric.ending(request_id) == "cancelled", 1)
        assert executor.broken_off == {request_id: 1}
        executor.release()
        await fabric.until(lambda: fabric.ending(other) == "succeeded")


async def test_a_run_past_its_deadline_is_broken_off(fabric: FakeFabric, executor: HeldExecutor) -> None:
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(timeout_s=0.2)
        await fabric.until(lambda: fabric.ending(request_id) == "expired", 2)
    assert executor.broken_off == {request_id: 1}
    assert fabric.results[0].error_type == "deadline_exceeded"


async def test_a_request_past_its_deadline_never_reaches_its_endpoint(
    fabric: FakeFabric, executor: HeldExecutor
) -> None:
    async with make_gateway(fabric, executor):
        request_id = fabric.submit(timeout_s=-1)
        await fabric.until(lambda: fabric.ending(request_id) == "expired")
    assert not executor.begun

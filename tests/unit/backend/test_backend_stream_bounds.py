"""Bounds in time of streamed calls, and streams that are cut: over real sockets."""

from __future__ import annotations

import gc
import time

import anyio
import pytest

from dispatch.backend import EndpointClient
from dispatch.backend.execution import ErrorType
from tests.support.calls import endpoint_at
from tests.support.streams import CHAT, CHUNKED, DONE, END, HEAD, PING, call_of, chunk, data, framed, gone, pinging, run
from tests.support.stub import (
    Fin,
    Hold,
    Pause,
    Reset,
    Script,
    Step,
    StubBackend,
    Write,
    answer_bytes,
    free_port,
    json_answer,
)

pytestmark = pytest.mark.anyio

A, F = data(chunk("a")), data(chunk(None, "stop"))
WHOLE = Script((Write(CHUNKED + framed(A) + framed(F) + framed(DONE) + END),))


async def test_the_call_travels_as_it_is_and_asks_for_no_encoding(client: EndpointClient) -> None:
    async with StubBackend(WHOLE) as stub:
        streamed = await run(client, endpoint_at(stub.url, api_key="sk-1"))
        [request] = stub.requests
    assert streamed.data == [chunk("a"), chunk(None, "stop")]
    assert (request.method, request.target, request.body) == ("POST", "/v1/chat/completions", CHAT.body)
    assert request.header("accept-encoding") == "identity"
    assert request.header("authorization") == "Bearer sk-1"


@pytest.mark.parametrize(
    ("answer", "status", "verdict", "kind"),
    [
        (b'{"error":{"message":"m","type":"t","param":null,"code":null}}', "400 No", "neutral", ErrorType.REJECTED),
        (b'{"error":{"message":"m"}}', "429 Slow", "backpressure", ErrorType.OVERLOADED),
        (b"<html>", "500 Oops", "failure", ErrorType.FAILED),
        (b"", "307 Moved", "failure", ErrorType.REDIRECT),
    ],
)
async def test_an_answer_other_than_success_is_judged_as_an_execution_is(
    client: EndpointClient, answer: bytes, status: str, verdict: str, kind: ErrorType
) -> None:
    async with StubBackend(json_answer(answer, status=status, headers=[("retry-after", "3")])) as stub:
        streamed = await run(client, endpoint_at(stub.url))
        execution = await client.execute(endpoint_at(stub.url), CHAT, deadline_s=20)
    assert streamed.payloads == []
    assert (streamed.execution.verdict, streamed.error[0]) == (verdict, kind)
    for name in ("outcome", "head", "body", "verdict", "hold_ms", "retryable"):
        assert getattr(streamed.execution, name) == getattr(execution, name)


async def test_the_head_is_there_when_the_stream_is_entered(client: EndpointClient) -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nx-request-id: b-1\r\nset-cookie: a=b\r\n\r\n")
    async with StubBackend(Script((Write(head), Hold()))) as stub:
        async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=20) as stream:
            assert not stream.ended
            assert stream.head.status == 200
            assert dict(stream.head.headers) == {"x-backend-request-id": "b-1"}
            with pytest.raises(RuntimeError, match="not ended"):
                _ = stream.execution
        await gone(stub.connections[0])


@pytest.mark.parametrize(
    ("steps", "outcome", "retryable"),
    [
        ((Fin(),), "failed", True),
        ((Reset(),), "failed", True),
        ((Write(HEAD), Fin()), "failed", True),
        ((Write(CHUNKED), Fin()), "failed", True),
        ((Write(CHUNKED + framed(PING)), Pause(0.1), Reset()), "failed", True),
        ((Write(CHUNKED + END),), "failed", True),
        ((Write(answer_bytes(b"")),), "failed", True),
        ((Write(HEAD + A), Fin()), "failed", False),
        ((Write(HEAD + A + b'data: {"id":"c1","choi'), Fin()), "failed", False),
        ((Write(CHUNKED + framed(A)), Fin()), "failed", False),
        ((Write(CHUNKED + framed(A)), Pause(0.2), Reset()), "failed", False),
        ((Write(CHUNKED + framed(A) + b"40\r\ndata"), Fin()), "failed", False),
        ((Write(CHUNKED + framed(A)), Pause(0.2), Write(b"zz\r\n"), Fin()), "failed", False),
        ((Write(HEAD + A + F), Fin()), "succeeded", False),
        ((Write(CHUNKED + framed(A + F)), Fin()), "succeeded", False),
        ((Write(CHUNKED + framed(A + F)), Pause(0.2), Reset()), "succeeded", False),
        ((Write(CHUNKED + framed(A + F) + END),), "succeeded", False),
        ((Write(CHUNKED + framed(A + F + DONE)), Hold()), "succeeded", False),
    ],
)
async def test_a_cut_stream_gives_its_whole_events_and_is_retryable_before_the_first_alone(
    client: EndpointClient, steps: tuple[Step, ...], outcome: str, retryable: bool
) -> None:
    async with StubBackend(Script(steps)) as stub:
        streamed = await run(client, endpoint_at(stub.url))
        assert len(stub.requests) == 1
    execution = streamed.execution
    sent = b"".join(step.data for step in steps if isinstance(step, Write))
    assert b"".join(map(data, streamed.data)) == (A if A in sent else b"") + (F if F in sent else b"")
    assert (execution.outcome, execution.retryable) == (outcome, retryable)
    assert execution.verdict == ("good" if outcome == "succeeded" else "failure")
    gc.collect()  # a response that was not closed would be a ResourceWarning here


async def test_nonsense_between_two_pieces_ends_the_wait_at_once(client: EndpointClient) -> None:
    nonsense = (Pause(0.1), Write(b"zz\r\n"), Hold())
    as_json = CHUNKED.replace(b"text/event-stream", b"application/json")
    scripts = [Script((Write(CHUNKED + framed(A)), *nonsense)), Script((Write(as_json + framed(b'{"id":')), *nonsense))]
    async with StubBackend(scripts) as stub:
        started = time.monotonic()
        streamed = await run(client, endpoint_at(stub.url))
        execution = await client.execute(endpoint_at(stub.url), CHAT, deadline_s=20)
        assert time.monotonic() - started < 10
    assert (streamed.error[0], streamed.execution.chunk_count) == (ErrorType.DISCONNECTED, 1)
    assert execution.head.error is not None
    assert (execution.head.error.type, execution.retryable) == (ErrorType.DISCONNECTED, False)


async def test_nobody_listens(client: EndpointClient) -> None:
    streamed = await run(client, endpoint_at(f"http://127.0.0.1:{free_port()}"))
    assert (streamed.error[0], streamed.execution.retryable) == (ErrorType.UNREACHABLE, True)


@pytest.mark.parametrize(
    "steps",
    [
        (Hold(),),
        (Write(b"HTTP/1.1 200"), Hold()),
        (Write(CHUNKED), Hold()),
        (Write(CHUNKED), *pinging(100)),
        (Write(CHUNKED), *pinging(100, piece=b"data: [")),
        (Write(CHUNKED), *pinging(100, piece=b"\n")),
    ],
    ids=["silent", "half-head", "head", "comments", "half-event", "blank"],
)
async def test_the_first_payload_has_its_bound(client: EndpointClient, steps: tuple[Step, ...]) -> None:
    async with StubBackend(Script(steps)) as stub:
        endpoint = endpoint_at(stub.url, first_byte_timeout_ms=300, idle_timeout_ms=60_000)
        started = time.monotonic()
        streamed = await run(client, endpoint)
        assert 0.25 < time.monotonic() - started < 4
        await gone(stub.connections[0])
    assert (streamed.error[0], streamed.execution.verdict) == (ErrorType.TIMEOUT, "failure")
    assert "300 ms" in streamed.error[1]
    assert streamed.execution.retryable is False


@pytest.mark.parametrize(
    "steps",
    [(Hold(),), pinging(100), pinging(100, piece=b"data: ["), pinging(100, piece=b"event: x\ndata:\n\n")],
    ids=["silent", "comments", "half-event", "empty-events"],
)
async def test_payloads_must_not_be_further_apart_than_the_idle_bound(
    client: EndpointClient, steps: tuple[Step, ...]
) -> None:
    script = Script((Write(CHUNKED + framed(A)), Pause(0.15), Write(framed(A)), *steps))
    async with StubBackend(script) as stub:
        started = time.monotonic()
        streamed = await run(client, endpoint_at(stub.url, idle_timeout_ms=400, first_byte_timeout_ms=60_000))
        assert time.monotonic() - started < 4.5
        await gone(stub.connections[0])
    assert streamed.execution.chunk_count == 2
    assert (streamed.error[0], streamed.execution.verdict) == (ErrorType.TIMEOUT, "failure")
    assert "400 ms" in streamed.error[1]


async def test_the_idle_bound_is_about_the_backend_not_about_a_slow_reader(client: EndpointClient) -> None:
    steps = [step for _ in range(6) for step in (Write(framed(A)), Pause(0.02))]
    script = Script((Write(CHUNKED), *steps, Write(framed(F + DONE) + END)))
    async with StubBackend(script) as stub:
        endpoint = endpoint_at(stub.url, idle_timeout_ms=150)
        async with client.stream(endpoint, CHAT, deadline_s=20) as stream:
            async for _ in stream:
                await anyio.sleep(0.2)
    assert (stream.execution.outcome, stream.execution.chunk_count) == ("succeeded", 7)


@pytest.mark.parametrize(
    ("steps", "count"),
    [((Hold(),), 0), ((Write(CHUNKED), Hold()), 0), ((Write(CHUNKED + framed(A)), *pinging(100)), 1)],
)
async def test_the_deadline_ends_a_stream_wherever_it_is(
    client: EndpointClient, steps: tuple[Step, ...], count: int
) -> None:
    async with StubBackend(Script(steps)) as stub:
        started = time.monotonic()
        streamed = await run(client, endpoint_at(stub.url), deadline_s=0.4)
        assert 0.35 < time.monotonic() - started < 4.5
        await gone(stub.connections[0])
    execution = streamed.execution
    assert (execution.outcome, execution.verdict, execution.chunk_count) == ("expired", "neutral", count)
    assert (streamed.error[0], execution.retryable) == (ErrorType.DEADLINE, False)


async def test_the_deadline_counts_though_bytes_keep_coming(client: EndpointClient) -> None:
    script = Script((Write(CHUNKED), *(Write(framed(A)) for _ in range(2_000)), Hold()))
    async with StubBackend(script) as stub:
        async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=0.5) as stream:
            async for _ in stream:
                await anyio.sleep(0.01)
        assert stream.execution.outcome == "expired"
        assert stream.execution.chunk_count < 2_000


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
async def test_a_deadline_that_has_passed_costs_no_call(client: EndpointClient, deadline_s: float) -> None:
    async with StubBackend(WHOLE) as stub:
        streamed = await run(client, endpoint_at(stub.url), deadline_s=deadline_s)
        assert stub.connections == []
    assert streamed.execution.outcome == "expired"


async def test_a_finished_stream_is_not_waited_on_for_long(client: EndpointClient) -> None:
    async with StubBackend(Script((Write(CHUNKED + framed(A + F)), Hold()))) as stub:
        started = time.monotonic()
        streamed = await run(client, endpoint_at(stub.url))
        assert 1.5 < time.monotonic() - started < 10
        await gone(stub.connections[0])
    assert streamed.execution.outcome == "succeeded"


async def test_a_stream_that_owes_a_choice_is_waited_on(client: EndpointClient) -> None:
    late = data(chunk("b", index=1)) + data(chunk(None, "stop", index=1)) + DONE
    script = Script((Write(CHUNKED + framed(A + F)), Pause(2.6), Write(framed(late) + END)))
    async with StubBackend(script) as stub:
        streamed = await run(client, endpoint_at(stub.url), call_of(CHAT.operation, n=2))
    assert (streamed.execution.outcome, streamed.execution.chunk_count) == ("succeeded", 4)


@pytest.mark.parametrize("end", [(Pause(0.2), Reset()), (Hold(),)], ids=["reset", "hold"])
async def test_a_stream_that_owes_a_choice_and_breaks_is_a_failure(
    client: EndpointClient, end: tuple[Step, ...]
) -> None:
    script = Script((Write(CHUNKED + framed(A + F)), *end))
    async with StubBackend(script) as stub:
        endpoint = endpoint_at(stub.url, idle_timeout_ms=400)
        streamed = await run(client, endpoint, call_of(CHAT.operation, n=2))
    assert streamed.execution.outcome == "failed"

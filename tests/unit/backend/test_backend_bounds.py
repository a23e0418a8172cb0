"""Bounds and cancellation: whatever ends a call early closes its connection, and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import gzip
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dispatch.backend import EndpointClient, transport
from dispatch.backend.execution import ErrorType, Execution
from tests.support.calls import COMPLETION, chat_call, endpoint_at
from tests.support.stub import (
    CERTIFICATE,
    Fin,
    Hold,
    Pause,
    Reset,
    Script,
    SeenConnection,
    StubBackend,
    Write,
    answer_bytes,
    free_port,
    json_answer,
)

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
TCP_TABLE = Path("/proc/net/tcp")
SILENT = Script((Hold(),))


def kind(execution: Execution) -> str | None:
    return None if execution.head.error is None else execution.head.error.type


async def gone(connection: SeenConnection, within_s: float = 1.0) -> None:
    with anyio.fail_after(within_s):
        await connection.closed.wait()
    assert connection.closed_by == "client"


@pytest.fixture
def full_port() -> Iterator[int]:
    """A port whose queue of new connections is full: further ones hang."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize(
    ("steps", "retryable", "error"),
    [
        ((Fin(),), True, ErrorType.DISCONNECTED),
        ((Reset(),), True, ErrorType.DISCONNECTED),
        ((Write(b"HTTP/1.1 200 OK\r\ncontent-le"), Fin()), False, ErrorType.DISCONNECTED),
        ((Write(HEAD + b"content-length: 9\r\n\r\n"), Fin()), True, ErrorType.DISCONNECTED),
        ((Write(HEAD + b"content-length: 9\r\n\r\n{"), Fin()), False, ErrorType.DISCONNECTED),
        ((Write(HEAD + b"content-length: 9\r\n\r\n{"), Pause(0.1), Reset()), False, ErrorType.DISCONNECTED),
        ((Write(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"), Fin()), False, ErrorType.DISCONNECTED),
        ((Write(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n"), Fin()), False, ErrorType.UNREADABLE),
        ((Write(HEAD + b"\r\n{"), Fin()), False, ErrorType.UNREADABLE),
        ((Write(HEAD + b"\r\n"), Fin()), False, ErrorType.UNREADABLE),
        ((Write(HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}"),), False, ErrorType.UNREADABLE),
        ((Write(b"hello"), Fin()), False, ErrorType.UNREADABLE),
        ((Write(b"\x16\x03\x01\x02\x00"), Fin()), False, ErrorType.UNREADABLE),
        ((Write(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n"), Fin()), False, ErrorType.UNREADABLE),
        ((Write(b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"), Hold()), False, ErrorType.UNREADABLE),
        ((Write(b"HTTP/1.1 204 None\r\n\r\n"),), False, ErrorType.UNREADABLE),
    ],
)
async def test_broken_answers_are_failures_and_never_raise(
    client: EndpointClient, steps: tuple[Write, ...], retryable: bool, error: ErrorType
) -> None:
    async with StubBackend(Script(steps)) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
        assert (execution.outcome, execution.verdict, kind(execution)) == ("failed", "failure", error)
        assert execution.retryable is retryable
        assert execution.body == b""
        assert len(stub.requests) == 1
    del execution
    gc.collect()  # a response that was not closed would be a ResourceWarning here


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 \xe9\xff\r\ncontent-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION),
        b"HTTP/1.1 200\r\ncontent-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION),
        b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(COMPLETION), COMPLETION),
        b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"
        % (len(COMPLETION), COMPLETION),
        answer_bytes(COMPLETION, headers=[("set-cookie", "\xff=\xfe; Path=\x01"), ("content-type", "\xff")]),
        answer_bytes(gzip.compress(COMPLETION), headers=[("content-encoding", "gzip")]),
        answer_bytes(gzip.compress(gzip.compress(COMPLETION)), headers=[("content-encoding", "gzip, gzip")]),
    ],
)
async def test_odd_but_whole_answers_succeed(client: EndpointClient, answer: bytes) -> None:
    async with StubBackend(Script((Write(answer), Hold()))) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
    assert execution.outcome == "succeeded"
    assert execution.body == COMPLETION
    assert not {"content-encoding", "content-length", "set-cookie"} & dict(execution.head.headers).keys()


async def test_an_error_that_breaks_off_is_judged_by_its_head(client: EndpointClient) -> None:
    head = b"HTTP/1.1 429 Slow\r\nretry-after: 3\r\ncontent-length: 100\r\n\r\n{"
    async with StubBackend([Script((Write(head), Fin())), Script((Write(head), Hold()))]) as stub:
        for _ in range(2):
            endpoint = endpoint_at(stub.url, idle_timeout_ms=200)
            execution = await client.execute(endpoint, chat_call(), deadline_s=5)
            assert (execution.verdict, execution.retryable, execution.hold_ms) == ("backpressure", True, 3_000)
            assert execution.head.status == 429


async def test_nobody_listens(client: EndpointClient) -> None:
    execution = await client.execute(endpoint_at(f"http://127.0.0.1:{free_port()}"), chat_call(), deadline_s=5)
    assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "failure", True)
    assert kind(execution) == ErrorType.UNREACHABLE
    assert execution.head.status is None
    assert execution.head.error is not None
    assert "refused" in execution.head.error.message


async def test_no_such_host(client: EndpointClient) -> None:
    execution = await client.execute(endpoint_at("http://no-such-host.invalid"), chat_call(), deadline_s=9)
    assert (kind(execution), execution.retryable) == (ErrorType.UNREACHABLE, True)


async def test_tls_where_there_is_none(client: EndpointClient) -> None:
    async with StubBackend(Script((Write(b"HTTP/1.1 400 No\r\n\r\n"), Fin()), begin="connection")) as stub:
        endpoint = endpoint_at(stub.url.replace("http:", "https:"))
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
    assert (kind(execution), execution.retryable) == (ErrorType.UNREACHABLE, True)
    assert execution.head.error is not None
    assert "TLS" in execution.head.error.message


async def test_connecting_is_bounded(client: EndpointClient, full_port: int) -> None:
    endpoint = endpoint_at(f"http://127.0.0.1:{full_port}", connect_timeout_ms=200)
    execution = await client.execute(endpoint, chat_call(), deadline_s=5)
    assert (kind(execution), execution.verdict, execution.retryable) == (ErrorType.UNREACHABLE, "failure", True)
    assert 150 <= execution.execution_ms <= 1_500


async def test_the_head_is_bounded_also_when_it_trickles(client: EndpointClient) -> None:
    trickle = Script(tuple(step for byte in b"HTTP/1.1 200 OK\r\n" for step in (Write(bytes([byte])), Pause(0.05))))
    async with StubBackend([SILENT, trickle]) as stub:
        for number in range(2):
            endpoint = endpoint_at(stub.url, first_byte_timeout_ms=200)
            execution = await client.execute(endpoint, chat_call(), deadline_s=5)
            assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "failure", False)
            assert kind(execution) == ErrorType.TIMEOUT
            await gone(stub.connections[number])


async def test_pauses_in_the_body_are_bounded_each(client: EndpointClient) -> None:
    slow = [step for byte in b'{"choices":[]}' for step in (Write(bytes([byte])), Pause(0.05))]
    steady = Script((Write(HEAD + b"content-length: 14\r\n\r\n"), *slow))
    stuck = Script((Write(HEAD + b"content-length: 14\r\n\r\n{"), Hold()))
    async with StubBackend([steady, stuck]) as stub:
        endpoint = endpoint_at(stub.url, idle_timeout_ms=300, first_byte_timeout_ms=300)
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert execution.outcome == "succeeded"
        assert execution.execution_ms >= 600
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert (execution.outcome, kind(execution)) == ("failed", ErrorType.TIMEOUT)
        await gone(stub.connections[0])


@pytest.mark.parametrize("steps", [(Hold(),), (Write(HEAD + b"content-length: 14\r\n\r\n{"), Hold())])
async def test_the_deadline_ends_the_call_and_its_connection(client: EndpointClient, steps: tuple[Write, ...]) -> None:
    async with StubBackend(Script(steps)) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=0.3)
        assert (execution.outcome, execution.verdict, execution.retryable) == ("expired", "neutral", False)
        assert execution.head.error is not None
        assert (execution.head.error.type, execution.head.error.source) == ("deadline_exceeded", "dispatch")
        assert 250 <= execution.execution_ms <= 1_500
        await gone(stub.connections[0])


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan")])
async def test_a_deadline_that_has_passed_makes_no_call(client: EndpointClient, deadline_s: float) -> None:
    async with StubBackend(SILENT) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=deadline_s)
        assert execution.outcome == "expired"
        assert stub.connections == []


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"content-length: 2000000\r\n\r\n",
        HEAD + b"\r\n" + b"x" * 200_000,
        HEAD + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b" " * 5_000_000),
    ],
)
async def test_a_reply_beyond_the_bound_is_given_up(client: EndpointClient, answer: bytes) -> None:
    async with StubBackend(Script((Write(answer), Hold()))) as stub:
        endpoint = endpoint_at(stub.url, max_response_bytes=100_000)
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert (execution.outcome, execution.verdict, kind(execution)) == ("failed", "neutral", ErrorType.TOO_LARGE)
        assert execution.body == b""
        await gone(stub.connections[0])


async def test_a_stream_that_nobody_asked_for_is_ended_at_once(client: EndpointClient) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
    event = (Write(b'data: {"choices":[]}\n\n'), Pause(0.05))
    endless = Script((Write(head), *(event * 200)))
    async with StubBackend(endless) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=9)
        assert (execution.outcome, kind(execution)) == ("failed", ErrorType.UNREADABLE)
        assert execution.execution_ms < 1_000
        assert execution.head.error is not None
        assert "event stream" in execution.head.error.message
        await gone(stub.connections[0])


async def test_a_reply_of_exactly_the_bound_is_whole(client: EndpointClient) -> None:
    body = b'{"a":"' + b"x" * 1_000_000 + b'"}'
    async with StubBackend(json_answer(body)) as stub:
        endpoint = endpoint_at(stub.url, max_response_bytes=len(body))
        assert (await client.execute(endpoint, chat_call(), deadline_s=5)).body == body


@pytest.mark.parametrize(
    ("script", "body"),
    [
        (SILENT, b"{}"),
        (Script((Write(HEAD + b"content-length: 14\r\n\r\n{"), Hold())), b"{}"),
        (Script((Hold(),), begin="connection", deaf=True), b"x" * 16_000_000),
    ],
    ids=["before the head", "inside the body", "while sending"],
)
async def test_cancelling_closes_the_connection_at_once(client: EndpointClient, script: Script, body: bytes) -> None:
    async with StubBackend(script) as stub:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: client.execute(endpoint_at(stub.url), chat_call(body), deadline_s=60))
                await stub.until(lambda seen: bool(seen.connections))
                if script.begin == "request":
                    await stub.until(lambda seen: bool(seen.requests))
                with anyio.move_on_after(0.2):
                    await stub.connections[0].closed.wait()
                cancelled_at = time.monotonic()
                scope.cancel()
        assert time.monotonic() - cancelled_at < 0.5
        if script.deaf:  # a stub that does not read cannot see an end: ask the kernel for our side of it
            await no_sockets_to(stub.port)
        else:
            await gone(stub.connections[0], 0.5)


@pytest.mark.parametrize("secure", [False, True])
async def test_a_cancelled_task_closes_its_connection(
    client: EndpointClient, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    transport._trust.cache_clear()
    async with StubBackend(Script((Write(HEAD + b"content-length: 14\r\n\r\n{"), Hold())), secure=secure) as stub:
        task = asyncio.create_task(client.execute(endpoint_at(stub.url), chat_call(), deadline_s=60))
        await stub.until(lambda seen: bool(seen.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(stub.connections[0], 0.5)
    transport._trust.cache_clear()


async def test_a_timeout_around_a_call_closes_its_connection(client: EndpointClient) -> None:
    async with StubBackend(SILENT) as stub:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=60)
        await gone(stub.connections[0], 0.5)


def sockets_to(port: int) -> list[str]:
    """Return the kernel's states of our sockets to the remote port `port`, without those in TIME_WAIT."""
    if not TCP_TABLE.exists():
        return []
    rows = [line.split() for line in TCP_TABLE.read_text().splitlines()[1:]]
    return [row[3] for row in rows if int(row[2].split(":")[1], 16) == port and row[3] != "06"]


async def no_sockets_to(port: int) -> None:
    """Return when none is left; the event loop needs a turn or two to hand a closed socket back."""
    with anyio.fail_after(1):
        while sockets_to(port):  # noqa: ASYNC110 - the kernel sets no event
            await anyio.sleep(0.005)


async def test_an_answer_before_the_request_is_through_is_read(client: EndpointClient) -> None:
    refusal = json_answer(b'{"error":{"message":"too large"}}', status="413 Too Large")
    early = Script((Pause(0.1), *refusal.steps, Hold()), begin="connection", deaf=True)
    async with StubBackend(early) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(b"x" * 16_000_000), deadline_s=5)
        assert (execution.head.status, execution.verdict) == (413, "neutral")
        assert b"too large" in execution.body
        await no_sockets_to(stub.port)


def connections_in_use(client: EndpointClient) -> int:
    [pool] = client._transports.values()
    assert pool.client is not None
    return len(pool.client.connector._acquired)


async def test_a_storm_of_cancels_while_connecting_leaks_nothing(client: EndpointClient, full_port: int) -> None:
    hanging = endpoint_at(f"http://127.0.0.1:{full_port}", connect_timeout_ms=60_000)
    async with anyio.create_task_group() as tasks:
        for _ in range(200):
            tasks.start_soon(lambda: client.execute(hanging, chat_call(), deadline_s=60))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    async with StubBackend(json_answer(COMPLETION)) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
        assert execution.outcome == "succeeded"
    assert connections_in_use(client) == 0
    assert len(sockets_to(full_port)) <= 4  # those of the fixture


async def test_a_storm_of_cancels_at_every_moment_leaks_nothing(client: EndpointClient) -> None:
    slow = Script((Pause(0.02), Write(HEAD + b"content-length: 14\r\n\r\n"), Pause(0.02), Write(b'{"choices":[]}')))
    async with StubBackend(slow) as stub:
        endpoint = endpoint_at(stub.url)

        async def call(after_s: float) -> None:
            with anyio.move_on_after(after_s):
                await client.execute(endpoint, chat_call(b"x" * 300_000), deadline_s=5)

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(call, 0.0005 * number)
        assert connections_in_use(client) == 0
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert execution.outcome == "succeeded"
        assert stub.open_connections <= 200
    gc.collect()

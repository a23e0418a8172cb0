"""Faults of streams that people who run such systems have reported, played through the front door."""

from __future__ import annotations

import itertools
import json
import signal
import time
from typing import Any

import anyio
import openai
import pytest

from dispatch.errors import RequestEnded
from dispatch.fabric import functions
from dispatch.fabric.sync import BlockingConnection
from dispatch.ingress import IngressSettings
from dispatch.producer.client import DispatchClient
from dispatch.producer.streaming import ChunkStream
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.leftovers import counters_above_zero, endings_by_request
from tests.support.producing import MESSAGES, until
from tests.support.stack import Stack, stack
from tests.support.streams import CHUNKED, DONE, END, HEAD, chunk, data, framed, gone
from tests.support.stub import Fin, Hold, Pause, Reset, Script, Step, StubBackend, Write
from tests.support.valkey import ValkeyProcess
from tests.support.wire import Wire

pytestmark = [pytest.mark.anyio, pytest.mark.container]

BODY = b'{"model":"m","messages":[],"stream":true}'
ONE, TWO, STOP = data(chunk("one")), data(chunk("two")), data(chunk(None, "stop"))
HALF = b'data: {"id":"c1","choi'
ONE_SLOT = {"pools": [{"pool_id": "default", "quantum": 1, "max_concurrent": 1}]}
QUICK = IngressSettings(stream_head_s=0.3, stream_keep_alive_s=0.2)


def script(*steps: Step | bytes, head: bytes = HEAD) -> Script:
    return Script((Write(head), *(Write(step) if isinstance(step, bytes) else step for step in steps)))


async def heard(port: int, **headers: str) -> Wire:
    """Make a call and read its answer to the end."""
    async with Wire(port) as wire:
        await wire.post(BODY, **headers)
        await wire.head()
        await wire.rest()
    return wire


def error_event(body: bytes) -> dict[str, Any]:
    """Return the error that is the last event of a stream."""
    *_, last, rest = body.split(b"\n\n")
    assert rest == b""
    error: dict[str, Any] = json.loads(last.removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def once_and_clean(valkey: ValkeyProcess, path: Stack, ending: str) -> None:
    """Every request has ended so, once; nothing is left, and a slot is free."""
    await until(lambda: counters_above_zero(valkey.url, path.group) == {})
    assert {row["ending"] for row in path.endings()} == {ending}
    assert set(endings_by_request(valkey.url, path.group).values()) == {1}


TRUNCATED = {
    "two whole events": script(ONE, TWO, Fin()),
    "half an event": script(ONE, TWO, HALF, Fin()),
    "reset": script(framed(ONE), framed(TWO), Pause(0.1), Reset(), head=CHUNKED),
    "no last chunk": script(framed(ONE), framed(TWO), Fin(), head=CHUNKED),
    "done without a finish_reason": script(ONE, TWO, DONE, Fin()),
}


@pytest.mark.parametrize("name", TRUNCATED)
async def test_a_truncated_stream_is_no_finished_answer(valkey: ValkeyProcess, name: str) -> None:
    """Field report 7, a to d."""
    async with StubBackend(TRUNCATED[name]) as stub, stack(valkey.url, f"{stub.url}/v1", **ONE_SLOT) as path:
        wire = await heard(path.port)
        assert (wire.status, bytes(wire.body)[: len(ONE + TWO)]) == (200, ONE + TWO)
        assert error_event(bytes(wire.body))["message"]
        assert b'finish_reason": "' not in wire.body
        assert DONE not in wire.body
        await once_and_clean(valkey, path, "failed")
        assert len(stub.requests) == 1
        with pytest.raises(RequestEnded) as caught:
            [each async for each in path.client.stream(model="m", messages=MESSAGES)]
        assert caught.value.reply.ending == "failed"


async def test_a_finish_reason_without_done_is_a_success(valkey: ValkeyProcess) -> None:
    """Field report 7e."""
    async with StubBackend(script(ONE, STOP, Fin())) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        wire = await heard(path.port)
        assert bytes(wire.body) == ONE + STOP + DONE
        await once_and_clean(valkey, path, "succeeded")


ERRORS: dict[str, tuple[bytes, str, int]] = {
    "typed 400": (
        b'data: {"error":{"message":"prompt too long","type":"BadRequestError","param":null,"code":400}}\n\n' + DONE,
        "prompt too long", 502,
    ),
    "bare": (b'data: {"object":"error","message":"prompt too long","code":400}\n\n', "prompt too long", 502),
    "in the middle": (ONE + b'data: {"error":"overloaded","error_type":"overloaded"}\n\n', "overloaded", 200),
    "named": (b'event: error\ndata: {"error":{"message":"boom","code":null}}\n\n', "boom", 502),
    "nothing": (b"", "", 502),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_inside_a_200_is_one(valkey: ValkeyProcess, name: str) -> None:
    """Field report 9: an error before the first chunk has a status, after it an event; never a success."""
    body, says, status = ERRORS[name]
    async with StubBackend(script(body, Fin())) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        wire = await heard(path.port)
        assert wire.status == status
        error = wire.error() if status != 200 else error_event(bytes(wire.body))
        assert says in error["message"]
        await once_and_clean(valkey, path, "failed")


@pytest.mark.parametrize("chunks", [0, 1])
async def test_a_silent_backend_is_given_up_at_the_deadline(valkey: ValkeyProcess, chunks: int) -> None:
    """Field reports 13 and 39: executing is a 504, a stream that has begun gets an event."""
    silent = script(*[framed(ONE)] * chunks, Hold(), head=CHUNKED)
    async with StubBackend(silent) as stub, stack(valkey.url, f"{stub.url}/v1", **ONE_SLOT) as path:
        started = time.monotonic()
        wire = await heard(path.port, x_dispatch_timeout_ms="1000")
        assert 0.9 < time.monotonic() - started < 4
        await gone(stub.connections[0])
        assert wire.status == (200 if chunks else 504)
        error = error_event(bytes(wire.body)) if chunks else wire.error()
        assert error["code"] == "deadline_exceeded"
        await once_and_clean(valkey, path, "expired")


async def test_a_silent_backend_is_given_up_without_a_deadline_too(valkey: ValkeyProcess) -> None:
    endpoint = {"endpoint_id": "default", "idle_timeout_ms": 500}
    async with (
        StubBackend(script(framed(ONE), Hold(), head=CHUNKED)) as stub,
        stack(valkey.url, "", endpoints=[{**endpoint, "url": f"{stub.url}/v1"}], **ONE_SLOT) as path,
    ):
        wire = await heard(path.port)
        assert error_event(bytes(wire.body))["code"] == "endpoint_timeout"
        await once_and_clean(valkey, path, "failed")


async def test_a_deadline_in_the_queue_is_a_refusal_with_its_status(valkey: ValkeyProcess) -> None:
    """Field reports 39 and 51: while it is queued the status is open, however long that takes."""
    async with (
        StubBackend(script(ONE, Hold())) as stub,
        stack(valkey.url, f"{stub.url}/v1", settings=QUICK, **ONE_SLOT) as path,
        Wire(path.port) as first,
    ):
        await first.post(BODY)
        await first.head()
        wire = await heard(path.port, x_dispatch_timeout_ms="1500")
        assert (wire.status, wire.headers["x-dispatch-reason"]) == (429, "rejected-deadline")
        assert len(stub.requests) == 1


async def test_a_long_time_to_the_first_token_does_not_look_dead(valkey: ValkeyProcess) -> None:
    """Field report 51, times shortened: the head some time after the call began, then comments, never in an event."""
    cut = len(ONE) // 2
    slow = script(Pause(1.5), ONE[:cut], Pause(1.0), ONE[cut:] + STOP + DONE, Fin())
    async with StubBackend(slow) as stub, stack(valkey.url, f"{stub.url}/v1", settings=QUICK) as path:
        async with Wire(path.port) as wire:
            await wire.post(BODY)
            await stub.until(lambda stub: len(stub.requests) == 1)
            began = time.monotonic()
            assert await wire.head() == 200
            assert 0.2 < time.monotonic() - began < 1.3
            assert int(wire.headers["x-dispatch-queue-ms"]) >= 0
            assert wire.headers["cache-control"] == "no-cache, no-transform"
            assert wire.headers["x-accel-buffering"] == "no"
            body = await wire.rest()
        assert body.replace(b": keep-alive\n\n", b"") == ONE + STOP + DONE
        assert body.count(b": keep-alive\n\n") >= 4
        gaps = [later - earlier for earlier, later in itertools.pairwise(wire.times)]
        assert max(gaps) < 1.0
        await once_and_clean(valkey, path, "succeeded")


async def test_comments_are_no_chunks_for_the_openai_package(valkey: ValkeyProcess) -> None:
    slow = script(Pause(1.0), ONE, Pause(0.6), STOP + DONE, Fin())
    async with (
        StubBackend(slow) as stub,
        stack(valkey.url, f"{stub.url}/v1", settings=QUICK) as path,
        openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        assert [each.choices[0].delta.content async for each in stream] == ["one", None]


@pytest.mark.parametrize("how", ["client", "operator", "gateway"])
async def test_an_interrupted_stream_is_one_row_that_says_so(valkey: ValkeyProcess, how: str) -> None:
    """Field report 11: after some chunks the client closes, an operator cancels, or the gateway ends."""
    many = [step for number in range(50) for step in (Write(data(chunk(str(number)))), Pause(0.1))]
    async with StubBackend(Script((Write(HEAD), *many))) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with Wire(path.port) as wire:
            await wire.post(BODY)
            await wire.head()
            await wire.until(data(chunk("4")))
            request_id = wire.headers["x-dispatch-request-id"]
            if how == "operator":
                with BlockingConnection(valkey.url) as connection:
                    connection.run(path.group, functions.request_cancel(request_id, actor="ops"))
            elif how == "gateway":
                await path.gateway.stop()
            if how != "client":
                body = await wire.rest()
                assert error_event(body)["code"] == {"operator": "cancelled", "gateway": "lost"}[how]
                assert body.startswith(data(chunk("0")) + data(chunk("1")))
        await gone(stub.connections[0], 2)
        await once_and_clean(valkey, path, "lost" if how == "gateway" else "cancelled")
        [row] = path.endings()
        assert row["request_id"] == request_id
        assert row["chunks"] >= 5


async def test_a_slow_client_holds_no_slot(valkey: ValkeyProcess) -> None:
    """The backend's stream ends at its own pace; what the client has not read waits in its connection and buffer."""
    piece = data(chunk("x" * 20_000))
    large = script(*[piece] * 100, STOP + DONE, Fin())
    async with StubBackend(large) as stub, stack(valkey.url, f"{stub.url}/v1", **ONE_SLOT) as path:
        async with Wire(path.port) as slow:
            await slow.post(BODY)
            await slow.head()
            await until(lambda: path.endings() != [])  # though nothing of the body was read
            assert (await heard(path.port)).status == 200
            assert await slow.rest() == piece * 100 + STOP + DONE
        await once_and_clean(valkey, path, "succeeded")


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.long)])
async def test_a_client_that_leaves_with_done_was_served(valkey: ValkeyProcess, count: int) -> None:
    """Field report 53."""

    async def read_and_leave(port: int, *, reset: bool) -> None:
        async with Wire(port) as wire:
            await wire.post(BODY)
            await wire.head()
            await wire.until(DONE)
            if reset:
                await wire.reset()

    async with (
        StubBackend(lambda _: script(framed(ONE + STOP + DONE), END, head=CHUNKED)) as stub,
        stack(valkey.url, f"{stub.url}/v1") as path,
    ):
        for _ in range(0, count, 20):
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(lambda reset=bool(number % 2): read_and_leave(path.port, reset=reset))
        await until(lambda: counters_above_zero(valkey.url, path.group) == {})
        [row] = [row for row in path.section("pools")["rows"] if row["pool_id"] == "default"]
        assert {name: number for name, number in row["endings"].items() if number} == {"succeeded": count}


async def test_a_half_closed_client_counts_as_gone(valkey: ValkeyProcess) -> None:
    """Field report 53: the same as without a stream."""
    async with StubBackend(script(ONE, Hold())) as stub, stack(valkey.url, f"{stub.url}/v1", **ONE_SLOT) as path:
        async with Wire(path.port) as wire:
            await wire.post(BODY)
            await wire.head()
            await wire.until(ONE)
            await wire._stream.send_eof()
            await gone(stub.connections[0], 2)
        await once_and_clean(valkey, path, "cancelled")


async def test_a_producer_that_dies_stops_its_streams(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(script(*[step for _ in range(200) for step in (Write(ONE), Pause(0.05))])) as stub,
        stack(valkey.url, f"{stub.url}/v1", **ONE_SLOT) as path,
    ):
        client = DispatchClient(valkey.url, fabric_group=path.group, liveness_ms=900, close_ms=50)
        async with client:
            stream = client.stream(model="m", messages=MESSAGES)
            await stream.read()
            client._path._liveness.stop()  # type: ignore[union-attr] # as if the process had died
            await gone(stub.connections[0], 5)
        await until(lambda: counters_above_zero(valkey.url, path.group) == {})
        assert {row["ending"] for row in path.endings()} <= {"producer_gone", "cancelled", "reply_dropped"}


@pytest.mark.parametrize("ends", [True, False])
async def test_a_gateway_process_that_is_told_to_stop_ends_its_streams(valkey: ValkeyProcess, ends: bool) -> None:
    """Field report 5: what can finish within the drain finishes, the rest is told, and open streams hold up no exit."""
    last: tuple[Step | bytes, ...] = (Pause(1.0), STOP + DONE, Fin()) if ends else (Hold(),)
    async with StubBackend(script(ONE, *last)) as stub:
        group = unique_group()
        configure(valkey.url, group, default_document(f"{stub.url}/v1"))
        async with GatewayProcess(valkey.url, group, drain_timeout_ms=3_000) as gateway:
            async with Wire(int(gateway.url.rpartition(":")[2])) as wire:
                await wire.post(BODY)
                await wire.head()
                await wire.until(ONE)
                gateway.signal(signal.SIGTERM)
                body = await wire.rest()
            assert await gateway.ended(15) == 0
        assert body.startswith(ONE)
        if ends:
            assert body == ONE + STOP + DONE
        else:
            assert error_event(body)["code"] == "lost"


async def read_on(stream: ChunkStream, texts: list[str]) -> None:
    """Note the text of each chunk until the stream ends."""
    async for part in stream:
        texts.append(part.text)  # noqa: PERF401 - what came before the error counts


async def test_a_frozen_gateway_that_wakes_adds_nothing_to_its_stream(valkey: ValkeyProcess) -> None:
    """Field report 27: chunks of one run only, in order; the zombie drops its backend, and the ending is one."""
    steps = [step for at in range(400) for step in (Write(data(chunk(f"{at} "))), Pause(0.05))]
    async with StubBackend(script(*steps)) as stub:
        group = unique_group()
        document = default_document(f"{stub.url}/v1")
        document["pools"] = [{"pool_id": "default", "delivery": "at_least_once", "max_attempts": 3}]
        document["lease_ms"] = 1_000
        configure(valkey.url, group, document)
        async with (
            GatewayProcess(valkey.url, group, gateway_id="zombie") as zombie,
            DispatchClient(valkey.url, fabric_group=group) as client,
        ):
            stream = client.stream(model="m", messages=MESSAGES)
            texts = [(await anext(stream)).text for _ in range(3)]
            async with GatewayProcess(valkey.url, group, gateway_id="other"):
                zombie.signal(signal.SIGSTOP)
                try:
                    with pytest.raises(RequestEnded) as ended:
                        await read_on(stream, texts)
                finally:
                    zombie.signal(signal.SIGCONT)
                await gone(stub.connections[0], 3)
                await until(lambda: counters_above_zero(valkey.url, group) == {})
            assert ended.value.reply.ending == "lost"
            assert [int(text) for text in texts] == list(range(len(texts)))
            assert len(stub.connections) == 1  # of what its caller has begun to read, no other run follows
        assert list(endings_by_request(valkey.url, group).values()) == [1]

"""Streams of both clients, queued and direct, on a gateway before a scripted backend."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dispatch import DispatchClient, Gateway, GatewaySettings, sync
from dispatch.contract import Call, Chunk, Operation, Reply, read_call
from dispatch.errors import BackendError, InvalidRequest, PoolUnknown, RequestEnded, StateConflict, StreamTooSlow
from dispatch.fabric import functions
from dispatch.fabric.sync import BlockingConnection
from dispatch.producer.options import CallOptions
from tests.support.groups import configure, default_document, unique_group
from tests.support.leftovers import counters_above_zero
from tests.support.producing import MESSAGES, frames_left, say, until
from tests.support.streams import CHUNKED, DONE, END, HEAD, chunk, data, framed
from tests.support.stub import Fin, Hold, Pause, Script, SeenRequest, StubBackend, Write, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

WAYS = ["queued", "queued sync", "direct", "direct sync"]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
PAYLOADS = [chunk("é"), chunk("\u2028"), chunk(None, "stop"), chunk(None, choices=[], usage=USAGE)]
GOOD = Script(
    (Write(HEAD), *[step for each in PAYLOADS for step in (Write(data(each)), Pause(0.02))], Write(DONE), Fin())
)
ENDLESS = Script((Write(HEAD), *[step for _ in range(2_000) for step in (Write(data(chunk("x"))), Pause(0.02))]))


class World:
    """One group, a gateway, a backend, and clients of every kind. Blocking code runs in a thread."""

    def __init__(self, url: str, stub: StubBackend, group: str) -> None:
        self.url = url
        self.stub = stub
        self.group = group

    async def use(self, way: str, work: Callable[[Any, Callable[..., Any]], Any], **options: Any) -> Any:
        """Call `work(client, each)`; `each(stream)` gives its chunks, and its reply."""
        given: dict[str, Any] = {"fabric_group": self.group, "close_ms": 200} | options
        if "direct" in way:
            given = {"direct": True, "endpoint": f"{self.stub.url}/v1"} | options
        url = "" if "direct" in way else self.url
        if "sync" not in way:
            async with DispatchClient(url, **given) as client:
                return await work(client, read_all)
        return await anyio.to_thread.run_sync(self._blocking, work, url, given)

    @staticmethod
    def _blocking(work: Callable[[Any, Callable[..., Any]], Any], url: str, given: dict[str, Any]) -> Any:
        def each(stream: Any) -> Any:
            return Done((list(stream), stream.reply))

        with sync.DispatchClient(url, **given) as client:
            try:
                work(client, each).send(None)
            except StopIteration as result:
                return result.value
            raise AssertionError("blocking work does not wait")

    def endings(self) -> list[dict[str, Any]]:
        with BlockingConnection(self.url) as connection:
            rows: list[dict[str, Any]] = connection.run(self.group, functions.fabric_snapshot("endings"))["rows"]
            return rows

    async def clean(self) -> None:
        await until(lambda: counters_above_zero(self.url, self.group) == {})


class Done:
    """A value that is there, for code that awaits."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self._value
        yield


async def read_all(stream: Any) -> tuple[list[Chunk], Reply]:
    return [each async for each in stream], stream.reply


@asynccontextmanager
async def world(valkey: ValkeyProcess, answers: Any, **group: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as exits:
        stub = await exits.enter_async_context(StubBackend(answers))
        name = unique_group()
        configure(valkey.url, name, default_document(f"{stub.url}/v1") | {"total_concurrent_dispatch": 200} | group)
        settings = GatewaySettings(valkey_url=valkey.url, fabric_group=name, drain_timeout_ms=200, slots=200)
        await exits.enter_async_context(Gateway(settings))
        yield World(valkey.url, stub, name)


def call(operation: Operation = Operation.CHAT_COMPLETIONS, main: str = "[]") -> Call:
    body = f'{{"model":"m","{operation.main_member}":{main},"stream":true}}'
    return read_call(operation, body.encode())


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_gives_the_same_chunks_and_reply(valkey: ValkeyProcess, way: str) -> None:
    async def work(client: Any, each: Any) -> Any:
        return await each(client.stream(model="m", messages=MESSAGES, pool="interactive", temperature=0.5, timeout=20))

    async with world(valkey, GOOD) as on:
        chunks, reply = await on.use(way, work)
        assert [one.data for one in chunks] == PAYLOADS
        assert "".join(one.text for one in chunks) == "é\u2028"
        assert (reply.ending, reply.status, reply.attempt, reply.body) == ("succeeded", 200, 1, b"")
        assert (reply.head.finish_reasons, reply.usage.output_tokens) == (("stop",), 2)
        assert (reply.queue_ms is None) is ("direct" in way)
        [seen] = on.stub.requests
        assert b'"stream":true,"temperature":0.5' in seen.body
        await on.clean()


@pytest.mark.parametrize("way", WAYS)
async def test_errors_are_those_of_complete(valkey: ValkeyProcess, way: str) -> None:
    def answer(request: SeenRequest) -> Script:
        if b"refuse" in request.body:
            return json_answer(b'{"error":{"message":"no"}}', status="400 Bad")
        return Script((Write(HEAD), Write(data(chunk("a"))), Fin()))

    async def work(client: Any, each: Any) -> None:
        kind = BackendError if "direct" in way else RequestEnded
        for text, body in (("refuse", b'{"error":{"message":"no"}}'), ("break off", b"")):
            stream = client.stream(model="m", messages=say(text))
            with pytest.raises(kind) as caught:
                await each(stream)
            assert caught.value.reply == stream.reply
            assert (stream.reply.ending, stream.reply.body) == ("failed", body)
            stream = client.stream_call(read_call(Operation.CHAT_COMPLETIONS, _body(text)))
            chunks, reply = await each(stream)
            assert (len(chunks), reply.ending) == (int(not body), "failed")
        if "direct" not in way:
            with pytest.raises(PoolUnknown):
                await each(client.stream(model="m", messages=MESSAGES, pool="nowhere"))
        for wrong in ({"stream": False}, {"temperature": float("nan")}, {"timeout": -1}):
            with pytest.raises(InvalidRequest):
                client.stream(model="m", messages=MESSAGES, **wrong)

    async with world(valkey, answer) as on:
        await on.use(way, work)
        await on.clean()


def _body(text: str) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"%b"}],"stream":true}' % text.encode()


@pytest.mark.parametrize("way", ["queued", "direct"])
async def test_leaving_a_stream_stops_the_backend(valkey: ValkeyProcess, way: str) -> None:
    async def breaks(client: Any) -> None:
        async for _ in client.stream(model="m", messages=MESSAGES):
            break

    async def closes(client: Any) -> None:
        async with client.stream(model="m", messages=MESSAGES) as stream:
            await anext(stream)

    async def is_cancelled(client: Any) -> None:
        with anyio.move_on_after(0.4):
            async for _ in client.stream(model="m", messages=MESSAGES):
                pass

    async def forgets(client: Any) -> None:
        stream = client.stream(model="m", messages=MESSAGES)
        await anext(stream)
        del stream
        gc.collect()

    async def work(client: Any, _each: Any) -> None:
        for number, leave in enumerate((breaks, closes, is_cancelled, forgets)):
            await leave(client)
            await on.stub.until(lambda stub, count=number: len(stub.requests) == count + 1 and not _open(stub))

    async with world(valkey, ENDLESS) as on:
        await on.use(way, work)
        await on.clean()
        if way == "queued":
            assert {row["ending"] for row in on.endings()} == {"cancelled"}


def _open(stub: StubBackend) -> bool:
    """Whether a call is still being answered."""
    return any(connection.requests and not connection.closed_by for connection in stub.connections)


@pytest.mark.parametrize("way", ["queued sync", "direct sync"])
async def test_leaving_a_stream_of_a_thread_stops_the_backend(valkey: ValkeyProcess, way: str) -> None:
    def breaks(client: Any) -> None:
        for _ in client.stream(model="m", messages=MESSAGES):
            break

    def closes(client: Any) -> None:
        with client.stream(model="m", messages=MESSAGES) as stream:
            next(stream)

    def is_interrupted(client: Any) -> None:
        stream = client.stream(model="m", messages=MESSAGES)
        next(stream)
        waited = stream.read(within_s=0.01)
        assert len(waited) <= 2
        stream.close()
        assert stream.read() == []

    async def work(client: Any, _each: Any) -> None:
        for leave in (breaks, closes, is_interrupted):
            leave(client)

    async with world(valkey, ENDLESS) as on:
        await on.use(way, work, **({} if "direct" in way else {"close_ms": 2_000}))
        await on.stub.until(lambda stub: len(stub.requests) == 3 and not _open(stub))
        await on.clean()


@pytest.mark.parametrize("operation", [Operation.COMPLETIONS, Operation.RESPONSES])
@pytest.mark.parametrize("way", WAYS)
async def test_the_other_operations_stream_as_raw_calls(valkey: ValkeyProcess, way: str, operation: Operation) -> None:
    done = b'{"type":"response.completed","response":{"id":"r","status":"completed","usage":{"input_tokens":1}}}'
    events = {
        Operation.COMPLETIONS: [(b"", b'{"id":"c","choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}')],
        Operation.RESPONSES: [
            (b"response.output_text.delta", b'{"type":"response.output_text.delta","delta":"hi"}'),
            (b"response.completed", done),
        ],
    }[operation]
    frames = b"".join(data(payload, event=name.decode()) for name, payload in events)

    async def work(client: Any, each: Any) -> Any:
        return await each(client.stream_call(call(operation, '"x"'), CallOptions(request_id="r-1")))

    async with world(valkey, Script((Write(HEAD), Write(frames), Fin()))) as on:
        chunks, reply = await on.use(way, work)
        assert [(one.event.encode(), one.data) for one in chunks] == events
        assert "".join(one.text for one in chunks) == "hi"
        assert (reply.ending, reply.request_id) == ("succeeded", "r-1")


async def test_many_streams_of_one_client_and_of_many_threads(valkey: ValkeyProcess) -> None:
    def answer(request: SeenRequest) -> Script:
        name = request.body.split(b'"content":"')[1].split(b'"')[0].decode()
        pieces = [Write(framed(data(chunk(f"{name}.{number} ")))) for number in range(20)]
        return Script((Write(CHUNKED), *pieces, Write(framed(data(chunk(None, "stop")) + DONE) + END)))

    texts: dict[str, str] = {}

    async def one(client: DispatchClient, name: str) -> None:
        texts[name] = "".join([each.text async for each in client.stream(model="m", messages=say(name))])

    def blocking() -> None:
        def read(number: int) -> None:
            stream = client.stream(model="m", messages=say(f"t{number}"))
            texts[f"t{number}"] = "".join(each.text for each in stream)

        with (
            sync.DispatchClient(on.url, fabric_group=on.group, producer_id="threads") as client,
            ThreadPoolExecutor(16) as threads,
        ):
            list(threads.map(read, range(50)))

    async with world(valkey, answer) as on:
        async with DispatchClient(on.url, fabric_group=on.group) as client, anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, client, f"a{number}")
            tasks.start_soon(anyio.to_thread.run_sync, blocking)
        await on.clean()
        assert texts == {name: "".join(f"{name}.{number} " for number in range(20)) for name in texts}
        assert len(texts) == 150
        assert frames_left(on.url, on.group, "threads") == 0


async def test_a_thread_that_reads_too_slowly_loses_its_stream_only(valkey: ValkeyProcess) -> None:
    piece = data(chunk("x" * 5_000))
    large = Script(
        (Write(HEAD), *[step for _ in range(60) for step in (Write(piece), Pause(0.01))], Write(DONE), Fin())
    )

    async def work(client: Any, each: Any) -> None:
        slow = client.stream(model="m", messages=MESSAGES)
        next(slow)
        with pytest.raises(RequestEnded):  # it is cut, and read to its end meanwhile
            each(client.stream(model="m", messages=MESSAGES)).__await__()
        with pytest.raises(StreamTooSlow, match="100000 bytes"):
            list(slow)

    async with world(valkey, large) as on:
        await on.use("queued sync", work, stream_unread_bytes=100_000)
        await on.clean()
        assert sorted(row["ending"] for row in on.endings()) == ["cancelled", "failed"]


async def test_a_direct_reader_that_is_slow_slows_the_backend_down() -> None:
    large = Script(
        (Write(HEAD), *[Write(data(chunk("x" * 100_000)))] * 80, Write(data(chunk(None, "stop")) + DONE), Fin())
    )
    async with StubBackend(large) as stub, DispatchClient(direct=True, endpoint=f"{stub.url}/v1") as client:
        stream = client.stream(model="m", messages=MESSAGES)
        await anext(stream)
        held = stream._source._held_bytes  # type: ignore[attr-defined] # of the direct one
        await anyio.sleep(0.3)
        assert stream._source._held_bytes <= max(held, 600_000)  # type: ignore[attr-defined] # as above
        assert len([each async for each in stream]) == 80


async def test_closing_a_direct_client_ends_its_streams() -> None:
    async with StubBackend(ENDLESS) as stub:
        async with DispatchClient(direct=True, endpoint=f"{stub.url}/v1") as client:
            stream = client.stream(model="m", messages=MESSAGES)
            await anext(stream)
        with pytest.raises(StateConflict, match="closed"):
            [each async for each in stream]
        await stub.until(lambda stub: not _open(stub))


INTERRUPTED = """
import sys
from dispatch.sync import DispatchClient
with DispatchClient(sys.argv[1], fabric_group=sys.argv[2]) as client:
    for chunk in client.stream(model="m", messages=[{"role": "user", "content": "x"}]):
        print(chunk.text, flush=True)
"""


async def test_an_interrupted_program_cancels_its_stream(valkey: ValkeyProcess) -> None:
    async with world(valkey, Script((Write(HEAD), Write(data(chunk("a"))), Hold()))) as on:
        command = [sys.executable, "-c", INTERRUPTED, on.url, on.group]
        async with await anyio.open_process(command, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            assert await process.stdout.receive() == b"a\n"
            process.send_signal(signal.SIGINT)
            assert await process.wait() != 0
        await until(lambda: [row["ending"] for row in on.endings()] == ["cancelled"])
        await on.stub.until(lambda stub: not _open(stub))
        await on.clean()


async def test_a_wait_of_a_thread_can_end_without_a_reply(valkey: ValkeyProcess) -> None:
    async def work(client: Any, _each: Any) -> None:
        whole = read_call(Operation.CHAT_COMPLETIONS, b'{"model":"m","messages":[]}')
        with pytest.raises(TimeoutError):
            client.call(whole, within_s=0.3)
        stream = client.stream(model="m", messages=MESSAGES)
        assert stream.read(within_s=0.3) == []
        assert stream.whereabouts().running_ms > 0
        stream.close()

    async with world(valkey, Script((Hold(),))) as on:
        await on.use("queued sync", work)
        await on.clean()
        assert {row["ending"] for row in on.endings()} == {"cancelled"}

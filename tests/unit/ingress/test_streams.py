"""Streams over HTTP, on a group in memory: when the head goes out, what is written, and when the client leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dispatch.contract.event_stream import DONE, KEEP_ALIVE
from dispatch.ingress import IngressSettings, IngressState, create_app
from dispatch.producer.client import DispatchClient
from tests.support.fake_group import GROUP, FakeGroup, Lost
from tests.support.front import FakeGateway, serving
from tests.support.producing import until
from tests.support.streams import chunk, data
from tests.support.wire import Wire

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m","messages":[],"stream":true}'
QUICK = IngressSettings(stream_head_s=0.3, stream_keep_alive_s=0.2)


class Front:
    """A front on a group in memory."""

    def __init__(self, group: FakeGroup, port: int) -> None:
        self.group = group
        self.port = port

    async def queued(self) -> str:
        """Return the id of the one request that has not ended."""
        await until(lambda: any(held.state != "ended" for held in self.group.requests.values()))
        [request_id] = [held.request_id for held in self.group.requests.values() if held.state != "ended"]
        return request_id


@asynccontextmanager
async def front(settings: IngressSettings = IngressSettings(), **options: Any) -> AsyncIterator[Front]:  # noqa: B008 - frozen
    group = FakeGroup()
    group.auto = False
    url = "valkey://127.0.0.1:9"
    client = DispatchClient(url, connection=group, fabric_group=GROUP, close_ms=100, **options)
    app = create_app(IngressState(client=client, gateway=FakeGateway(), settings=settings))
    async with client, serving(app) as port:
        yield Front(group, port)


async def test_a_stream_is_written_as_it_comes() -> None:
    async with front() as on, Wire(on.port) as wire:
        await wire.post(BODY, x_dispatch_pool="interactive", x_request_id="mine")
        request_id = await on.queued()
        on.group.push_chunks(request_id, 0, chunk("a"))
        assert await wire.head() == 200
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert wire.headers["cache-control"] == "no-cache, no-transform"
        assert wire.headers["x-accel-buffering"] == "no"
        assert wire.headers["x-dispatch-pool"] == "interactive"
        assert (wire.headers["x-request-id"], wire.headers["x-dispatch-request-id"]) == ("mine", request_id)
        assert "content-encoding" not in wire.headers
        assert await wire.until(b"\n\n") == data(chunk("a"))
        on.group.push_chunks(request_id, 1, chunk("b"), chunk("c"))
        await wire.until(data(chunk("c")))
        on.group.end(request_id)
        assert await wire.rest() == data(chunk("a")) + data(chunk("b")) + data(chunk("c")) + DONE
        # The connection serves on.
        again = Wire(on.port, _raw=bytearray())
        again._stream = wire._stream
        await again.post(BODY)
        on.group.end(await on.queued(), "failed", b"")
        assert await again.head() == 502


async def test_chunks_that_are_there_go_out_together() -> None:
    async with front() as on, Wire(on.port) as wire:
        await wire.post(BODY)
        request_id = await on.queued()
        for number in range(50):
            on.group.push_chunks(request_id, number, b'{"n":%d}' % number)
        on.group.end(request_id)
        await wire.head()
        body = await wire.rest()
        assert body == b"".join(data(b'{"n":%d}' % number) for number in range(50)) + DONE
        assert len(wire.times) <= 5


@pytest.mark.parametrize(("ending", "status"), [("failed", 502), ("cancelled", 503), ("lost", 502), ("malformed", 400)])
async def test_an_end_before_the_first_chunk_is_an_error_with_its_status(ending: str, status: int) -> None:
    async with front() as on, Wire(on.port) as wire:
        await wire.post(BODY)
        on.group.end(await on.queued(), ending, b"")
        assert await wire.head() == status
        await wire.rest()
        assert wire.error()["code"]
        assert wire.headers["content-type"] == "application/json"
        assert wire.headers["x-should-retry"] == "false"


async def test_an_end_after_it_is_an_event() -> None:
    async with front() as on, Wire(on.port) as wire:
        await wire.post(BODY)
        request_id = await on.queued()
        on.group.push_chunks(request_id, 0, chunk("a"))
        on.group.end(request_id, "lost", b"")
        assert await wire.head() == 200
        first, error = (await wire.rest()).split(b"\n\n", 1)
        assert first == b"data: " + chunk("a")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "lost"


async def test_refusals_keep_their_status() -> None:
    async with front() as on:
        on.group.refuse.append(["REFUSED", "pool_full", 5, 5, 1200])
        async with Wire(on.port) as wire:
            await wire.post(BODY)
            assert await wire.head() == 429
            assert wire.headers["retry-after-ms"] == "1200"
        for path, body, param, code in (
            ("embeddings", b'{"model":"m","input":"x","stream":true}', "stream", "unsupported"),
            ("chat/completions", b'{"model":"m","messages":[],"stream":1}', "stream", "invalid_type"),
        ):
            async with Wire(on.port) as wire:
                await wire.post(body, f"/v1/{path}")
                assert await wire.head() == 400
                await wire.rest()
                assert (wire.error()["param"], wire.error()["code"]) == (param, code)
        async with Wire(on.port) as wire:
            await wire.post(BODY, idempotency_key="k")
            assert await wire.head() == 400
            await wire.rest()
            assert wire.error()["code"] == "stream_not_repeatable"
        assert on.group.requests == {}


async def test_the_head_waits_while_the_request_does_and_goes_out_some_time_after_it_began() -> None:
    async with front(QUICK) as on, Wire(on.port) as wire:
        await wire.post(BODY)
        request_id = await on.queued()
        with anyio.move_on_after(1.0):
            await wire.head()
        assert wire.status == 0  # it is queued: a refusal could still be one
        on.group.requests[request_id].state = "leased"  # for 2.3 s, as the group tells it
        assert await wire.head() == 200
        assert wire.headers["x-dispatch-queue-ms"] == "700"
        await wire.until(KEEP_ALIVE * 3)
        gaps = [later - earlier for earlier, later in zip(wire.times, wire.times[1:], strict=False)]
        assert min(gaps) > 0.1
        on.group.push_chunks(request_id, 0, chunk("a"))
        on.group.end(request_id)
        body = await wire.rest()
        assert body.replace(KEEP_ALIVE, b"") == data(chunk("a")) + DONE
        assert body.startswith(KEEP_ALIVE)


async def test_where_it_is_may_be_unknown_for_a_while() -> None:
    async with front(QUICK) as on, Wire(on.port) as wire:
        on.group.faults += [Lost("fabric_snapshot", done=False)] * 2
        await wire.post(BODY)
        request_id = await on.queued()
        on.group.requests[request_id].state = "leased"
        assert await wire.head() == 200
        on.group.end(request_id, "expired", b"")
        assert json.loads((await wire.rest()).rpartition(b"data: ")[2])["error"]["code"] == "expired"


@pytest.mark.parametrize("when", ["queued", "head", "chunk"])
@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_client_that_leaves_cancels_its_request_wherever_it_is(when: str, how: str) -> None:
    async with front(QUICK) as on:
        async with Wire(on.port) as wire:
            await wire.post(BODY)
            request_id = await on.queued()
            if when == "head":
                on.group.requests[request_id].state = "leased"
                await wire.head()
            elif when == "chunk":
                on.group.push_chunks(request_id, 0, chunk("a"))
                await wire.head()
                await wire.until(b"data: ")
            if how == "rst":
                await wire.reset()
        await until(lambda: on.group.cancels == [request_id])


async def test_a_client_that_reads_nothing_is_bounded_and_told_when_it_reads_again() -> None:
    line = b'{"x":"' + b"y" * 50_000 + b'"}'
    async with front(stream_unread_bytes=500_000) as on, Wire(on.port) as wire:
        await wire.post(BODY)
        request_id = await on.queued()
        number = 0
        with anyio.fail_after(10):
            while not on.group.cancels:  # in the end the socket's buffers are full
                on.group.push_chunks(request_id, number, line)
                number += 1
                await anyio.sleep(0.001)
        await wire.head()
        body = await wire.rest()
        *chunks, error, end = body.split(b"\n\n")
        assert chunks == [b"data: " + line] * len(chunks)
        assert len(chunks) < number
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "stream_too_slow"
        assert end == b""


async def test_a_bug_in_the_middle_is_told_and_the_stream_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with front() as on, Wire(on.port) as wire:
        await wire.post(BODY)
        request_id = await on.queued()
        on.group.push_chunks(request_id, 0, chunk("a"))
        await wire.head()
        await wire.until(b"\n\n")

        async def fail(*_: Any) -> bytes:
            raise RuntimeError("a bug")

        monkeypatch.setattr("dispatch.producer.served.ServedStream.next_piece", fail)
        on.group.push_chunks(request_id, 1, chunk("b"))
        body = await wire.rest()
        assert b'"message":"internal error; see the log"' in body
        await until(lambda: on.group.cancels == [request_id])

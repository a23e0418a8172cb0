"""Encodings, sizes and memory of streamed calls: over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from typing import Any

import anyio
import pytest

from dispatch.backend import EndpointClient, streaming
from dispatch.backend.execution import ErrorType
from tests.support.calls import endpoint_at
from tests.support.streams import CHAT, CHUNKED, DONE, END, PING, chunk, data, framed, run
from tests.support.stub import Fin, Pause, Reset, Script, StubBackend, Write, json_answer

pytestmark = pytest.mark.anyio

A, F = data(chunk("a")), data(chunk(None, "stop"))


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "GZIP", "identity"])
async def test_an_encoded_stream_is_decoded_as_it_comes(client: EndpointClient, encoding: str) -> None:
    packer = zlib.compressobj(wbits=31 if "gzip" in encoding.lower() else 15)

    def packed(piece: bytes) -> bytes:
        return piece if encoding == "identity" else packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)

    head = CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-encoding: %b\r\n\r\n" % encoding.encode())
    script = Script((Write(head + framed(packed(A))), Pause(1.0), Write(framed(packed(F + DONE)) + END)))
    async with StubBackend(script) as stub:
        streamed = await run(client, endpoint_at(stub.url))
    assert (streamed.execution.outcome, streamed.execution.chunk_count) == ("succeeded", 2)
    assert (streamed.execution.first_chunk_ms or 0) < 1_000 <= streamed.execution.execution_ms


async def test_gzip_members_in_a_row_are_one_stream(client: EndpointClient) -> None:
    body = b"".join(gzip.compress(piece) for piece in (A, F, DONE))
    async with StubBackend(json_answer(body, headers=[("content-encoding", "gzip")])) as stub:
        streamed = await run(client, endpoint_at(stub.url))
    assert (streamed.execution.outcome, streamed.execution.chunk_count) == ("succeeded", 2)


@pytest.mark.parametrize(("encoding", "body"), [("gzip", A + F), ("br", b"x"), ("gzip, gzip", gzip.compress(A + F))])
async def test_an_encoding_that_lies_or_is_unknown_is_a_failure(
    client: EndpointClient, encoding: str, body: bytes
) -> None:
    async with StubBackend(json_answer(body, headers=[("content-encoding", encoding)])) as stub:
        streamed = await run(client, endpoint_at(stub.url))
    assert (streamed.error[0], streamed.execution.verdict) == (ErrorType.UNREADABLE, "failure")
    assert "content encoding" in streamed.error[1]


BOMB = gzip.compress(b"data: " + b" " * 40_000_000)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (A * 1_000, {"max_response_bytes": 50_000}),
        (PING * 20_000, {"max_response_bytes": 50_000}),
        (b"data: " + b"x" * 2_000_000, {}),
        (b"data:\n" * 330_000, {}),
        (b": " + b"x" * 2_000_000, {}),
        (BOMB, {}),
        (BOMB, {"max_response_bytes": 1_000_000}),
    ],
    ids=["stream", "comments", "event", "lines", "comment", "bomb", "bomb-in-stream"],
)
async def test_streams_and_events_are_bounded(
    client: EndpointClient, monkeypatch: pytest.MonkeyPatch, body: bytes, limit: dict[str, Any]
) -> None:
    monkeypatch.setattr(streaming, "MAX_EVENT_BYTES", 1_500_000)
    headers = [("content-encoding", "gzip")] if body is BOMB else []
    async with StubBackend(json_answer(body, headers=headers)) as stub:
        tracemalloc.start()
        try:
            streamed = await run(client, endpoint_at(stub.url, **limit))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (streamed.error[0], streamed.execution.verdict) == (ErrorType.TOO_LARGE, "neutral")
    assert str(limit.get("max_response_bytes", 1_500_000)) in streamed.error[1]
    assert streamed.execution.retryable is False
    assert peak < 20_000_000  # of which the stub's own copy is up to 6 MB


async def test_a_slow_reader_slows_the_backend_down(client: EndpointClient) -> None:
    piece, count, written = framed(data(chunk("x" * 64_000))), 800, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for _ in range(count):
            writer.write(piece)
            await writer.drain()
            written += 1
        writer.write(framed(F + DONE) + END)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        endpoint = endpoint_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with client.stream(endpoint, CHAT, deadline_s=60) as stream:
            await anext(stream)
            await anyio.sleep(0.5)
            assert written < count // 2  # what sockets hold; the rest waits at the backend
            rest = [len(payload.data) async for payload in stream]
    assert (stream.execution.outcome, len(rest)) == ("succeeded", count)


async def test_what_had_come_before_a_cut_is_read_by_a_slow_reader_too(client: EndpointClient) -> None:
    later = (Pause(0.05), Write(framed(A)), Pause(0.05), Write(framed(A + F)), Pause(0.1))
    for end in (Reset(), Fin()):
        async with (
            StubBackend(Script((Write(CHUNKED + framed(A)), *later, end))) as stub,
            client.stream(endpoint_at(stub.url), CHAT, deadline_s=20) as stream,
        ):
            await anext(stream)
            await stub.until(lambda seen: seen.connections[0].closed_by == "stub")
            await anyio.sleep(0.1)
            rest = [payload.data async for payload in stream]
        assert rest == [chunk("a"), chunk("a"), chunk(None, "stop")]
        assert stream.execution.outcome == "succeeded"

"""The backend: an OpenAI-compatible server that has its answers ready, so that it is never what is waited for.

A raw asyncio protocol with httptools' parser and no framework. Each chunk of a stream is a write of its own, in a turn
of the event loop of its own, as an engine's tokens are: a client that keeps up gets each by itself. Prints its URL.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from typing import Any

import httptools
import msgspec
import uvloop

from scripts.bench.ingress_run import WORD

_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Asked(msgspec.Struct):
    stream: bool = False


_read = msgspec.json.Decoder(_Asked).decode


class Answers:
    """What is answered, as bytes of the wire. A stream has a chunk for each token, one with its end, and `[DONE]`."""

    def __init__(self, tokens: int, chunk_ms: float) -> None:
        word = WORD.decode() + " "
        common = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": "bench"}
        usage = {"prompt_tokens": 20, "completion_tokens": tokens, "total_tokens": 20 + tokens}
        message = {"role": "assistant", "content": word * tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.chunk_s = chunk_ms / 1000
        self.whole = _document(common | {"object": "chat.completion", "choices": [choice], "usage": usage})
        self.models = _document({"object": "list", "data": [{"id": "bench", "object": "model", "owned_by": "bench"}]})
        deltas: list[dict[str, Any]] = [{"content": word} for _ in range(tokens)]
        deltas[0]["role"] = "assistant"
        chunks = [
            common | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": d, "finish_reason": None}]}
            for d in deltas
        ]
        last = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        chunks.append(common | {"object": "chat.completion.chunk", "choices": last})
        self.pieces = [_chunk(msgspec.json.encode(each)) for each in chunks]
        self.pieces.append(_chunk(b"[DONE]") + b"0\r\n\r\n")


def _document(document: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(document)
    return _JSON_HEAD % len(body) + body


def _chunk(data: bytes) -> bytes:
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


class Answering(asyncio.Protocol):
    """One connection; a client asks again when it has its answer."""

    def __init__(self, answers: Answers, loop: asyncio.AbstractEventLoop) -> None:
        self._answers = answers
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # it is TCP
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read on; what is no HTTP ends the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            if self._transport is not None:
                self._transport.close()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._body.clear()

    def on_body(self, piece: bytes) -> None:
        """Take a piece of a request's body."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """Answer."""
        if self._parser.get_method() == b"GET":
            self._write(self._answers.models)
        elif _read(b"".join(self._body)).stream:
            self._write(_STREAM_HEAD)
            self._later(0)
        else:
            self._write(self._answers.whole)

    def _later(self, at: int) -> None:
        if self._answers.chunk_s:
            self._loop.call_later(self._answers.chunk_s, self._write_piece, at)
        else:
            self._loop.call_soon(self._write_piece, at)

    def _write_piece(self, at: int) -> None:
        self._write(self._answers.pieces[at])
        if at + 1 < len(self._answers.pieces):
            self._later(at + 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def serve(answers: Answers) -> None:
    """Serve on a free port of loopback until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(answers, loop), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    gc.freeze()
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--chunk-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(serve(Answers(arguments.tokens, arguments.chunk_ms)))

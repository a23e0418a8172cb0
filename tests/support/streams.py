"""Streamed calls in tests: canned bodies without a network, and what came of a call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import anyio
import httpx

from dispatch.backend import BackendStream, Endpoint, EndpointClient, Execution, Payload
from dispatch.contract import Call, Operation
from tests.support.corpus import Case, callers
from tests.support.stub import Pause, SeenConnection, Step, Write

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
"""Head of a stream that ends with its connection."""

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
"""Head of a stream whose end is said."""

END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def chunk(text: str | None, finish_reason: str | None = None, *, index: int = 0, **members: object) -> bytes:
    """Return the JSON of a chat chunk; `text` None: an empty delta."""
    delta = {} if text is None else {"content": text}
    choices = [{"index": index, "delta": delta, "finish_reason": finish_reason}]
    base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
    return json.dumps({**base, **members}, ensure_ascii=False).encode()


def data(payload: bytes, *, event: str = "") -> bytes:
    """Return a payload as an event."""
    return (b"event: %b\n" % event.encode() if event else b"") + b"data: %b\n\n" % payload


def framed(piece: bytes) -> bytes:
    """Return a piece as an HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def pinging(times: int, every_s: float = 0.05, piece: bytes = PING) -> tuple[Step, ...]:
    """Return steps of a chunked stream that send keep-alives for a while."""
    return tuple(step for _ in range(times) for step in (Write(framed(piece)), Pause(every_s)))


async def gone(connection: SeenConnection, within_s: float = 1.0) -> None:
    """Return when the client has closed the connection, which has to be soon."""
    with anyio.fail_after(within_s):
        await connection.closed.wait()
    assert connection.closed_by == "client"


def call_of(operation: Operation, **members: object) -> Call:
    """Return a small call that asks for a stream."""
    body = {"model": "m", operation.main_member: [], "stream": True, **members}
    return Call(operation=operation, body=json.dumps(body).encode(), model="m", stream=True)


CHAT = call_of(Operation.CHAT_COMPLETIONS)
RESPONSE = call_of(Operation.RESPONSES)


@dataclass(frozen=True)
class Streamed:
    """What came of one streamed call."""

    payloads: list[Payload]
    execution: Execution

    @property
    def data(self) -> list[bytes]:
        return [payload.data for payload in self.payloads]

    @property
    def frames(self) -> bytes:
        """The payloads as a front door frames them."""
        return b"".join(data(payload.data) for payload in self.payloads)

    @property
    def error(self) -> tuple[str, str]:
        """Word and sentence of the error, "" where there is none."""
        error = self.execution.head.error
        return ("", "") if error is None else (error.type, error.message)


async def run(client: EndpointClient, endpoint: Endpoint, call: Call = CHAT, *, deadline_s: float = 20) -> Streamed:
    """Stream a call to its end."""
    async with client.stream(endpoint, call, deadline_s=deadline_s) as stream:
        payloads = [payload async for payload in stream]
    return Streamed(payloads, stream.execution)


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: Sequence[bytes], error: Exception | None) -> None:
        self._pieces = pieces
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if self._error is not None:
            raise self._error


class CannedTransport:
    """Answers every request with the same pieces, then ends or breaks."""

    def __init__(
        self, pieces: Sequence[bytes], *, headers: dict[str, str] | None = None, error: Exception | None = None
    ) -> None:
        self._pieces = pieces
        self._headers = {"content-type": "text/event-stream"} if headers is None else headers
        self._error = error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=self._headers, stream=_Pieces(self._pieces, self._error), request=request)


ENDPOINT = Endpoint(endpoint_id="canned", url="http://127.0.0.1:1/v1")
_REQUEST = httpx.Request("POST", ENDPOINT.url)


async def read_canned(transport: CannedTransport, call: Call = CHAT, endpoint: Endpoint = ENDPOINT) -> Streamed:
    """Stream a call whose answer needs no network."""
    stream = BackendStream(transport, _REQUEST, endpoint, call, 60)  # type: ignore[arg-type] # it has what is used
    async with stream:
        payloads = [payload async for payload in stream]
    return Streamed(payloads, stream.execution)


async def read_bytes(body: bytes, call: Call = CHAT) -> Streamed:
    """Stream a call whose answer is this body, in one piece."""
    return await read_canned(CannedTransport([body]), call)


def caller_of(case: Case) -> Call:
    """Return the call that a corpus row answers."""
    caller = callers()[case.row["request"]]
    path = caller["path"].removeprefix("/v1/")
    operation = next(operation for operation in Operation if operation.path == path)
    body = json.dumps(caller["body"]).encode()
    return Call(
        operation=operation, body=body, model=caller["body"]["model"], stream=bool(caller["body"].get("stream"))
    )

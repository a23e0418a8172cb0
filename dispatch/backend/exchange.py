"""One request and its answer over the wire, within its bounds; what the answer means is judged elsewhere."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import anyio
import httpx
from httpx_aiohttp import AiohttpTransport

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.failures import BodyTooLarge, Failure, failure_of, timed_out
from dispatch.backend.headers import Fields, decode_fields, first

UPLOAD_PIECE_BYTES = 128 * 1024
"""Larger bodies are written in pieces of this size: between two the event loop runs, and a slow backend is felt."""

NETWORK_ERRORS = (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError, ValueError)
"""What the layers below raise for what a network or a backend does; anything else is a bug and is not caught."""


Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer: every byte that its framing announced, decoded from its content encoding."""

    status: int
    fields: Fields
    body: bytes


async def exchange(
    transport: AiohttpTransport, request: httpx.Request, endpoint: Endpoint, deadline: float
) -> Answer | Failure:
    """Send `request` once and read its answer; `deadline` is in event loop time (`anyio.current_time()`).

    Never raises for what the network or the endpoint does. When it ends early for whatever reason, cancellation
    included, the connection is closed before this returns or raises. An error answer (4xx, 5xx) whose body does not
    come whole is an answer without a body: its head has said what counts.
    """
    reading = _Reading(endpoint, deadline)

    async def take_whole(scope: anyio.CancelScope) -> Answer:
        return await reading.take(await transport.handle_async_request(request), scope)

    return await reading.bounded(take_whole)


async def open_exchange(
    transport: AiohttpTransport, request: httpx.Request, endpoint: Endpoint, deadline: float
) -> httpx.Response | Answer | Failure:
    """Send `request` once and read the head of its answer; an answer other than 2xx is read to its end.

    An open response belongs to the caller: read it by `pieces_of`, and `close` it unless it was read to its end.
    Promises as `exchange`.
    """
    reading = _Reading(endpoint, deadline)

    async def take_head(scope: anyio.CancelScope) -> httpx.Response | Answer:
        response = await transport.handle_async_request(request)
        return response if 200 <= response.status_code < 300 else await reading.take(response, scope)

    return await reading.bounded(take_head)


class _Reading:
    """One answer as far as it has come."""

    def __init__(self, endpoint: Endpoint, deadline: float) -> None:
        self._endpoint = endpoint
        self._deadline = deadline
        self._now = asyncio.get_running_loop().time  # anyio's way to it takes several times as long
        self.status: int | None = None
        """The status, once the head has come."""
        self.fields: Fields = ()
        self.received_bytes = 0

    async def bounded(self, take: Callable[[anyio.CancelScope], Awaitable[Taken]]) -> Taken | Answer | Failure:
        """Run `take` within the bounds of a call; it gets the scope whose deadline says until when."""
        endpoint = self._endpoint
        with anyio.CancelScope(deadline=self.next_deadline(endpoint.first_byte_timeout_ms)) as scope:
            try:
                return await take(scope)
            except BodyTooLarge:
                failure = Failure.too_large(endpoint, self.status)
            except NETWORK_ERRORS as error:
                failure = failure_of(error, endpoint, self.status, self.received_bytes)
        if scope.cancelled_caught:
            failure = timed_out(endpoint, self.status, expired=self._now() >= self._deadline)
        if self.status is not None and self.status >= 400 and not failure.expired:
            return Answer(self.status, self.fields, b"")
        return failure

    def next_deadline(self, bound_ms: int) -> float:
        """Return when a wait that begins now has to end: by its bound, or by the request's own deadline."""
        return min(self._deadline, self._now() + bound_ms / 1000)

    async def take(self, response: httpx.Response, scope: anyio.CancelScope) -> Answer:
        """Read the body to its end and close; moves the scope's deadline along as bytes come."""
        self.status = response.status_code
        self.fields = decode_fields(response.headers.raw)
        limit, idle_ms = self._endpoint.max_response_bytes, self._endpoint.idle_timeout_ms
        encoded = first(self.fields, "content-encoding") != ""
        streamed = first(self.fields, "content-type").lower().startswith("text/event-stream")
        pieces: list[bytes] = []
        complete = False
        try:
            if not encoded and _announced(self.fields) > limit:
                raise BodyTooLarge
            scope.deadline = self.next_deadline(idle_ms)
            async for piece in response.aiter_bytes() if encoded else pieces_of(response):
                self.received_bytes += len(piece)
                if self.received_bytes > limit:
                    raise BodyTooLarge
                if streamed and not pieces and not piece.lstrip().startswith(b"{"):
                    # Events that nobody asked for: closing stops them, reading on could last for ever.
                    return Answer(self.status, self.fields, b"")
                pieces.append(piece)
                scope.deadline = self.next_deadline(idle_ms)
            # An answer that switches protocols is complete and still holds its connection.
            complete = self.status != HTTPStatus.SWITCHING_PROTOCOLS
        finally:
            if not complete:
                with anyio.CancelScope(shield=True):
                    await close(response)
        return Answer(self.status, self.fields, pieces[0] if len(pieces) == 1 else b"".join(pieces))


def pieces_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """Return the body as it comes, not decoded, in pieces of at most 16 KiB."""
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)  # noqa: S101 - httpx types one field for both of its worlds
    return stream.__aiter__()


async def close(response: httpx.Response) -> None:
    """End an answer, wherever it is; its connection is reset unless the answer was complete."""
    try:
        await response.aclose()
    except NETWORK_ERRORS:
        # The connection is dropped either way; the first failure is the one that is told.
        return


def _announced(fields: Fields) -> float:
    value = first(fields, "content-length")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -math.inf


class Upload(httpx.AsyncByteStream):
    """A large body as a stream of pieces, each a view of the same bytes."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        view = memoryview(self._body)
        for start in range(0, len(view), UPLOAD_PIECE_BYTES):
            yield view[start : start + UPLOAD_PIECE_BYTES]  # type: ignore[misc]  # any buffer can be written

"""One streamed call: its head, then its payloads as they come, then how it ended.

The rules (what an event means is in `chunks`, readings chosen where standards are silent):

- An answer other than 2xx is judged as `EndpointClient.execute` judges it; nothing was streamed then.
- The bytes decide what a 2xx is, labels lie: a body that begins with `{` is one JSON document and is turned into a
  stream (see `whole`), one that begins with `<` is a page and a failure, anything else is read as an event stream.
- A stream that is complete is `succeeded` when it ends, with `[DONE]` or without; also when it is cut or silent for
  2 s, if all choices that were asked for are there. One that is not complete is `failed`. Whole events are given out
  before, half an event never is.
- Cut before the first payload, a call is retryable; after it, never. What is not a cut (an error, garbage, silence) is
  not retryable.
- Bounds: the first payload within `first_byte_timeout_ms` of the call's start, each further one within
  `idle_timeout_ms` of the wait for it, all before the deadline. Bytes that complete no payload (comments, half an
  event) move none of them. `max_response_bytes` bounds the decoded stream, 16 MiB each event.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from types import TracebackType
from typing import Self

import anyio
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from dispatch.backend.body import Overdue, StreamedBody
from dispatch.backend.chunks import Payload, StreamEnd, chunk_reader
from dispatch.backend.document import read_document
from dispatch.backend.endpoint import Endpoint
from dispatch.backend.events import Event, EventParser
from dispatch.backend.exchange import NETWORK_ERRORS, Answer, open_exchange
from dispatch.backend.execution import ErrorType, Execution
from dispatch.backend.failures import BodyTooLarge, Failure, failure_of, timed_out
from dispatch.backend.headers import Fields, decode_fields, first, relayed
from dispatch.backend.inflating import inflater_for
from dispatch.backend.journal import note_failure
from dispatch.backend.reading import read_answer, read_failure, read_reported
from dispatch.backend.whole import stream_form
from dispatch.contract import Call, ReplyHead

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Largest event of a stream, as large as the largest body of a call."""

FINISHED_S = 2.0
"""How long a complete stream is waited on for what may follow (usage, `[DONE]`)."""

_LEAD_BYTES = 4 * 1024
_BOM = b"\xef\xbb\xbf"


class BackendStream:
    """A streamed call, opened by entering and closed by leaving it.

        async with client.stream(endpoint, call, deadline_s=60) as stream:
            async for payload in stream:
                ...
        execution = stream.execution

    Entering waits for the head. Nothing is raised for what the network or the endpoint does: it is how the iteration
    ends. Leaving early, by cancellation or otherwise, closes the connection at once, so that the endpoint stops. A wait
    for a payload that was cancelled ends the stream. A slow reader slows the endpoint down: no more than some 100 KiB
    are read ahead.
    """

    def __init__(
        self, transport: AiohttpTransport, request: httpx.Request, endpoint: Endpoint, call: Call, deadline_s: float
    ) -> None:
        self._transport = transport
        self._request = request
        self._endpoint = endpoint
        self._call = call
        self._deadline_s = deadline_s
        self._reader = chunk_reader(call.operation)
        self._parser = EventParser()
        self._ready: deque[Payload] = deque()
        self._execution: Execution | None = None
        self._fields: Fields = ()
        self._status: int | None = None
        self._received_bytes = 0
        self._lead: bytearray | None = bytearray()  # until its first bytes say what the body is
        self._document: bytearray | None = None
        self._idle_s = endpoint.idle_timeout_ms / 1000
        self._patient = False
        self._body: StreamedBody | None = None
        self._started = 0.0
        self._deadline = 0.0
        self.chunk_count = 0
        """Payloads that have come."""
        self.first_chunk_ms: int | None = None
        """From the call's start to the first of them."""

    @property
    def execution(self) -> Execution:
        """How the call ended; `chunk_count`, `head` and the like are there before that, too.

        Raises:
            RuntimeError: it has not ended.
        """
        if self._execution is None:
            raise RuntimeError("the stream has not ended: read its payloads to the end")
        return self._execution

    @property
    def ended(self) -> bool:
        """Whether `execution` is there; payloads that came before the end may still be unread."""
        return self._execution is not None

    @property
    def head(self) -> ReplyHead:
        """What is known so far: status, headers for the caller, and facts of the payloads that have come."""
        return self._execution.head if self._execution is not None else self._facts()

    async def __aenter__(self) -> Self:
        self._time = asyncio.get_running_loop().time  # anyio's way to it costs as much as reading an event
        self._started = self._time()
        self._deadline = self._started + self._deadline_s
        endpoint = self._endpoint
        if not self._deadline_s > 0:  # also when it is no number
            self._finish(read_failure(timed_out(endpoint, None, expired=True), endpoint))
            return self
        found = await open_exchange(self._transport, self._request, endpoint, self._deadline)
        if isinstance(found, Failure):
            self._finish(read_failure(found, endpoint))
        elif isinstance(found, Answer):
            self._finish(read_answer(found, endpoint))
        else:
            self._open(found)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        body, self._body = self._body, None
        if body is None:
            return
        try:
            if exc_type is None and self._reader.end is not None and self._reader.end.kind == "done":
                await body.drain()
        finally:
            await body.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Payload:
        """Return the next payload.

        Raises:
            anyio.ClosedResourceError: the stream was left, or a wait was cancelled.
        """
        if not self._ready and self._execution is None:
            due = self._bound()
            while not self._ready and self._execution is None:
                await self._read(due)
                if self._document is not None:
                    due = self._bound()  # of one document every byte counts
        if self._ready:
            return self._ready.popleft()
        raise StopAsyncIteration

    def take_ready(self) -> list[Payload]:
        """Return the payloads that have come already, without waiting: what one write to the caller can carry."""
        taken = list(self._ready)
        self._ready.clear()
        return taken

    def _open(self, response: httpx.Response) -> None:
        self._status = response.status_code
        self._fields = decode_fields(response.headers.raw)
        inflater = None
        try:
            inflater = inflater_for(first(self._fields, "content-encoding"))
        except httpx.DecodingError as error:
            self._fail(failure_of(error, self._endpoint, self._status, 0))
        self._body = StreamedBody(response, inflater, self._more_time)

    def _bound(self) -> float:
        """Return until when a wait for a payload that begins now may last."""
        now = self._time()
        if self._reader.complete and not self._patient:
            due = now + min(FINISHED_S, self._idle_s)
        elif self.chunk_count or self._document is not None:
            due = now + self._idle_s
        else:
            due = self._started + self._endpoint.first_byte_timeout_ms / 1000
        return min(due, self._deadline)

    def _more_time(self) -> float | None:
        """Allow a wait that is due more time: a complete stream, if a choice that was asked for has not begun."""
        if not self._reader.complete or self._patient or self._time() >= self._deadline:
            return None
        self._patient = not self._reader.has_all(self._call)
        return self._bound() if self._patient else None

    async def _read(self, due: float) -> None:
        """Take in the next piece of the body, or its end."""
        if self._body is None:
            raise anyio.ClosedResourceError
        try:
            if due <= self._time():
                raise Overdue
            piece = await self._body.piece(due)
        except NETWORK_ERRORS as error:
            self._end_by(error)
            return
        if piece is None:
            self._end_by(None)
            return
        try:
            self._take(piece)
        except BodyTooLarge as error:
            self._end_by(error)

    def _take(self, piece: bytes) -> None:
        self._received_bytes += len(piece)
        if self._received_bytes > self._endpoint.max_response_bytes:
            raise BodyTooLarge
        if self._lead is not None:
            piece = self._tell_form(piece)
        if self._document is not None:
            self._document += piece
            return
        events = self._parser.feed(piece)
        for event in events:
            self._judge(event)
            if self._execution is not None:
                return
        if not events and self._parser.held_bytes > MAX_EVENT_BYTES:
            raise BodyTooLarge

    def _tell_form(self, piece: bytes) -> bytes:
        """Decide by the first bytes that say something what the body is; return what is to be read now."""
        assert self._lead is not None  # noqa: S101 - asked only as long as it is there
        self._lead += piece
        start = bytes(self._lead)
        text = start.removeprefix(_BOM).lstrip(b" \t\r\n")
        if (not text or _BOM.startswith(text)) and len(start) < _LEAD_BYTES:
            return b""
        self._lead = None
        if text.startswith(b"{"):
            self._document = bytearray()
        elif text.startswith(b"<"):
            self._fail(self._strange())
            return b""
        return start

    def _judge(self, event: Event) -> None:
        payload = self._reader.read(event)
        if payload is not None:
            if not self.chunk_count:
                self.first_chunk_ms = self._elapsed_ms()
            self.chunk_count += 1
            self._ready.append(payload)
        if self._reader.end is not None:
            self._conclude(self._reader.end)

    def _conclude(self, end: StreamEnd) -> None:
        """End by what the stream itself said."""
        endpoint = self._endpoint
        if end.error is not None:
            answer = Answer(self._status or 200, self._fields, b"")
            execution = read_reported(answer, endpoint, end.error)
            self._finish(msgspec.structs.replace(execution, error_told=end.told), facts=True)
        elif end.kind == "unreadable":
            what = f"sent an event whose data is no JSON object, after {self._so_far}"
            self._fail(self._failure(ErrorType.UNREADABLE, what))
        elif self._reader.complete:
            self._succeed()
        else:
            what = f"said [DONE] after {self._so_far}, without {self._reader.wanted}"
            self._fail(self._failure(ErrorType.UNREADABLE, what))

    def _end_by(self, error: Exception | None) -> None:
        """End from outside: at the body's end (None), or because it was cut, silent or too large."""
        if self._document is not None:
            self._end_document(error)
            return
        event = None if isinstance(error, BodyTooLarge) else self._parser.close()
        if event is not None and (event.data.strip() == b"[DONE]" or read_document(event.data) is not None):
            self._judge(event)
            if self._execution is not None:
                return
        if self._reader.complete and (error is None or self._reader.has_all(self._call)):
            self._succeed()
        elif error is not None:
            self._fail(self._failure_of(error))
        elif self.chunk_count == 0 and self._parser.strange:
            self._fail(self._strange())
        else:
            what = f"ended its stream after {self._so_far}, without {self._reader.wanted}"
            failure = self._failure(ErrorType.DISCONNECTED, what)
            self._fail(dataclasses.replace(failure, retryable=self.chunk_count == 0))

    def _end_document(self, error: Exception | None) -> None:
        assert self._document is not None  # noqa: S101 - the caller has seen it
        if error is not None:
            self._fail(self._failure_of(error))
            return
        answer = Answer(self._status or 200, self._fields, bytes(self._document))
        execution = read_answer(answer, self._endpoint)
        if execution.outcome == "succeeded":
            for event in stream_form(self._call, answer.body):
                self._judge(event)
            if not self.chunk_count:
                what = f"answered with a JSON object that is none of {self._call.operation.value}"
                self._fail(self._failure(ErrorType.UNREADABLE, what))
                return
            head = msgspec.structs.replace(execution.head, headers=relayed(self._fields))
            execution = msgspec.structs.replace(execution, head=head, body=b"")
        self._finish(execution)

    def _failure_of(self, error: Exception) -> Failure:
        if isinstance(error, BodyTooLarge):
            failure = Failure.too_large(self._endpoint, self._status)
            if self._parser.held_bytes <= MAX_EVENT_BYTES:
                return failure
            what = f"endpoint {self._endpoint.endpoint_id!r} sent an event of more than {MAX_EVENT_BYTES} bytes"
            return dataclasses.replace(failure, message=what)
        if isinstance(error, Overdue):
            now = self._time()
            failure = timed_out(self._endpoint, self._status, expired=now >= self._deadline)
            if not failure.expired and not self.chunk_count and self._document is None:
                what = f"sent no chunk within {self._endpoint.first_byte_timeout_ms} ms"
                failure = self._failure(failure.type, what)
            return failure
        failure = failure_of(error, self._endpoint, self._status, self._received_bytes)
        if failure.type is ErrorType.DISCONNECTED and self._document is None:
            message = f"endpoint {self._endpoint.endpoint_id!r} broke off after {self._so_far} of its stream"
            failure = dataclasses.replace(failure, message=message, retryable=self.chunk_count == 0)
        return failure

    @property
    def _so_far(self) -> str:
        return "1 chunk" if self.chunk_count == 1 else f"{self.chunk_count} chunks"

    def _strange(self) -> Failure:
        return self._failure(ErrorType.UNREADABLE, "answered with something that is no event stream")

    def _failure(self, kind: ErrorType, what: str) -> Failure:
        return Failure(type=kind, message=f"endpoint {self._endpoint.endpoint_id!r} {what}", status=self._status)

    def _fail(self, failure: Failure) -> None:
        self._finish(read_failure(failure, self._endpoint), facts=True)

    def _succeed(self) -> None:
        self._finish(Execution(outcome="succeeded", head=self._facts(), verdict="good"))

    def _finish(self, execution: Execution, *, facts: bool = False) -> None:
        if facts:
            known = self._facts()
            head = msgspec.structs.replace(
                execution.head,
                usage=known.usage,
                finish_reasons=known.finish_reasons,
                response_model=known.response_model,
                response_id=known.response_id,
            )
            execution = msgspec.structs.replace(execution, head=head)
        note_failure(self._endpoint, execution.head.error)
        self._execution = msgspec.structs.replace(
            execution,
            execution_ms=self._elapsed_ms(),
            chunk_count=self.chunk_count,
            first_chunk_ms=self.first_chunk_ms,
        )

    def _facts(self) -> ReplyHead:
        reader = self._reader
        return ReplyHead(
            status=self._status,
            headers=relayed(self._fields),
            usage=reader.usage,
            finish_reasons=reader.finish_reasons,
            response_model=reader.model,
            response_id=reader.response_id,
            endpoint_id=self._endpoint.endpoint_id,
            backend_address=self._endpoint.address,
        )

    def _elapsed_ms(self) -> int:
        return math.ceil((self._time() - self._started) * 1000)

"""A stream as it is written for HTTP clients: server-sent events, framed anew whatever the endpoint's looked like.

The rules (readings chosen where standards are silent):

- One `data:` line per event with the chunk's bytes untouched, an empty line after it. Event names are kept for
  Responses; the other operations have none. Never `id:` or `retry:`, never an event without data.
- A comment, whole and between events, shows that a silent stream lives.
- A stream that succeeded ends with `data: [DONE]`, Responses without it. One that did not ends with an error as an
  event of its own and no `[DONE]`: what has that is complete. Where the last chunk told the error (Responses), nothing
  more is written. A Responses error event has a name and type, too: `error`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from dispatch.contract.answers import Answer, Problem, answer_of_problem, answer_of_reply
from dispatch.contract.chunk import Chunk
from dispatch.contract.envelope import Operation
from dispatch.contract.reply import Reply

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_DATA, _END = b"data: ", b"\n\n"
_ERROR_MEMBERS = ("message", "type", "param", "code")
_TELLS_ERROR = frozenset({"error", "response.failed"})


class _Error(msgspec.Struct):
    error: dict[str, Any]


_decode_error = msgspec.json.Decoder(_Error).decode


class EventStream:
    """Makes the bytes of one stream, in order."""

    def __init__(self, operation: Operation) -> None:
        self._named = operation is Operation.RESPONSES
        self._last_event = ""

    def head(self, pool_id: str, queue_ms: int | None) -> Answer:
        """Return status and header fields; there is no body yet."""
        fields = [
            ("content-type", "text/event-stream; charset=utf-8"),
            ("cache-control", "no-cache, no-transform"),
            ("x-accel-buffering", "no"),
            ("x-dispatch-pool", pool_id),
        ]
        if queue_ms is not None:
            fields.append(("x-dispatch-queue-ms", str(queue_ms)))
        return Answer(HTTPStatus.OK, fields, b"")

    def chunks(self, chunks: Iterable[Chunk]) -> bytes:
        """Return chunks as events."""
        if not self._named:
            return b"".join(itertools.chain.from_iterable((_DATA, chunk.data, _END) for chunk in chunks))
        parts: list[bytes] = []
        for chunk in chunks:
            if chunk.event:
                parts += (b"event: ", chunk.event.encode(), b"\n")
            parts += (_DATA, chunk.data, _END)
            self._last_event = chunk.event
        return b"".join(parts)

    def end(self, reply: Reply) -> bytes:
        """Return what follows the last chunk."""
        if reply.succeeded:
            return b"" if self._named else DONE
        if self._last_event in _TELLS_ERROR:
            return b""
        return self._error(answer_of_reply(reply))

    def broken(self, problem: Problem) -> bytes:
        """Return what follows the last chunk when it is not known how the stream ends."""
        return self._error(answer_of_problem(problem))

    def _error(self, answer: Answer) -> bytes:
        error = _error_in(answer.body)
        if not self._named:
            return _DATA + msgspec.json.encode({"error": error}) + _END
        typed = {"type": "error", **{name: error[name] for name in ("code", "message", "param")}, "error": error}
        return b"event: error\n" + _DATA + msgspec.json.encode(typed) + _END


def _error_in(body: bytes) -> dict[str, Any]:
    """Return the OpenAI error that an answer's body is, with all of its members."""
    try:
        told = _decode_error(body).error
    except (msgspec.MsgspecError, RecursionError):
        told = {"message": "the request did not succeed"}
    return {name: told.get(name) for name in _ERROR_MEMBERS}

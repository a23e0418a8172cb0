"""Ids of traces and spans: continued from the producer, else derived, so that a repeat has the same ids.

A span of this project is made from a record, perhaps twice (records are delivered at least once) and perhaps by another
process than the one that sent its id on to the endpoint. So a span's id is a digest of what it is about.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from dispatch.contract import Operation

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1

PROCESS, DELIVER = "process", "deliver"
"""Parts of a request that have one span; an attempt is `attempt_part(number)`."""


class Request(msgspec.Struct, frozen=True):
    """What names one request for good: an id may be used again later. `traceparent` is its producer's, "" = none."""

    group: str
    request_id: str
    submitted_ms: int
    traceparent: str = ""


class Trace(msgspec.Struct, frozen=True):
    """The trace of a request. `parent_id` 0: it begins with the request, as its producer had none."""

    trace_id: int
    parent_id: int
    sampled: bool


def always(_trace_id: int) -> bool:
    """Sample every trace."""
    return True


def trace_of(request: Request, samples_root: Callable[[int], bool] = always) -> Trace:
    """Return the trace that the request belongs to; `samples_root` decides on one without a producer's context."""
    found = _TRACEPARENT.fullmatch(request.traceparent)
    if found is None:
        trace_id = _digest(request, "trace", 16)
        return Trace(trace_id, 0, samples_root(trace_id))
    trace, parent, flags = found.groups()
    return Trace(int(trace, 16), int(parent, 16), bool(int(flags, 16) & _SAMPLED))


def span_id(request: Request, part: str) -> int:
    """Return the id of the span of one part of the request."""
    return _digest(request, part, 8)


def attempt_part(number: int) -> str:
    """Return the part that is attempt `number`."""
    return f"attempt {number}"


def traceparent_of(request: Request, part: str) -> str:
    """Return the W3C `traceparent` that names the span of `part`: what travels on from it."""
    trace = trace_of(request)
    return f"00-{trace.trace_id:032x}-{span_id(request, part):016x}-{trace.sampled:02x}"


_GEN_AI_OPERATION = {
    Operation.CHAT_COMPLETIONS: "chat",
    Operation.COMPLETIONS: "text_completion",
    Operation.EMBEDDINGS: "embeddings",
    Operation.RESPONSES: "chat",
}


def gen_ai_operation(operation: Operation) -> str:
    """Return the convention's word for an operation."""
    return _GEN_AI_OPERATION[operation]


def _digest(request: Request, part: str, size: int) -> int:
    text = f"{request.group} {request.request_id} {request.submitted_ms} {part}"
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "big") or 1

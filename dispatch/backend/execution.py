"""What one call to an endpoint came to, and the closed word lists around it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from dispatch.contract import ReplyHead

Outcome = Literal["succeeded", "failed", "expired"]

Verdict = Literal["good", "neutral", "failure", "backpressure"]
"""What the endpoint's breaker may make of a call.

`good` heals, `failure` counts towards opening (unreachable, broken, garbage, 5xx), `backpressure` (429, 503) holds the
endpoint and is no failure, `neutral` says nothing about the endpoint (4xx, the request's own deadline, a size bound,
no socket on this machine).
"""


class ErrorType(StrEnum):
    """Words of `ReplyError.type` for calls to endpoints; closed, because they label metrics."""

    UNREACHABLE = "endpoint_unreachable"
    """No connection: refused, no such host, TLS, or not within `connect_timeout_ms`."""
    TIMEOUT = "endpoint_timeout"
    """No head (of a stream: no chunk) within `first_byte_timeout_ms`, or a pause longer than `idle_timeout_ms`."""
    DISCONNECTED = "endpoint_disconnected"
    """The connection or the stream ended before the answer was complete."""
    UNREADABLE = "endpoint_unreadable"
    """The answer is no HTTP, or its body is not what the operation answers with (empty, HTML, cut, an event stream)."""
    TOO_LARGE = "endpoint_reply_too_large"
    """The answer is larger than `max_response_bytes`."""
    REDIRECT = "endpoint_redirect"
    """The endpoint wants another address asked; redirects are not followed."""
    REJECTED = "endpoint_rejected"
    """The endpoint refused the request (4xx)."""
    UNAUTHORIZED = "endpoint_unauthorized"
    """The endpoint refused its configured key (401)."""
    OVERLOADED = "endpoint_overloaded"
    """The endpoint has no capacity now (429, 503)."""
    FAILED = "endpoint_failed"
    """The endpoint failed (other 5xx), or reported an error inside a 200."""
    DEADLINE = "deadline_exceeded"
    """The request's deadline passed while the endpoint worked on it."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """How one call ended.

    `head` is without gateway and dispatcher ids; `head.status` is the endpoint's own status, also where it does not fit
    the outcome (a 200 with garbage is `failed` with status 200: a front door answers 502 then).

    `body` may go to the caller as it is: the endpoint's answer, decoded, when `succeeded`; when `failed` a JSON object
    that says what the endpoint said (an error answer, byte for byte where it was JSON), or empty where the endpoint
    said nothing usable: `head.error` is all there is then. It may echo the prompt, so it is for the caller alone.

    `retryable`: the call may be repeated without doing work twice (nothing was answered, 429, 503). `hold_ms`: how
    long the endpoint asked not to be called (0 = not asked). `execution_ms`: from the call's start to its end.

    Of a streamed call: `chunk_count` payloads were given to the caller, the first `first_chunk_ms` after the call's
    start (None = none came); `error_told`: the last of them tells the error already, as Responses streams do, so that
    nothing need be written after it. Its `body` is empty unless it failed.
    """

    outcome: Outcome
    head: ReplyHead
    body: bytes = b""
    verdict: Verdict
    hold_ms: int = 0
    retryable: bool = False
    execution_ms: int = 0
    chunk_count: int = 0
    first_chunk_ms: int | None = None
    error_told: bool = False

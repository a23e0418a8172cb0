"""The reply: how one request ended, and what the endpoint said."""

from __future__ import annotations

from typing import Any

import msgspec


class ReplyError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request did not succeed. `source` is who caused it: `dispatch`, `endpoint` or `caller`.

    `type` is a word of a closed list (it labels metrics), `message` is a sentence for a person.
    """

    type: str
    message: str
    source: str
    param: str | None = None
    code: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens as the endpoint reported them; None = it did not say (unknown is not zero).

    The last two are parts of the first two: read from a cache, and spent on reasoning.
    """

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None
    reasoning_output_tokens: int | None = None


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a reply that the gateway writes: what happened at the endpoint, without the body.

    `headers` holds only what may travel to the caller (no hop-by-hop field, no cookie).
    `backend_address` is `scheme://host:port/path` without credentials or query.
    """

    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    error: ReplyError | None = None
    usage: Usage | None = None
    finish_reasons: tuple[str, ...] = ()
    response_model: str | None = None
    response_id: str | None = None
    gateway_id: str | None = None
    dispatcher_id: str | None = None
    endpoint_id: str | None = None
    backend_address: str | None = None


class Attempt(msgspec.Struct, frozen=True):
    """An earlier attempt at a request, which was followed by another one. Times are milliseconds of the server's clock.

    `status` is the endpoint's, None if it gave none. `error_type` says why the attempt did not count: a word of
    `ReplyError.type`, or `lost` when its gateway stopped renewing the lease.
    """

    number: int
    claimed_ms: int
    ended_ms: int
    status: int | None
    error_type: str
    gateway_id: str
    endpoint_id: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One terminal reply as the producer gets it. `queue_ms` is None for a direct call (no queue).

    `body` is the endpoint's answer byte for byte (decoded from its content encoding); empty when there is none.
    `attempt` counts from 1; what became of the attempts before it stands in `tries`, the oldest first.
    `replayed`: this is the stored reply of an earlier call with the same idempotency key or request id.
    """

    request_id: str
    pool_id: str
    ending: str
    attempt: int = 1
    head: ReplyHead
    body: bytes = b""
    queue_ms: int | None = None
    execution_ms: int | None = None
    tries: tuple[Attempt, ...] = ()
    replayed: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether the request ended `succeeded`."""
        return self.ending == "succeeded"

    @property
    def status(self) -> int | None:
        """The endpoint's HTTP status, None if it gave none."""
        return self.head.status

    @property
    def error(self) -> ReplyError | None:
        """Why it did not succeed."""
        return self.head.error

    @property
    def usage(self) -> Usage | None:
        """Tokens as the endpoint reported them."""
        return self.head.usage

    def json(self) -> Any:
        """Decode the body.

        Raises:
            msgspec.DecodeError: the body is no JSON.
        """
        return msgspec.json.decode(self.body)

    def text(self) -> str:
        """Return the first choice's text (chat and text completions) or the response's output text; "" if none."""
        document = self.json()
        for choice in document.get("choices") or ():
            message = choice.get("message") or {}
            return message.get("content") or choice.get("text") or ""
        parts = [
            part.get("text", "")
            for item in document.get("output") or ()
            for part in item.get("content") or ()
            if part.get("type") == "output_text"
        ]
        return "".join(parts)

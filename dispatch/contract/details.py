"""What a gateway knows of one attempt and the function library does not: it travels through the settle unread."""

from __future__ import annotations

import msgspec


class AttemptDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of one attempt for its record. Scalars and names; never content, never text that an endpoint chose freely.

    `backend_address` is `scheme://host:port/path` without credentials or query. `first_chunk_ms` is from the call's
    start to the first chunk of a stream. `max_tokens` and `temperature` are what the caller asked for, None where it
    did not say (or its body is too large to be looked through). `verdict` is what the endpoint's breaker made of it.
    `error_message` is a sentence of ours.
    """

    backend_address: str | None = None
    response_id: str | None = None
    response_model: str | None = None
    finish_reasons: tuple[str, ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None
    reasoning_output_tokens: int | None = None
    first_chunk_ms: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    verdict: str | None = None
    error_message: str | None = None


NO_DETAILS = AttemptDetails()

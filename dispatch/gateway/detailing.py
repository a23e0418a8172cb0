"""What a gateway says of an attempt in the record of its request's ending."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dispatch.backend.execution import Execution
from dispatch.contract.details import AttemptDetails
from dispatch.contract.reply import Usage

_BODY_MAX_BYTES = 65_536  # looking through a larger one costs more than the two numbers are worth


class _Asked(msgspec.Struct):
    """The members of a call's body that its client span names; the last two are other operations' words for the first.

    Bounded: a number of any size is JSON, and not all of them fit into a span.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=-1000, le=1000)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None


_NOTHING_ASKED = _Asked()
_NOT_SAID = Usage()
_ASKED = msgspec.json.Decoder(_Asked)
_ENCODER = msgspec.json.Encoder()


def details_of(execution: Execution, body: bytes) -> bytes:
    """Return what is known of an attempt that came to its end, as the settle takes it. `body` is the call's."""
    head, asked = execution.head, _asked(body)
    usage = head.usage or _NOT_SAID
    return _ENCODER.encode(
        AttemptDetails(
            backend_address=head.backend_address,
            response_id=head.response_id,
            response_model=head.response_model,
            finish_reasons=head.finish_reasons,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_input_tokens=usage.cached_input_tokens,
            reasoning_output_tokens=usage.reasoning_output_tokens,
            first_chunk_ms=execution.first_chunk_ms,
            max_tokens=asked.max_completion_tokens or asked.max_output_tokens or asked.max_tokens,
            temperature=asked.temperature,
            verdict=execution.verdict,
            error_message=None if head.error is None else head.error.message,
        )
    )


def details_of_stopped(address: str | None, usage: Usage) -> bytes:
    """Return what is known of an attempt that was broken off: where it ran, and what had been told of tokens."""
    return _ENCODER.encode(
        AttemptDetails(
            backend_address=address,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cached_input_tokens=usage.cached_input_tokens,
            reasoning_output_tokens=usage.reasoning_output_tokens,
        )
    )


def _asked(body: bytes) -> _Asked:
    if len(body) > _BODY_MAX_BYTES:
        return _NOTHING_ASKED
    try:
        return _ASKED.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the endpoint judges what stands there
        return _NOTHING_ASKED

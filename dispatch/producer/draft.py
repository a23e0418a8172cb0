"""One request as it is submitted: identity, envelope and cost hints. No I/O; both clients use it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from dispatch.contract import CONTRACT_VERSION, Call, Operation, RequestEnvelope, Scalar
from dispatch.errors import (
    DispatchError,
    IdempotencyConflict,
    InvalidRequest,
    OutcomeUnknown,
    RequestInProgress,
    StateConflict,
)
from dispatch.fabric import functions
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.functions import Admission
from dispatch.fabric.records import Exists, Refused, Submission
from dispatch.fabric.schema import LIMITS, key
from dispatch.producer.idempotency import KeyKind, fingerprint, key_hash
from dispatch.producer.options import CallOptions, whole_units
from dispatch.producer.request_ids import make_request_id
from dispatch.producer.room import refused
from dispatch.producer.session import Session
from dispatch.telemetry.producing import Sending, SendSpan, start_sending

BODY_TTL_MS = 60_000
"""How long a stored body waits for its submit; admission then fixes its expiry."""

_ENCODER = msgspec.json.Encoder()


class Draft(msgspec.Struct, frozen=True):
    """A request that can be submitted, and submitted again when the answer was lost.

    `own_id`: the request id was made up here, so nobody else's request can carry it.
    `body_key` is where `body` has to be stored first; None = it travels inside the submit.
    `lasting`: it goes on when its caller leaves, because whoever repeats its idempotency key gets its reply.
    `span`: the producer's span, ended by whoever submits it.
    """

    submission: Submission
    body: bytes
    body_key: str | None
    own_id: bool
    lasting: bool
    span: SendSpan

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.submission.request_id

    @property
    def repeatable(self) -> bool:
        """Whether others may ask for its reply again, so that its body must not be freed when it was read."""
        return self.submission.idempotency != ""

    def submit(self, timeout_ms: int | None) -> FunctionCall[Admission]:
        """Make the submit with `timeout_ms` left; the nonce stays, so a repeat is never a second request."""
        submission = self.submission
        if timeout_ms != submission.timeout_ms:
            submission = msgspec.structs.replace(submission, timeout_ms=timeout_ms)
        return functions.request_submit(submission)


def make_draft(session: Session, call: Call, options: CallOptions) -> Draft:
    """Make a request of `call` for `session`.

    Raises:
        InvalidRequest: metadata that feeds the cost rule is no whole number.
    """
    images, pages, units = check_call(call, options)
    request_id = options.request_id or make_request_id(options.scope)
    nonce = secrets.token_hex(16)
    inline = len(call.body) <= LIMITS["inline_body_bytes"]
    idempotency = "" if call.stream else _idempotency(options)
    span = start_sending(
        Sending(
            group=session.group,
            producer_id=session.producer_id,
            request_id=request_id,
            pool_id=options.pool_id,
            call=call,
            caller_request_id=options.caller_request_id,
            traceparent=options.traceparent,
            tracestate=options.tracestate,
        )
    )
    submitted = Submitted(request_id, session.producer_id, images, pages, units, span.traceparent, span.tracestate)
    submission = Submission(
        request_id=request_id,
        pool_id=options.pool_id,
        producer_id=session.producer_id,
        session=session.session_id,
        nonce=nonce,
        model=call.model,
        message_count=call.message_count,
        images=images,
        pages=pages,
        estimated_cost_units=units,
        timeout_ms=options.timeout_ms,
        envelope=_envelope(submitted, call, options),
        body_bytes=len(call.body),
        body=call.body if inline else b"",
        liveness_ms=session.liveness_ms,
        fairness_key=options.fairness_key or "",
        priority=options.priority,
        idempotency=idempotency,
        fingerprint=fingerprint(call, options.pool_id) if idempotency else "",
        detached=options.detached,
        max_wait_ms=options.max_wait_ms,
    )
    body_key = None if inline else key(session.group, "request_body", id=request_id, nonce=nonce)
    return Draft(submission, call.body, body_key, options.request_id is None, options.idempotency_key is not None, span)


def require_whole(call: Call) -> None:
    """Make sure that `call` asks for a whole answer.

    Raises:
        InvalidRequest: it asks for a stream.
    """
    if call.stream:
        raise InvalidRequest(
            "the body asks for a stream, and this gives back whole replies: use stream() or stream_call(), or leave "
            "'stream' out",
            param="stream",
            code="unsupported",
        )


def require_stream(call: Call, options: CallOptions) -> None:
    """Make sure that `call` asks for a stream, and can be one.

    Raises:
        InvalidRequest: it asks for a whole answer, its operation has no stream form, or it has an idempotency key.
    """
    if not call.stream:
        raise InvalidRequest(
            "the body does not ask for a stream: 'stream' must be true", param="stream", code="invalid_value"
        )
    if call.operation is Operation.EMBEDDINGS:
        raise InvalidRequest(
            "embeddings have no stream form: leave 'stream' out or send false", param="stream", code="unsupported"
        )
    if options.idempotency_key is not None:
        raise InvalidRequest(
            "a stream cannot be repeated, so it takes no idempotency key: leave it out, or ask for the whole answer",
            param="idempotency_key",
            code="stream_not_repeatable",
        )


def check_call(call: Call, options: CallOptions) -> tuple[int, int, int | None]:
    """Make sure that `call` can be made, queued or directly. Returns its images, pages and explicit cost units.

    What metadata says goes before what was found in the body.

    Raises:
        InvalidRequest: metadata that feeds the cost rule is no whole number.
    """
    given = options.metadata
    if not given:
        return call.image_count, 0, options.estimated_cost_units
    images = _count(given, "image_count")
    pages = _count(given, "chunk_page_count") or _count(given, "page_count") or 0
    units = options.estimated_cost_units
    if units is None:
        units = _count(given, "estimated_cost_units")
    return call.image_count if images is None else images, pages, units


class Submitted(msgspec.Struct, frozen=True):
    """What the envelope repeats of the submission."""

    request_id: str
    producer_id: str
    images: int
    pages: int
    units: int | None
    traceparent: str | None
    tracestate: str | None


def refusal(draft: Draft, answer: Exists | Refused) -> DispatchError:
    """Make the error for a submit that was neither admitted nor answered with a stored reply."""
    if isinstance(answer, Exists):
        return _in_use(draft, answer)
    return refused(draft.submission.pool_id, answer)


def _envelope(submitted: Submitted, call: Call, options: CallOptions) -> bytes:
    return _ENCODER.encode(
        RequestEnvelope(
            contract=CONTRACT_VERSION,
            request_id=submitted.request_id,
            producer_id=submitted.producer_id,
            pool_id=options.pool_id,
            operation=call.operation,
            model=call.model,
            stream=call.stream,
            message_count=call.message_count,
            image_count=submitted.images,
            page_count=submitted.pages,
            estimated_cost_units=submitted.units,
            timeout_ms=options.timeout_ms,
            fairness_key=options.fairness_key,
            priority=options.priority,
            traceparent=submitted.traceparent,
            tracestate=submitted.tracestate,
            caller_request_id=options.caller_request_id,
            metadata=dict(options.metadata),
        )
    )


def _in_use(draft: Draft, answer: Exists) -> DispatchError:
    """Make the error for a key or an id that stands for another submit."""
    which = "the idempotency key" if draft.lasting else f"request_id {draft.request_id!r}"
    earlier = answer.request_id or draft.request_id
    if answer.same is False:
        message = f"{which} was used for another call (request {earlier}); nothing was queued. Give each call its own"
        return IdempotencyConflict(message, request_id=earlier)
    if answer.state == "ended" and draft.lasting:
        return OutcomeUnknown(
            f"{which} stands for request {earlier}, which has ended, but its reply is gone; nothing was queued now. "
            "Use another key to make the call again"
        )
    if answer.state == "ended":  # it never ran, or it ended long ago
        return StateConflict(
            f"request_id {earlier!r} is in use: that request is ended, and its reply is not kept; nothing was queued"
        )
    if answer.same:
        message = f"{which} is in use: that request is {answer.state}; nothing was queued. Ask again when it has ended"
        return RequestInProgress(message, request_id=earlier, state=answer.state)
    return StateConflict(f"{which} is in use: that request is {answer.state}; nothing was queued")


def _idempotency(options: CallOptions) -> str:
    if options.idempotency_key is not None:
        return key_hash(options.scope, KeyKind.HEADER, options.idempotency_key)
    if options.request_id is not None:
        return key_hash(options.scope, KeyKind.REQUEST_ID, options.request_id)
    return ""


def _count(metadata: Mapping[str, Scalar], name: str) -> int | None:
    try:
        return whole_units(name, metadata.get(name))
    except InvalidRequest as error:
        raise InvalidRequest(f"metadata {error.message}", param=f"metadata.{name}", code=error.code) from None

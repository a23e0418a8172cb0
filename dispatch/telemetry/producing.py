"""The producer's span (`send {pool}`): a submit, from the call to its admission or refusal.

It is a real span of whatever tracer provider the process has; without one nothing is recorded and the context that was
there travels on as it is.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dispatch.contract import Call
from dispatch.errors import RequestRefused
from dispatch.telemetry import names
from dispatch.telemetry.identity import gen_ai_operation

_PROPAGATOR = TraceContextTextMapPropagator()
_SEND = "send"

# Resolved at the first span after a provider was set, whenever that is.
_tracer = trace.get_tracer(names.SCOPE, schema_url=names.SCHEMA_URL)


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """What is submitted. `traceparent` and `tracestate`: the caller's own context (None = that of the current span)."""

    group: str
    producer_id: str
    request_id: str
    pool_id: str
    call: Call
    caller_request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


class SendSpan:
    """The span of one submit: used as a context manager around it, ended by what comes of it. Only once.

    `traceparent` and `tracestate` are what travels with the request.
    """

    __slots__ = ("_span", "traceparent", "tracestate")

    def __init__(self, span: Span, traceparent: str | None, tracestate: str | None) -> None:
        self._span = span
        self.traceparent = traceparent
        self.tracestate = tracestate

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_: TracebackType | None
    ) -> None:
        if error is not None and self._span.is_recording():
            word = _word(error)
            self._span.set_attributes({names.ERROR_TYPE: word, names.ERROR_KIND: word})
            if sentence := str(error):
                self._span.set_attribute(names.ERROR_MESSAGE, sentence)
            self._span.set_status(Status(StatusCode.ERROR, sentence or word))
        self._span.end()


def start_sending(sending: Sending) -> SendSpan:
    """Begin the span of a submit. Costs some microseconds where nothing is recorded."""
    carrier: dict[str, str] = {}
    context: Context | None = None
    if sending.traceparent is not None:
        if isinstance(_tracer, trace.ProxyTracer) and isinstance(
            trace.get_tracer_provider(), trace.ProxyTracerProvider
        ):  # nobody records: no need to read it
            return SendSpan(trace.INVALID_SPAN, sending.traceparent, sending.tracestate)
        carrier["traceparent"] = sending.traceparent
        if sending.tracestate is not None:
            carrier["tracestate"] = sending.tracestate
        context = _PROPAGATOR.extract(carrier)
    span = _tracer.start_span(names.SEND_SPAN.format(pool=sending.pool_id), context, SpanKind.PRODUCER)
    if span.is_recording():
        span.set_attributes(_attributes(sending))
    elif sending.traceparent is not None:
        return SendSpan(span, sending.traceparent, sending.tracestate)
    carrier = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return SendSpan(span, carrier.get("traceparent"), carrier.get("tracestate"))


def _attributes(sending: Sending) -> dict[str, str | int | bool]:
    call = sending.call
    found: dict[str, str | int | bool] = {
        names.MESSAGING_SYSTEM: names.VALKEY,
        names.MESSAGING_OPERATION_NAME: _SEND,
        names.MESSAGING_OPERATION_TYPE: _SEND,
        names.MESSAGING_DESTINATION_NAME: sending.pool_id,
        names.MESSAGING_MESSAGE_ID: sending.request_id,
        names.MESSAGING_BODY_SIZE: len(call.body),
        names.GEN_AI_OPERATION_NAME: gen_ai_operation(call.operation),
        names.GEN_AI_REQUEST_MODEL: call.model,
        names.GEN_AI_REQUEST_STREAM: call.stream,
        names.REQUEST_ID: sending.request_id,
        names.PRODUCER_ID: sending.producer_id,
        names.POOL_ID: sending.pool_id,
        names.FABRIC_GROUP_ID: sending.group,
    }
    if call.message_count is not None:
        found[names.MESSAGE_COUNT] = call.message_count
    if sending.caller_request_id is not None:
        found[names.CALLER_REQUEST_ID] = sending.caller_request_id
    return found


def _word(error: BaseException) -> str:
    """Return a word of few for why a submit came to nothing."""
    if isinstance(error, RequestRefused):
        return error.reason
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__

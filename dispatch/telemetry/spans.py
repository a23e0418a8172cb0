"""From records of the fabric's streams to spans: what a request's ending and its delivery look like in a trace.

One ending makes a dispatch span (`process {pool}`, from submit to end) and under it a client span for each attempt. A
delivery makes one more under the dispatch span. Every ending has its dispatch span, also of what never ran. A status is
ERROR for every ending but `succeeded`.

What each time means, in ms of the server's clock: `queue_wait_ms` of a dispatch span is from the submit to the first
claim (to the end, where there was none), of a client span from the submit or the attempt before to its claim;
`execution_ms` is from claim to end, of a dispatch span the sum of its attempts; `total_latency_ms` is from the submit
to the end; `delivery_ms` is from the end to the producer's acknowledgement.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from dispatch.contract import Attempt, Operation, RequestEnvelope
from dispatch.contract.details import NO_DETAILS, AttemptDetails
from dispatch.telemetry import names
from dispatch.telemetry.identity import (
    DELIVER,
    PROCESS,
    Request,
    Trace,
    always,
    attempt_part,
    gen_ai_operation,
    span_id,
    trace_of,
)
from dispatch.telemetry.server_address import server_of

_SCOPE = InstrumentationScope(names.SCOPE, schema_url=names.SCHEMA_URL)
_SUCCEEDED = "succeeded"
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_NO_STATE = TraceState()
_UNSET = Status(StatusCode.UNSET)
_NS_PER_MS = 1_000_000
_PROVIDER = names.OPENAI
"""`gen_ai.provider.name` of an endpoint that speaks OpenAI's API, whoever runs it: the convention's rule."""

Attributes = dict[str, AttributeValue]


class EndingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the endings stream (`record_id` = its id there). Times are ms of the server's clock.

    None or "" = does not apply or is not known. `claimed_ms` is of the run that the ending ended, None where none was
    under way; runs before it stand in `tries`, with `tried`, their details, in the same order. `left_out` > 0: a record
    that stands for so many refusals of one pool and reason, of which nothing else is known.
    """

    record_id: str
    ending: str
    outcome: str
    pool_id: str
    ended_ms: int
    submitted_ms: int
    request_id: str = ""
    producer_id: str = ""
    gateway_id: str = ""
    dispatcher_id: str = ""
    endpoint_id: str = ""
    attempt: int = 0
    cost_units: int | None = None
    body_bytes: int | None = None
    skip_reason: str = ""
    claimed_ms: int | None = None
    status: int | None = None
    error_type: str = ""
    error_message: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int = 0
    first_chunk_ms: int | None = None
    tries: tuple[Attempt, ...] = ()
    tried: tuple[AttemptDetails, ...] = ()
    details: AttemptDetails = NO_DETAILS
    envelope: RequestEnvelope | None = None
    left_out: int = 0


class DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request whose reply its producer has handed over: ended at `ended_ms`, acknowledged at `acked_ms`."""

    record_id: str
    request_id: str
    pool_id: str
    producer_id: str
    ending: str
    submitted_ms: int
    ended_ms: int
    acked_ms: int
    traceparent: str = ""


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt; `last`: the ending ended it, no other followed."""

    number: int
    waited_from_ms: int
    claimed_ms: int
    ended_ms: int
    status: int | None
    error_type: str
    gateway_id: str
    endpoint_id: str
    details: AttemptDetails
    last: bool = False


def spans_of(
    record: EndingRecord, group: str, resource: Resource, samples_root: Callable[[int], bool] = always
) -> list[ReadableSpan]:
    """Return the dispatch span of an ending and the client spans of its attempts. The same record: the same ids.

    `samples_root` says by its id whether a trace is sampled that begins here; else it is as its producer says.
    """
    request = _named(record, group)
    tracestate = None if record.envelope is None else record.envelope.tracestate
    maker = _Maker(request, trace_of(request, samples_root), tracestate, resource)
    runs = _runs_of(record)
    shared = _shared(record, group)
    spans = [_process_span(record, runs, shared, maker)]
    spans += [_client_span(record, run, shared, maker) for run in runs]
    return spans


def delivery_span(
    record: DeliveryRecord, group: str, resource: Resource, samples_root: Callable[[int], bool] = always
) -> ReadableSpan:
    """Return the span of a delivery. The same record: the same id. `samples_root`: see `spans_of`."""
    request = Request(group, record.request_id, record.submitted_ms, record.traceparent)
    maker = _Maker(request, trace_of(request, samples_root), None, resource)
    attributes: Attributes = {
        names.REQUEST_ID: record.request_id,
        names.PRODUCER_ID: record.producer_id,
        names.POOL_ID: record.pool_id,
        names.FABRIC_GROUP_ID: group,
        names.ENDING: record.ending,
        names.DELIVERY_MS: max(0, record.acked_ms - record.ended_ms),
    }
    name = names.DELIVER_SPAN.format(pool=record.pool_id)
    made = _Span(name, DELIVER, SpanKind.INTERNAL, record.ended_ms, record.acked_ms)
    return maker.make(made, attributes)


class _Span(msgspec.Struct, frozen=True):
    """Name, identity and extent of a span."""

    name: str
    part: str
    kind: SpanKind
    start_ms: int
    end_ms: int


class _Maker:
    """Makes the spans of one request."""

    def __init__(self, request: Request, trace: Trace, tracestate: str | None, resource: Resource) -> None:
        self._request = request
        self._resource = resource
        self._trace = trace
        self._state = TraceState.from_header([tracestate]) if tracestate and trace.parent_id else _NO_STATE
        self._flags = _SAMPLED if trace.sampled else _NOT_SAMPLED
        self._process_id = span_id(request, PROCESS)

    def make(self, span: _Span, attributes: Attributes, status: Status | None = None) -> ReadableSpan:
        """Make a span of this request's trace: the dispatch span under the producer's, others under that."""
        own = self._process_id if span.part == PROCESS else span_id(self._request, span.part)
        above = self._trace.parent_id if span.part == PROCESS else self._process_id
        return ReadableSpan(
            name=span.name,
            context=self._context(own),
            parent=self._context(above, remote=span.part == PROCESS) if above else None,
            resource=self._resource,
            attributes=attributes,
            kind=span.kind,
            status=status or _UNSET,
            start_time=span.start_ms * _NS_PER_MS,
            end_time=max(span.start_ms, span.end_ms) * _NS_PER_MS,
            instrumentation_scope=_SCOPE,
        )

    def _context(self, own: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(self._trace.trace_id, own, remote, self._flags, self._state)


def _named(record: EndingRecord, group: str) -> Request:
    envelope = record.envelope
    traceparent = "" if envelope is None else envelope.traceparent or ""
    # A summary of refusals is about no request: its own record names it.
    return Request(group, record.request_id or record.record_id, record.submitted_ms, traceparent)


def _runs_of(record: EndingRecord) -> list[_Run]:
    runs: list[_Run] = []
    since = record.submitted_ms
    for at, one in enumerate(record.tries):
        run = _Run(
            number=one.number,
            waited_from_ms=since,
            claimed_ms=one.claimed_ms,
            ended_ms=one.ended_ms,
            status=one.status,
            error_type=one.error_type,
            gateway_id=one.gateway_id,
            endpoint_id=one.endpoint_id,
            details=record.tried[at] if at < len(record.tried) else NO_DETAILS,
        )
        runs.append(run)
        since = one.ended_ms
    if record.claimed_ms is not None:
        run = _Run(
            number=record.attempt,
            waited_from_ms=since,
            claimed_ms=record.claimed_ms,
            ended_ms=record.ended_ms,
            status=record.status,
            error_type=record.error_type or ("" if record.outcome == _SUCCEEDED else record.outcome),
            gateway_id=record.gateway_id,
            endpoint_id=record.endpoint_id,
            details=record.details,
            last=True,
        )
        runs.append(run)
    return runs


def _process_span(record: EndingRecord, runs: list[_Run], shared: Attributes, maker: _Maker) -> ReadableSpan:
    first_claim = runs[0].claimed_ms if runs else record.ended_ms
    error = record.error_type or ("" if record.ending == _SUCCEEDED else record.ending)
    attributes: Attributes = {
        names.MESSAGING_SYSTEM: names.VALKEY,
        names.MESSAGING_OPERATION_NAME: PROCESS,
        names.MESSAGING_OPERATION_TYPE: PROCESS,
        names.MESSAGING_DESTINATION_NAME: record.pool_id,
        **shared,
        names.ENDING: record.ending,
        names.OUTCOME: record.outcome,
        names.QUEUE_WAIT_MS: max(0, first_claim - record.submitted_ms),
        names.TOTAL_LATENCY_MS: max(0, record.ended_ms - record.submitted_ms),
    }
    if runs:
        attributes[names.EXECUTION_MS] = sum(max(0, run.ended_ms - run.claimed_ms) for run in runs)
    last = runs[-1] if runs else None
    _say(
        attributes,
        {
            names.MESSAGING_MESSAGE_ID: record.request_id,
            names.MESSAGING_BODY_SIZE: record.body_bytes,
            names.DISPATCHER_ID: record.dispatcher_id,
            names.GATEWAY_ID: record.gateway_id or (last.gateway_id if last else ""),
            names.ENDPOINT_ID: record.endpoint_id or (last.endpoint_id if last else ""),
            names.BACKEND_ADDRESS: last.details.backend_address if last else None,
            names.ATTEMPT: record.attempt or (last.number if last else None),
            names.SKIP_REASON: record.skip_reason,
            names.STATUS: record.status,
            names.ERROR_TYPE: error,
            names.ERROR_KIND: error,
            names.ERROR_MESSAGE: record.error_message,
            names.CHUNK_COUNT: record.chunks or None,
            names.LEFT_OUT: record.left_out or None,
            **_tokens_of(record),
        },
    )
    name = names.PROCESS_SPAN.format(pool=record.pool_id)
    span = _Span(name, PROCESS, SpanKind.CONSUMER, record.submitted_ms, record.ended_ms)
    return maker.make(span, attributes, _status(record.ending, record.error_message or error))


def _client_span(record: EndingRecord, run: _Run, shared: Attributes, maker: _Maker) -> ReadableSpan:
    details, envelope = run.details, record.envelope
    model = "" if envelope is None else envelope.model
    operation = gen_ai_operation(Operation.CHAT_COMPLETIONS if envelope is None else envelope.operation)
    host, port = server_of(details.backend_address or "")
    message = (record.error_message if run.last else "") or details.error_message or ""
    tokens = _tokens_of(record) if run.last else {}
    attributes: Attributes = {
        names.GEN_AI_PROVIDER_NAME: _PROVIDER,
        **shared,
        names.GEN_AI_OPERATION_NAME: operation,
        names.ATTEMPT: run.number,
        names.QUEUE_WAIT_MS: max(0, run.claimed_ms - run.waited_from_ms),
        names.EXECUTION_MS: max(0, run.ended_ms - run.claimed_ms),
    }
    _say(
        attributes,
        {
            names.GATEWAY_ID: run.gateway_id,
            names.DISPATCHER_ID: record.dispatcher_id if run.last else "",
            names.ENDPOINT_ID: run.endpoint_id,
            names.BACKEND_ADDRESS: details.backend_address,
            names.SERVER_ADDRESS: host,
            names.SERVER_PORT: port,
            names.STATUS: run.status,
            names.VERDICT: details.verdict,
            names.ERROR_TYPE: run.error_type,
            names.ERROR_KIND: run.error_type,
            names.ERROR_MESSAGE: message,
            names.GEN_AI_REQUEST_MAX_TOKENS: details.max_tokens,
            names.GEN_AI_REQUEST_TEMPERATURE: details.temperature,
            names.GEN_AI_RESPONSE_ID: details.response_id,
            names.GEN_AI_RESPONSE_MODEL: details.response_model,
            names.GEN_AI_RESPONSE_FINISH_REASONS: details.finish_reasons,
            names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: _seconds(details.first_chunk_ms),
            names.GEN_AI_USAGE_INPUT_TOKENS: details.input_tokens,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: details.output_tokens,
            names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: details.cached_input_tokens,
            names.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: details.reasoning_output_tokens,
            **{name: value for name, value in tokens.items() if value is not None},
        },
    )
    name = names.CLIENT_SPAN.format(operation=operation, model=model).rstrip()
    span = _Span(name, attempt_part(run.number), SpanKind.CLIENT, run.claimed_ms, run.ended_ms)
    failed = run.error_type or not run.last
    status = Status(StatusCode.ERROR, message or run.error_type) if failed else None
    return maker.make(span, attributes, status)


def _shared(record: EndingRecord, group: str) -> Attributes:
    """Return what all spans of an ending say: whose it is, and what was asked for."""
    attributes: Attributes = {names.POOL_ID: record.pool_id, names.FABRIC_GROUP_ID: group}
    if record.request_id:
        attributes[names.REQUEST_ID] = record.request_id
    if record.producer_id:
        attributes[names.PRODUCER_ID] = record.producer_id
    if record.cost_units is not None:
        attributes[names.COST_UNITS] = record.cost_units
    envelope = record.envelope
    if envelope is not None:
        attributes[names.GEN_AI_OPERATION_NAME] = gen_ai_operation(envelope.operation)
        attributes[names.GEN_AI_REQUEST_MODEL] = envelope.model
        attributes[names.GEN_AI_REQUEST_STREAM] = envelope.stream
        if envelope.message_count is not None:
            attributes[names.MESSAGE_COUNT] = envelope.message_count
        if envelope.caller_request_id is not None:
            attributes[names.CALLER_REQUEST_ID] = envelope.caller_request_id
    return attributes


def _tokens_of(record: EndingRecord) -> dict[str, AttributeValue | None]:
    return {
        names.GEN_AI_USAGE_INPUT_TOKENS: record.input_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: record.output_tokens,
    }


def _say(attributes: Attributes, known: dict[str, AttributeValue | None]) -> None:
    """Add what is known: unknown is absent, never 0 or empty."""
    for name, value in known.items():
        if value is not None and value != "" and value != ():  # noqa: PLR1714 - a set costs twice as much, for each value
            attributes[name] = value


def _status(ending: str, sentence: str) -> Status | None:
    return None if ending == _SUCCEEDED else Status(StatusCode.ERROR, sentence)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000

"""Records of endings as spans: what a trace says of a request, however it ended."""

from __future__ import annotations

import msgspec
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanKind, StatusCode

from dispatch.contract import Attempt, Operation, RequestEnvelope
from dispatch.contract.details import AttemptDetails
from dispatch.errors import ContractError
from dispatch.fabric.schema import ENDINGS
from dispatch.telemetry import names
from dispatch.telemetry.identity import Request, attempt_part, traceparent_of
from dispatch.telemetry.spans import DeliveryRecord, EndingRecord, delivery_span, spans_of
from dispatch.telemetry.stream_records import read_ending

RESOURCE = Resource({"service.name": "test"})
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENVELOPE = RequestEnvelope(
    contract=1, request_id="r", producer_id="p", pool_id="default", operation=Operation.CHAT_COMPLETIONS,
    model="qwen3", stream=True, message_count=2, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1",
    caller_request_id="mine",
)  # fmt: skip
DETAILS = AttemptDetails(
    backend_address="http://10.0.0.7:8000/v1", response_id="chatcmpl-1", response_model="qwen3-8b",
    finish_reasons=("stop",), cached_input_tokens=3, reasoning_output_tokens=2, first_chunk_ms=250, max_tokens=64,
    temperature=0.5, verdict="good",
)  # fmt: skip
RECORD = EndingRecord(
    record_id="1-0", ending="succeeded", outcome="succeeded", pool_id="default", request_id="r", producer_id="p",
    gateway_id="g", dispatcher_id="g/default", endpoint_id="e", attempt=2, cost_units=4, body_bytes=99,
    skip_reason="lane_capacity", submitted_ms=1_000, claimed_ms=5_000, ended_ms=9_000, status=200, input_tokens=7,
    output_tokens=5, chunks=6, tries=(Attempt(1, 1_500, 2_500, 503, "endpoint_overloaded", "f", "e"),),
    tried=(AttemptDetails(backend_address="https://first/v1", error_message="endpoint 'e' answered 503"),),
    details=DETAILS, envelope=ENVELOPE,
)  # fmt: skip


def test_a_request_with_two_attempts_is_a_dispatch_span_over_two_client_spans() -> None:
    process, first, second = spans_of(RECORD, "prod", RESOURCE)
    assert [span.name for span in (process, first, second)] == ["process default", "chat qwen3", "chat qwen3"]
    assert [span.kind for span in (process, first, second)] == [SpanKind.CONSUMER, SpanKind.CLIENT, SpanKind.CLIENT]
    assert {f"{span.context.trace_id:032x}" for span in (process, first, second)} == {TRACE}
    assert f"{process.parent.span_id:016x}" == PARENT
    assert process.parent.is_remote
    assert {first.parent.span_id, second.parent.span_id} == {process.context.span_id}
    assert len({span.context.span_id for span in (process, first, second)}) == 3
    assert process.context.trace_state.to_header() == "vendor=1"
    assert (process.start_time, process.end_time) == (1_000_000_000, 9_000_000_000)
    assert (first.start_time, first.end_time) == (1_500_000_000, 2_500_000_000)
    assert (second.start_time, second.end_time) == (5_000_000_000, 9_000_000_000)
    assert [span.status.status_code for span in (process, first, second)] == [
        StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET,
    ]  # fmt: skip


def test_a_dispatch_span_has_every_attribute() -> None:
    process, *_ = spans_of(RECORD, "prod", RESOURCE)
    assert dict(process.attributes) == {
        names.MESSAGING_SYSTEM: "valkey", names.MESSAGING_OPERATION_NAME: "process",
        names.MESSAGING_OPERATION_TYPE: "process", names.MESSAGING_DESTINATION_NAME: "default",
        names.MESSAGING_MESSAGE_ID: "r", names.MESSAGING_BODY_SIZE: 99,
        names.GEN_AI_OPERATION_NAME: "chat", names.GEN_AI_REQUEST_MODEL: "qwen3", names.GEN_AI_REQUEST_STREAM: True,
        names.GEN_AI_USAGE_INPUT_TOKENS: 7, names.GEN_AI_USAGE_OUTPUT_TOKENS: 5,
        names.REQUEST_ID: "r", names.PRODUCER_ID: "p", names.POOL_ID: "default", names.FABRIC_GROUP_ID: "prod",
        names.GATEWAY_ID: "g", names.DISPATCHER_ID: "g/default", names.ENDPOINT_ID: "e",
        names.BACKEND_ADDRESS: "http://10.0.0.7:8000/v1", names.MESSAGE_COUNT: 2, names.COST_UNITS: 4,
        names.ATTEMPT: 2, names.QUEUE_WAIT_MS: 500, names.EXECUTION_MS: 5_000, names.TOTAL_LATENCY_MS: 8_000,
        names.STATUS: 200, names.ENDING: "succeeded", names.OUTCOME: "succeeded", names.SKIP_REASON: "lane_capacity",
        names.CALLER_REQUEST_ID: "mine", names.CHUNK_COUNT: 6,
    }  # fmt: skip


def test_client_spans_say_what_each_attempt_met() -> None:
    _, first, second = spans_of(RECORD, "prod", RESOURCE)
    shared = {
        names.GEN_AI_OPERATION_NAME: "chat", names.GEN_AI_PROVIDER_NAME: "openai", names.GEN_AI_REQUEST_MODEL: "qwen3",
        names.GEN_AI_REQUEST_STREAM: True, names.REQUEST_ID: "r", names.PRODUCER_ID: "p", names.POOL_ID: "default",
        names.FABRIC_GROUP_ID: "prod", names.COST_UNITS: 4, names.ENDPOINT_ID: "e", names.MESSAGE_COUNT: 2,
        names.CALLER_REQUEST_ID: "mine",
    }  # fmt: skip
    assert dict(second.attributes) == shared | {
        names.GEN_AI_REQUEST_MAX_TOKENS: 64, names.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        names.GEN_AI_RESPONSE_ID: "chatcmpl-1", names.GEN_AI_RESPONSE_MODEL: "qwen3-8b",
        names.GEN_AI_RESPONSE_FINISH_REASONS: ("stop",), names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: 0.25,
        names.GEN_AI_USAGE_INPUT_TOKENS: 7, names.GEN_AI_USAGE_OUTPUT_TOKENS: 5,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 3, names.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: 2,
        names.SERVER_ADDRESS: "10.0.0.7", names.SERVER_PORT: 8000, names.BACKEND_ADDRESS: "http://10.0.0.7:8000/v1",
        names.GATEWAY_ID: "g", names.DISPATCHER_ID: "g/default", names.ATTEMPT: 2, names.QUEUE_WAIT_MS: 2_500,
        names.EXECUTION_MS: 4_000, names.STATUS: 200, names.VERDICT: "good",
    }  # fmt: skip
    assert dict(first.attributes) == shared | {
        names.SERVER_ADDRESS: "first", names.SERVER_PORT: 443, names.BACKEND_ADDRESS: "https://first/v1",
        names.GATEWAY_ID: "f", names.ATTEMPT: 1, names.QUEUE_WAIT_MS: 500, names.EXECUTION_MS: 1_000,
        names.STATUS: 503, names.ERROR_TYPE: "endpoint_overloaded", names.ERROR_KIND: "endpoint_overloaded",
        names.ERROR_MESSAGE: "endpoint 'e' answered 503",
    }  # fmt: skip


def test_a_repeat_has_the_same_ids_and_another_request_of_the_same_name_has_others() -> None:
    def ids(record: EndingRecord, group: str = "prod") -> list[int]:
        return [span.context.span_id for span in spans_of(record, group, RESOURCE)]

    assert ids(RECORD) == ids(msgspec.structs.replace(RECORD, record_id="2-0"))
    later = msgspec.structs.replace(RECORD, submitted_ms=1_001)
    assert not set(ids(RECORD)) & set(ids(later))
    assert not set(ids(RECORD)) & set(ids(RECORD, "other"))


def test_what_the_gateway_sends_on_names_the_attempts_own_span() -> None:
    request = Request("prod", "r", 1_000, ENVELOPE.traceparent or "")
    *_, second = spans_of(RECORD, "prod", RESOURCE)
    assert traceparent_of(request, attempt_part(2)) == f"00-{TRACE}-{second.context.span_id:016x}-01"


@pytest.mark.parametrize("given", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_without_a_producers_context_the_trace_is_derived_from_the_request(given: str) -> None:
    envelope = msgspec.structs.replace(ENVELOPE, traceparent=given)
    record = msgspec.structs.replace(RECORD, envelope=envelope)
    process, client, _ = spans_of(record, "prod", RESOURCE)
    assert process.parent is None
    assert process.context.trace_id == client.context.trace_id != 0
    assert process.context.trace_flags.sampled
    assert spans_of(record, "prod", RESOURCE)[0].context.trace_id == process.context.trace_id


def test_the_callers_sampling_flag_is_kept() -> None:
    envelope = msgspec.structs.replace(ENVELOPE, traceparent=f"00-{TRACE}-{PARENT}-00")
    spans = spans_of(msgspec.structs.replace(RECORD, envelope=envelope), "prod", RESOURCE)
    assert [span.context.trace_flags.sampled for span in spans] == [False] * 3


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_has_a_dispatch_span_also_of_what_never_ran(ending: str) -> None:
    record = EndingRecord(
        record_id="1-0", ending=ending, outcome=ending, pool_id="default", request_id="r", submitted_ms=1, ended_ms=5
    )
    [span] = spans_of(record, "prod", RESOURCE)
    assert span.attributes[names.ENDING] == ending
    assert (span.attributes[names.QUEUE_WAIT_MS], span.attributes[names.TOTAL_LATENCY_MS]) == (4, 4)
    assert names.EXECUTION_MS not in span.attributes
    assert span.status.status_code is (StatusCode.UNSET if ending == "succeeded" else StatusCode.ERROR)
    assert span.attributes.get(names.ERROR_TYPE) == (None if ending == "succeeded" else ending)


def test_a_dropped_reply_is_an_error_of_the_request_and_not_of_the_run() -> None:
    record = msgspec.structs.replace(RECORD, ending="reply_dropped", outcome="succeeded", tries=(), tried=())
    process, client = spans_of(record, "prod", RESOURCE)
    assert (process.status.status_code, client.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert (process.attributes[names.ERROR_TYPE], process.attributes[names.OUTCOME]) == ("reply_dropped", "succeeded")
    assert names.ERROR_TYPE not in client.attributes


def test_a_delivery_is_a_span_under_the_dispatch_span() -> None:
    process, *_ = spans_of(RECORD, "prod", RESOURCE)
    delivery = DeliveryRecord(
        record_id="1-0", request_id="r", pool_id="default", producer_id="p", ending="succeeded", submitted_ms=1_000,
        ended_ms=9_000, acked_ms=9_040, traceparent=ENVELOPE.traceparent or "",
    )  # fmt: skip
    span = delivery_span(delivery, "prod", RESOURCE)
    assert (span.name, span.parent.span_id) == ("deliver default", process.context.span_id)
    assert span.context.trace_id == process.context.trace_id
    assert span.attributes[names.DELIVERY_MS] == 40
    assert (span.start_time, span.end_time) == (9_000_000_000, 9_040_000_000)


def test_a_record_that_lacks_fields_or_has_damaged_ones_is_read_all_the_same() -> None:
    fields = {b"ending": b"malformed", b"pool": b"default", b"ended_ms": b"5", b"request_id": b"r"}
    damaged = {b"envelope": b"{", b"details": b"[]", b"tried": b"{}", b"tries": b"", b"claimed_ms": b""}
    assert read_ending("1-0", fields | damaged) == read_ending("1-0", fields)
    record = read_ending("1-0", fields)
    assert (record.outcome, record.submitted_ms, record.claimed_ms) == ("malformed", 5, None)
    assert len(spans_of(record, "prod", RESOURCE)) == 1


def test_what_is_no_record_is_named() -> None:
    with pytest.raises(ContractError, match="1-0"):
        read_ending("1-0", {b"ending": b"lost"})
    with pytest.raises(ContractError, match="1-0"):
        read_ending("1-0", {b"ending": b"lost", b"ended_ms": b"soon"})

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from dispatch.contract import Call, Operation, RequestEnvelope
from dispatch.errors import InvalidRequest, RequestRefused, StateConflict
from dispatch.fabric.records import Exists, Refused
from dispatch.fabric.schema import LIMITS, document
from dispatch.producer.draft import Draft, make_draft, refusal, require_stream, require_whole
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.session import Session

SESSION = Session.begin(ClientOptions(fabric_group="g", producer_id="p"))


def call(body: bytes = b"{}", **changes: Any) -> Call:
    return Call(operation=Operation.CHAT_COMPLETIONS, body=body, model="m", message_count=2, **changes)


def draft(metadata: dict[str, Any] | None = None, of: Call | None = None, **options: Any) -> Draft:
    return make_draft(SESSION, of or call(), CallOptions(metadata=metadata or {}, **options))


def envelope(of: Draft) -> RequestEnvelope:
    return msgspec.json.decode(of.submission.envelope, type=RequestEnvelope)


@pytest.mark.parametrize(
    ("metadata", "images", "pages", "units"),
    [
        ({}, 3, 0, None),
        ({"image_count": 1}, 1, 0, None),
        ({"image_count": 0}, 0, 0, None),
        ({"page_count": 9}, 3, 9, None),
        ({"chunk_page_count": 4, "page_count": 9}, 3, 4, None),
        ({"chunk_page_count": 0, "page_count": 9}, 3, 9, None),
        ({"chunk_page_count": None, "page_count": 9}, 3, 9, None),
        ({"estimated_cost_units": 7}, 3, 0, 7),
    ],
)
def test_cost_hints_come_from_metadata_before_the_body(
    metadata: dict[str, Any], images: int, pages: int, units: int | None
) -> None:
    made = draft(metadata, call(image_count=3))
    submission, sent = made.submission, envelope(made)
    assert (submission.images, submission.pages, submission.estimated_cost_units) == (images, pages, units)
    assert (sent.image_count, sent.page_count, sent.estimated_cost_units) == (images, pages, units)
    assert sent.metadata == metadata


def test_an_explicit_cost_goes_before_metadata() -> None:
    assert draft({"estimated_cost_units": 7}, estimated_cost_units=2).submission.estimated_cost_units == 2


@pytest.mark.parametrize("value", ["3", 1.5, -1, True, 2**40])
@pytest.mark.parametrize("name", ["image_count", "page_count", "chunk_page_count", "estimated_cost_units"])
def test_cost_hints_that_are_no_counts_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        draft({name: value})
    assert caught.value.param == f"metadata.{name}"


def test_small_bodies_travel_inside_and_large_ones_by_their_own_key() -> None:
    limit = LIMITS["inline_body_bytes"]
    small, large = draft(of=call(b"x" * limit)), draft(of=call(b"x" * (limit + 1)), request_id="r")
    assert (small.body_key, small.submission.body, small.submission.body_bytes) == (None, b"x" * limit, limit)
    assert (large.submission.body, large.submission.body_bytes) == (b"", limit + 1)
    assert large.body_key == f"{{g}}:body:llm:request:r:{large.submission.nonce}"


def test_a_repeat_differs_in_nothing_but_the_time_that_is_left() -> None:
    made = draft(timeout_ms=5000)
    first, again = list(made.submit(5000).args), list(made.submit(4000).args)
    assert first != again
    assert [5000 if cell == 4000 else cell for cell in again] == first


def test_ids_are_made_up_unless_they_are_given() -> None:
    assert draft().request_id != draft().request_id
    assert (draft().own_id, draft(request_id="r").own_id) == (True, False)


def test_the_trace_of_the_running_span_travels_along() -> None:
    assert envelope(draft()).traceparent is None
    with TracerProvider().get_tracer("test").start_as_current_span("send") as span:
        found = envelope(draft()).traceparent
        given = envelope(draft(traceparent="00-1-2-01", tracestate="a=b"))
    context = span.get_span_context()
    assert found is not None
    assert found.startswith(f"00-{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}-")
    assert (given.traceparent, given.tracestate) == ("00-1-2-01", "a=b")


def test_a_whole_answer_and_a_stream_are_asked_for_in_different_ways() -> None:
    require_whole(call())
    require_stream(call(stream=True), CallOptions(request_id="r"))
    with pytest.raises(InvalidRequest, match=r"stream\(\) or stream_call\(\)") as caught:
        require_whole(call(stream=True))
    assert caught.value.param == "stream"
    with pytest.raises(InvalidRequest, match="'stream' must be true"):
        require_stream(call(), CallOptions())
    vectors = Call(operation=Operation.EMBEDDINGS, body=b"{}", model="m", stream=True)
    with pytest.raises(InvalidRequest, match="embeddings have no stream form"):
        require_stream(vectors, CallOptions())


def test_a_stream_takes_no_idempotency_key_and_its_id_is_no_key() -> None:
    with pytest.raises(InvalidRequest) as caught:
        require_stream(call(stream=True), CallOptions(idempotency_key="k"))
    assert (caught.value.param, caught.value.code) == ("idempotency_key", "stream_not_repeatable")
    made = draft(of=call(stream=True), request_id="r")
    assert (made.request_id, made.repeatable, made.lasting) == ("r", False, False)


def test_refusals_carry_their_facts() -> None:
    error = refusal(draft(pool_id="a"), Refused("pool_full", 10, 10, 1500))
    assert isinstance(error, RequestRefused)
    assert (error.reason, error.pool_id, error.value, error.limit, error.retry_after_ms) == (
        "pool_full", "a", 10, 10, 1500,
    )  # fmt: skip
    assert (error.pool, error.depth, error.retry_after) == ("a", 10, 1.5)
    assert str(error) == (
        "refused (pool_full): 10 requests wait in pool 'a', 10 are allowed (max_queue_depth); nothing was queued: try "
        "again in 2 s, or use another pool"
    )
    for reason in document()["refusals"]:
        told = str(refusal(draft(pool_id="a"), Refused(reason, 3, 2, None)))
        assert f"refused ({reason}): " in told
        assert "'a'" in told or reason == "id_conflict", told
        assert "{" not in told
    assert isinstance(refusal(draft(request_id="r"), Exists("leased", "r")), StateConflict)


def test_key_and_level_go_to_the_server_and_into_the_envelope() -> None:
    made = draft(fairness_key="anna", priority=0)
    assert (made.submission.fairness_key, made.submission.priority) == ("anna", 0)
    assert (envelope(made).fairness_key, envelope(made).priority) == ("anna", 0)
    plain = draft()
    assert (plain.submission.fairness_key, plain.submission.priority) == ("", None)
    assert (envelope(plain).fairness_key, envelope(plain).priority) == (None, None)

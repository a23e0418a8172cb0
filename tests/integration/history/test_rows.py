"""What is written is there, once, whatever it holds: one suite on an embedded history and over HTTP."""

from __future__ import annotations

import pytest

from dispatch.contract import Attempt
from dispatch.contract.details import AttemptDetails
from dispatch.errors import HistoryUnavailable
from dispatch.fabric.schema import ENDINGS
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import Filter
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.history.verify import GRACE_MS, check_records
from tests.support.history import NOW_MS, PASSWORD, delivery, envelope, queued_only, record, write

HOSTILE = ["'; DROP TABLE dispatch_requests; --", "a\\", "{group:String}", 'x"\n\t\0', "%s %(x)s", "é\u2028'"]


def test_the_tables_are_made_once_and_their_time_can_be_changed(store: HistoryStore) -> None:
    assert store.init(90) == []
    changed = store.init(30)
    assert len(changed) == 5
    assert all(line.endswith("rows are kept for 30 days") for line in changed)
    try:
        [found] = store.query("SELECT create_table_query AS text FROM system.tables WHERE name = 'dispatch_requests'"
                              " AND database = currentDatabase()")  # fmt: skip
        assert "toIntervalDay(30)" in found["text"]
    finally:
        store.init(90)


def test_the_layout_is_the_collectors(store: HistoryStore) -> None:
    rows = store.query(
        "SELECT name, type FROM system.columns WHERE table = 'otel_traces' AND database = currentDatabase()"
        " ORDER BY position"
    )
    text_map = "Map(LowCardinality(String), String)"
    assert {row["name"]: row["type"] for row in rows} == {
        "Timestamp": "DateTime64(9)", "TraceId": "String", "SpanId": "String", "ParentSpanId": "String",
        "TraceState": "String", "SpanName": "LowCardinality(String)", "SpanKind": "LowCardinality(String)",
        "ServiceName": "LowCardinality(String)", "ResourceAttributes": text_map, "ScopeName": "String",
        "ScopeVersion": "String", "SpanAttributes": text_map, "Duration": "UInt64",
        "StatusCode": "LowCardinality(String)", "StatusMessage": "String",
        "Events.Timestamp": "Array(DateTime64(9))", "Events.Name": "Array(LowCardinality(String))",
        "Events.Attributes": f"Array({text_map})", "Links.TraceId": "Array(String)", "Links.SpanId": "Array(String)",
        "Links.TraceState": "Array(String)", "Links.Attributes": f"Array({text_map})",
    }  # fmt: skip


def test_a_span_is_written_as_a_collector_writes_it(history: History) -> None:
    write(history.store, history.group, record(1))
    rows = history.store.query(
        "SELECT *, toUnixTimestamp64Nano(Timestamp) AS nanoseconds FROM otel_traces"
        " WHERE SpanAttributes['llm_dispatch.fabric_group_id'] = {group:String} ORDER BY SpanKind",
        {"group": history.group},
    )
    client, process = rows
    assert (client["SpanKind"], process["SpanKind"]) == ("Client", "Consumer")
    assert process["SpanName"] == "process default"
    assert process["ServiceName"] == "fabric-dispatch"
    assert process["ResourceAttributes"]["service.instance.id"] == "g-1"
    assert process["nanoseconds"] == record(1).submitted_ms * 1_000_000
    assert process["Duration"] == 1_000_000_000
    assert (process["StatusCode"], process["ParentSpanId"]) == ("Unset", "")
    assert client["ParentSpanId"] == process["SpanId"]
    assert client["TraceId"] == process["TraceId"]
    assert client["SpanAttributes"]["gen_ai.response.finish_reasons"] == '["stop"]'
    assert client["SpanAttributes"]["gen_ai.request.stream"] == "false"
    assert (len(process["TraceId"]), len(process["SpanId"])) == (32, 16)


def test_a_request_is_told_with_all_its_attempts_and_its_delivery(history: History) -> None:
    tried = Attempt(1, NOW_MS - 60_900, NOW_MS - 60_800, 503, "endpoint_overloaded", "g-0", "e-0")
    ended = record(
        0, attempt=2, tries=(tried,), skip_reason="lane_capacity", chunks=6,
        tried=(AttemptDetails(backend_address="https://first/v1", error_message="endpoint 'e-0' answered 503"),),
        envelope=envelope(request_id="r-0", caller_request_id="mine", stream=True),
    )  # fmt: skip
    write(history.store, history.group, ended, delivery(ended, 40))
    story = history.request("r-0")
    assert story is not None
    told = story.request
    assert (told.ending, told.outcome, told.pool_id, told.model, told.stream) == (
        "succeeded", "succeeded", "default", "qwen3", True,
    )  # fmt: skip
    assert (told.submitted_ms, told.ended_ms) == (ended.submitted_ms, ended.ended_ms)
    assert (told.queue_wait_ms, told.execution_ms, told.total_latency_ms, told.delivery_ms) == (100, 800, 1_000, 40)
    assert (told.producer_id, told.gateway_id, told.endpoint_id, told.attempt) == ("p-1", "g-1", "e-1", 2)
    assert (told.cost_units, told.message_count, told.body_bytes, told.chunk_count) == (2, 2, 99, 6)
    assert (told.status, told.error_type, told.input_tokens, told.output_tokens) == (200, None, 7, 5)
    assert (told.caller_request_id, told.skip_reason, told.times) == ("mine", "lane_capacity", 1)
    assert story.delivered_ms == ended.ended_ms + 40
    first, second = story.attempts
    assert (first.attempt, first.status, first.error_type, first.endpoint_id) == (1, 503, "endpoint_overloaded", "e-0")
    assert (first.error_message, first.execution_ms) == ("endpoint 'e-0' answered 503", 100)
    assert (second.attempt, second.status, second.error_type, second.finish_reasons) == (2, 200, None, ["stop"])
    assert (second.first_chunk_ms, second.verdict, second.cached_input_tokens) == (250, "good", 3)
    found = history.request("mine")
    assert found is not None
    assert found.request.request_id == "r-0"
    assert history.request("r-1") is None
    assert history.request("r-0", pools=("other",)) is None
    assert History(history.store, "another-group").request("r-0") is None


def test_every_ending_has_its_row(history: History) -> None:
    write(
        history.store,
        history.group,
        *(queued_only(at, ending=ending, outcome=ending) for at, ending in enumerate(ENDINGS)),
    )
    rows = history.requests(Filter()).rows
    assert [row.ending for row in reversed(rows)] == list(ENDINGS)
    assert all(row.execution_ms is None for row in rows)
    waited = {row.ending: row.queue_wait_ms for row in rows}
    assert waited.pop("rejected") is None
    assert set(waited.values()) == {1_000}
    stats = history.stats(Filter())
    assert stats.total.endings == dict.fromkeys(ENDINGS, 1)
    assert stats.total.queue_wait is not None
    assert stats.total.queue_wait.count == len(ENDINGS) - 1
    failed = {row.ending for row in history.requests(Filter(failed=True)).rows}
    assert failed == set(ENDINGS) - {"succeeded", "cancelled"}


def test_a_record_of_many_refusals_counts_as_many(history: History) -> None:
    many = queued_only(0, ending="rejected", outcome="rejected", request_id="", left_out=40, error_type="pool_full")
    write(history.store, history.group, many, queued_only(1, ending="rejected", outcome="rejected"))
    rows = history.requests(Filter(ending="rejected")).rows
    assert sorted(row.times for row in rows) == [1, 40]
    assert history.stats(Filter()).total.endings == {"rejected": 41}
    assert history.stats(Filter()).total.requests == 41
    [most, _] = history.errors(Filter())
    assert (most.error_type, most.requests) == ("pool_full", 40)


def test_writing_again_changes_nothing(history: History) -> None:
    records = [record(at, pool_id="a" if at % 2 else "b") for at in range(30)]
    deliveries = [delivery(one, 10 + at) for at, one in enumerate(records)]
    write(history.store, history.group, *records, *deliveries)
    wanted = Filter(since_ms=NOW_MS - 120_000, until_ms=NOW_MS)

    def answers() -> list[object]:
        listed = history.requests(wanted, limit=1_000).rows
        story = history.request("r-3")
        assert story is not None
        return [
            [(row.request_id, row.delivery_ms) for row in listed], story.attempts, history.stats(wanted),
            history.series(wanted, 10), history.tokens(wanted), history.errors(wanted),
            history.shares(wanted, 10, {"a": 1, "b": 1}), [row.requests for row in history.gateways()],
        ]  # fmt: skip

    before = answers()
    for _ in range(3):
        write(history.store, history.group, *records[::2], *deliveries)
    rows = history.store.query(
        "SELECT count() AS found FROM otel_traces WHERE SpanAttributes['llm_dispatch.fabric_group_id'] = {g:String}",
        {"g": history.group},
    )
    assert rows[0]["found"] > 90  # the spans themselves are there again
    assert answers() == before
    pages: list[str] = []
    cursor = ""
    while True:
        page = history.requests(wanted, limit=4, cursor=cursor)
        pages += [row.request_id for row in page.rows]
        cursor = page.cursor
        if not cursor:
            break
    assert pages == [f"r-{at}" for at in reversed(range(30))]


def test_verify_finds_the_missing_row(history: History) -> None:
    records = [record(at) for at in range(5)]
    write(history.store, history.group, *records[:2], *records[3:])
    shown = [{"request_id": one.request_id, "ending": one.ending, "ended_ms": one.ended_ms} for one in records]
    shown += [{"ending": "rejected", "ended_ms": NOW_MS}]
    shown += [{"request_id": "r-9", "ending": "failed", "ended_ms": NOW_MS - GRACE_MS + 1}]
    checked = check_records(history.store, history.group, shown, NOW_MS)
    assert (checked.missing, checked.written, checked.fresh, checked.unnamed) == (["r-2"], 4, 1, 1)
    assert checked.records == {"succeeded": 5, "rejected": 1, "failed": 1}
    write(history.store, history.group, records[2])
    assert check_records(history.store, history.group, shown, NOW_MS).missing == []


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_data(history: History, name: str) -> None:
    said = record(0, error_message=name, envelope=envelope(model=name, request_id="r-0"), ending="failed",
                  outcome="failed", error_type="endpoint_error")  # fmt: skip
    write(history.store, history.group, said, record(1))
    found = history.requests(Filter(model=name)).rows
    assert [(row.request_id, row.model, row.error_message) for row in found] == [("r-0", name, name)]
    assert history.requests(Filter(producer_id=name, pool_id=name, request_id=name)).rows == []
    assert History(history.store, name).requests(Filter()).rows == []
    assert history.stats(Filter()).total.requests == 2


def test_what_is_no_statement_is_refused_in_one_sentence(store: HistoryStore) -> None:
    with pytest.raises(HistoryUnavailable, match="refuses: Code: 47") as caught:
        store.query("SELECT nothing_of_this_name")
    assert PASSWORD not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_question_is_bounded_in_time(store: HistoryStore) -> None:
    store._answer_s, before = 0.1, store._answer_s
    try:
        with pytest.raises(HistoryUnavailable, match=r"has not answered within 0\.1 s; ask for less time"):
            store.query("SELECT count() FROM numbers(100000000000) WHERE sipHash64(number) = 1")
    finally:
        store._answer_s = before
    assert store.query("SELECT 1 AS one") == [{"one": 1}]

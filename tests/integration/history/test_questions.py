"""Lists, counts, percentiles, errors, tokens and shares: one suite on an embedded history and over HTTP."""

from __future__ import annotations

import pytest

from dispatch.contract.details import AttemptDetails
from dispatch.errors import InvalidRequest
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import Filter, Percentiles
from tests.support.history import NOW_MS, delivery, envelope, queued_only, record, write


def near(found: Percentiles) -> list[object]:
    return [pytest.approx(value, rel=0.02) for value in (found.p50, found.p95, found.p99)]


def test_lists_are_filtered_and_come_in_parts_newest_first(history: History) -> None:
    write(
        history.store,
        history.group,
        record(0, pool_id="a", ended_ms=NOW_MS - 5_000),
        record(1, pool_id="b", ended_ms=NOW_MS - 4_000, gateway_id="g-2", producer_id="p-2"),
        record(2, pool_id="a", ended_ms=NOW_MS - 3_000, endpoint_id="e-2", envelope=envelope(model="llama")),
        record(
            3, ended_ms=NOW_MS - 2_000, ending="failed", outcome="failed", error_type="endpoint_timeout",
            submitted_ms=NOW_MS - 9_000, claimed_ms=NOW_MS - 8_000,
        ),
        queued_only(4, ended_ms=NOW_MS - 1_000, submitted_ms=NOW_MS - 6_500),
    )  # fmt: skip

    def ids(**facts: object) -> str:
        return " ".join(row.request_id for row in history.requests(Filter(**facts)).rows)  # type: ignore[arg-type]  # per case

    assert ids() == "r-4 r-3 r-2 r-1 r-0"
    assert ids(pool_id="a") == "r-2 r-0"
    assert ids(pools=("b", "default")) == "r-4 r-3 r-1"
    assert ids(pools=("b",), pool_id="a") == ""
    assert ids(pools=()) == ""
    assert ids(gateway_id="g-2") == ids(producer_id="p-2") == "r-1"
    assert ids(endpoint_id="e-2") == ids(model="llama") == "r-2"
    assert ids(ending="failed") == ids(error_type="endpoint_timeout") == "r-3"
    assert ids(failed=True) == "r-4 r-3"
    assert ids(wait_over_ms=1_000) == "r-4"
    assert ids(run_over_ms=5_999) == "r-3"
    assert ids(run_over_ms=6_000) == ""
    assert ids(total_over_ms=5_000) == "r-4 r-3"
    assert ids(since_ms=NOW_MS - 4_000, until_ms=NOW_MS - 2_000) == "r-2 r-1"
    assert ids(request_id="r-1") == "r-1"
    first = history.requests(Filter(), limit=2)
    assert ([row.request_id for row in first.rows], first.truncated) == (["r-4", "r-3"], True)
    rest = history.requests(Filter(), limit=3, cursor=first.cursor)
    assert ([row.request_id for row in rest.rows], rest.truncated, rest.cursor) == (["r-2", "r-1", "r-0"], False, "")
    with pytest.raises(InvalidRequest, match="cursor 'x' is none of this list"):
        history.requests(Filter(), cursor="x")


def test_a_time_that_ends_before_it_begins_is_told_and_not_answered_with_nothing(history: History) -> None:
    backwards = Filter(since_ms=NOW_MS, until_ms=NOW_MS - 1)
    for ask in (history.requests, history.stats, history.errors, history.tokens):
        with pytest.raises(InvalidRequest, match="ends before it begins") as refused:
            ask(backwards)
        assert refused.value.param == "until_ms"
    assert history.requests(Filter(since_ms=NOW_MS, until_ms=NOW_MS)).rows == []


def test_requests_that_ended_at_once_are_all_listed(history: History) -> None:
    write(history.store, history.group, *(record(at, ended_ms=NOW_MS - 1_000) for at in range(9)))
    seen: list[str] = []
    cursor = ""
    for _ in range(9):
        page = history.requests(Filter(), limit=1, cursor=cursor)
        seen += [row.request_id for row in page.rows]
        cursor = page.cursor
    assert sorted(seen) == [f"r-{at}" for at in range(9)]
    assert cursor == ""


def test_long_lists_are_told_with_their_deliveries(history: History) -> None:
    """So many ids are too long for a URL; clients then send a form."""
    records = [record(at, request_id=f"{at:0128d}") for at in range(300)]
    write(history.store, history.group, *records, *(delivery(one, 5) for one in records))
    rows = history.requests(Filter(), limit=1_000).rows
    assert [row.delivery_ms for row in rows] == [5] * 300
    assert [row.request_id for row in rows] == [one.request_id for one in reversed(records)]


def test_percentiles_are_within_half_a_percent_and_throughput_is_exact(history: History) -> None:
    records = [
        record(
            at, pool_id="a", ended_ms=NOW_MS - 50_000 + at * 10, submitted_ms=NOW_MS - 150_000,
            claimed_ms=NOW_MS - 150_000 + at,
        )
        for at in range(1, 101)
    ]  # fmt: skip
    write(history.store, history.group, *records, *(delivery(one, at) for at, one in enumerate(records)))
    stats = history.stats(Filter(since_ms=NOW_MS - 100_000, until_ms=NOW_MS))
    [of_pool] = stats.pools
    for row in (stats.total, of_pool):
        assert (row.requests, row.per_second, row.cost_units) == (100, 1.0, 200)
        assert row.endings == {"succeeded": 100}
        assert row.queue_wait is not None
        assert row.queue_wait.count == 100
        assert near(row.queue_wait) == [51, 96, 100]
        assert row.delivery is not None
        assert row.delivery.count == 100
        assert near(row.delivery) == [50, 95, 99]
        assert row.total_latency is not None
        assert row.total_latency.p50 == pytest.approx(100_510, rel=0.005)
    nothing = history.stats(Filter(since_ms=NOW_MS, until_ms=NOW_MS + 1_000))
    assert (nothing.total.requests, nothing.total.per_second, nothing.total.queue_wait) == (0, 0.0, None)
    assert nothing.pools == []


def test_a_series_counts_each_step_and_pool(history: History) -> None:
    start = NOW_MS - 60_000
    write(
        history.store,
        history.group,
        record(0, pool_id="a", ended_ms=start),
        record(1, pool_id="a", ended_ms=start + 9_999, ending="failed", outcome="failed"),
        record(2, pool_id="b", ended_ms=start + 10_000),
        record(3, pool_id="b", ended_ms=start + 60_000),  # the end is excluded
    )
    series = history.series(Filter(since_ms=start, until_ms=NOW_MS), 10)
    assert [(point.start_ms - start, point.pool_id, point.requests, point.endings) for point in series.points] == [
        (0, "a", 2, {"succeeded": 1, "failed": 1}), (10_000, "b", 1, {"succeeded": 1}),
    ]  # fmt: skip
    assert series.points[0].per_second == 0.2
    assert series.points[0].execution is not None
    assert series.points[0].execution.p95 == pytest.approx(700, rel=0.005)
    with pytest.raises(InvalidRequest, match="makes more than 1000 steps"):
        history.series(Filter(since_ms=0, until_ms=NOW_MS), 10)
    with pytest.raises(InvalidRequest, match="ends before it begins"):
        history.series(Filter(since_ms=NOW_MS, until_ms=NOW_MS), 10)


def test_errors_are_counted_by_type(history: History) -> None:
    failed = {"ending": "failed", "outcome": "failed", "error_type": "endpoint_timeout", "status": 504}
    write(
        history.store,
        history.group,
        record(0),
        record(1, **failed, error_message="slow"),
        record(2, **failed, pool_id="a", error_message="slower"),
        queued_only(3),
        queued_only(4, ending="cancelled", outcome="cancelled", error_type="cancelled"),
    )
    timeout, expired = history.errors(Filter())
    assert (timeout.ending, timeout.error_type, timeout.requests) == ("failed", "endpoint_timeout", 2)
    assert (timeout.pool_ids, timeout.endpoint_ids, timeout.statuses) == (["a", "default"], ["e-1"], [504])
    assert (timeout.example_id, timeout.example_message) == ("r-2", "slower")
    assert (timeout.first_ms, timeout.last_ms) == (NOW_MS - 59_999, NOW_MS - 59_998)
    assert (expired.ending, expired.requests, expired.endpoint_ids, expired.statuses) == ("expired", 1, [], [])


def test_tokens_say_of_how_many_they_are_known(history: History) -> None:
    unreported = {"input_tokens": None, "output_tokens": None, "details": AttemptDetails()}
    write(history.store, history.group, record(0), record(1), record(2, **unreported), record(3, pool_id="a"))
    in_a, in_default = history.tokens(Filter())
    assert (in_a.pool_id, in_a.requests, in_a.reported, in_a.input_tokens) == ("a", 1, 1, 7)
    assert (in_default.pool_id, in_default.model, in_default.requests, in_default.reported) == (
        "default",
        "qwen3",
        3,
        2,
    )
    assert (in_default.input_tokens, in_default.output_tokens) == (14, 10)
    assert (in_default.cached_input_tokens, in_default.reasoning_output_tokens) == (6, 4)


def test_shares_are_held_against_weights_while_work_waits(history: History) -> None:
    start = NOW_MS - 60_000

    def launched(number: int, pool_id: str, at: int) -> object:
        """One that was submitted before the first step, and launched `at` ms into it."""
        return record(
            number, pool_id=pool_id, cost_units=1, submitted_ms=start - 5_000, claimed_ms=start + at,
            ended_ms=start + at + 30_000,
        )  # fmt: skip

    records = [launched(number, "a", 1_000 + number) for number in range(8)]
    records += [launched(100 + number, "b", 1_000 + number) for number in range(2)]
    records += [launched(200, "a", 15_000), launched(201, "b", 15_000)]  # they keep the first step backlogged
    records += [record(300, pool_id="idle", submitted_ms=start + 2_000, claimed_ms=start + 2_000,
                       ended_ms=start + 3_000, cost_units=5)]  # fmt: skip
    write(history.store, history.group, *records)  # type: ignore[arg-type]  # they are records
    wanted = Filter(since_ms=start, until_ms=start + 20_000)
    shares = history.shares(wanted, 10, {"a": 4, "b": 1, "idle": 1})
    first, second = shares.steps
    by_pool = {share.pool_id: share for share in first.pools}
    assert {name: share.cost_units for name, share in by_pool.items()} == {"a": 8, "b": 2, "idle": 5}
    assert (by_pool["a"].share, by_pool["a"].fair_share) == (8 / 15, 0.8)
    assert (by_pool["idle"].backlogged, by_pool["idle"].fair_share) == (False, None)
    assert first.jain == pytest.approx(1.0)
    assert second.jain is None  # nothing waited at its end
    unfair = history.shares(wanted, 10, {"a": 1, "b": 1, "idle": 1}).steps[0].jain
    assert unfair == pytest.approx((8 + 2) ** 2 / (2 * (64 + 4)))
    assert history.shares(wanted, 10, {}).steps[0].jain is None


def test_gateways_tell_when_their_last_row_was_written(history: History) -> None:
    write(history.store, history.group, record(0), record(1, gateway_id="g-2"), record(2), queued_only(3))
    rows = {row.gateway_id: row for row in history.gateways()}
    assert {name: row.requests for name, row in rows.items()} == {None: 1, "g-1": 2, "g-2": 1}
    assert rows["g-1"].last_ended_ms == NOW_MS - 59_998
    assert rows["g-1"].recorded_ms >= NOW_MS - 60_000

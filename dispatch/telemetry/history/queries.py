"""Questions about what has ended: lists, one request, counts, percentiles. Every method is one or two queries.

They block as long as the store's bound, and raise `HistoryUnavailable` when it does not answer, `InvalidRequest` when
what is asked for makes no sense. A repeated row is never counted twice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dispatch.telemetry.history.conditions import FAILED, before, condition, milliseconds, only_known
from dispatch.telemetry.history.measures import DELIVERY, by_pool, counted, endings, percentiles
from dispatch.telemetry.history.records import (
    AttemptEntry,
    Cursor,
    ErrorCount,
    Filter,
    GatewayRows,
    Percentiles,
    PoolStats,
    RequestEntry,
    RequestList,
    RequestStory,
    Series,
    SeriesPoint,
    Shares,
    Stats,
    TokenCount,
    check_steps,
)
from dispatch.telemetry.history.schema import ATTEMPTS, DELIVERIES, REQUESTS
from dispatch.telemetry.history.shares import read_shares
from dispatch.telemetry.history.store import HistoryStore, Row

ROWS_MAX = 1_000
_POINTS_MAX = 20_000
_KINDS_MAX = 500

_ENTRY = ", ".join(
    (
        "request_id, times, pool_id, ending, outcome, operation, model, stream, caller_request_id, producer_id",
        "gateway_id, dispatcher_id, endpoint_id, backend_address, attempt, cost_units, message_count, body_bytes",
        "chunk_count, queue_wait_ms, execution_ms, total_latency_ms, skip_reason, status, error_type, error_message",
        "input_tokens, output_tokens, trace_id, span_id, parent_span_id",
        f"{milliseconds('submitted_at')} AS submitted_ms, {milliseconds('ended_at')} AS ended_ms",
        f"{milliseconds('recorded_at')} AS recorded_ms",
    )
)
_ATTEMPT = ", ".join(
    (
        "attempt, operation, model, gateway_id, endpoint_id, backend_address, queue_wait_ms, execution_ms",
        "first_chunk_ms, status, verdict, error_type, error_message, response_id, response_model, finish_reasons",
        "input_tokens, output_tokens, cached_input_tokens, reasoning_output_tokens, span_id",
        f"{milliseconds('started_at')} AS started_ms, {milliseconds('ended_at')} AS ended_ms",
    )
)
_NEWEST_FIRST = (
    "ORDER BY fabric_group_id DESC, ended_at DESC, request_id DESC"  # as the table is sorted: read backwards
)


class History:
    """What has ended in one fabric group."""

    def __init__(self, store: HistoryStore, group: str) -> None:
        self.store = store
        self.group = group

    def requests(self, wanted: Filter, *, limit: int = 100, cursor: str = "") -> RequestList:
        """List requests, the newest first."""
        limit = max(1, min(limit, ROWS_MAX))
        where, values = condition(self.group, wanted)
        at = Cursor.read(cursor) if cursor else None
        rows: dict[Cursor, Row] = {}
        while len(rows) <= limit:
            asked = limit + 1 - len(rows) + 1  # repeats are few, and stand side by side
            more, place = before(at) if at else ("1", {})
            sql = f"SELECT {_ENTRY} FROM {REQUESTS} WHERE {where} AND {more} {_NEWEST_FIRST} LIMIT {asked}"
            found = self.store.query(sql, values | place)
            rows |= {Cursor(row["ended_ms"], row["request_id"]): row for row in found}
            if len(found) < asked:
                break
            at = list(rows)[-1]
        entries = self._with_delivery(list(rows.values())[:limit])
        truncated = len(rows) > limit
        return RequestList(rows=entries, cursor=str(list(rows)[limit - 1]) if truncated else "", truncated=truncated)

    def request(self, request_id: str, pools: tuple[str, ...] | None = None) -> RequestStory | None:
        """Tell of one request all that is known; None = there is no row. An id that was used again: the last one."""
        found = self.requests(Filter(request_id=request_id, pools=pools), limit=1).rows
        if not found:
            return None
        entry = found[0]
        rows = self.store.query(
            f"SELECT {_ATTEMPT} FROM {ATTEMPTS} FINAL WHERE fabric_group_id = {{group:String}}"
            " AND request_id = {request_id:String} AND trace_id = {trace_id:String} ORDER BY attempt, started_at",
            {"group": self.group, "request_id": entry.request_id, "trace_id": entry.trace_id},
        )
        delivered = None if entry.delivery_ms is None else entry.ended_ms + entry.delivery_ms
        attempts = [AttemptEntry(**_told(row) | {"finish_reasons": _words(row["finish_reasons"])}) for row in rows]
        return RequestStory(request=entry, attempts=attempts, delivered_ms=delivered)

    def stats(self, wanted: Filter) -> Stats:
        """Count and measure what ended, over all pools and for each."""
        where, values = condition(self.group, wanted)
        rows = self.store.query(by_pool(f"{REQUESTS} FINAL WHERE {where}"), values)
        delivery = self._delivery(wanted)
        seconds = _seconds(wanted.since_ms, wanted.until_ms)
        pools = [_pool_stats(row, row["pool_id"], seconds, delivery) for row in rows if not row["whole"]]
        total = [_pool_stats(row, None, seconds, delivery) for row in rows if row["whole"]]
        return Stats(since_ms=wanted.since_ms, until_ms=wanted.until_ms, pools=pools, total=total[0])

    def series(self, wanted: Filter, step_s: int) -> Series:
        """Count and measure what ended, step by step and pool by pool. The filter's times are needed."""
        since_ms, until_ms = _times(wanted, step_s)
        where, values = condition(self.group, wanted)
        start = f"intDiv({milliseconds('ended_at')} - {{since_ms:Int64}}, {{step_ms:Int64}})"
        rows = self.store.query(
            f"SELECT {start} AS step, pool_id, {counted()} FROM {REQUESTS} FINAL WHERE {where}"
            f" GROUP BY step, pool_id ORDER BY step, pool_id LIMIT {_POINTS_MAX + 1}",
            values | {"step_ms": step_s * 1000},
        )
        points = [
            SeriesPoint(
                start_ms=since_ms + row["step"] * step_s * 1000, pool_id=row["pool_id"], requests=row["requests"],
                per_second=row["requests"] / step_s, endings=endings(row), cost_units=row["cost"],
                **percentiles(row),
            )
            for row in rows[:_POINTS_MAX]
        ]  # fmt: skip
        truncated = len(rows) > _POINTS_MAX
        return Series(since_ms=since_ms, until_ms=until_ms, step_s=step_s, points=points, truncated=truncated)

    def errors(self, wanted: Filter) -> list[ErrorCount]:
        """Count failures by ending and error type, the most frequent first."""
        where, values = condition(self.group, wanted)
        rows = self.store.query(
            "SELECT ending, error_type, sum(times) AS requests, groupUniqArray(100)(pool_id) AS pool_ids,"
            " groupUniqArray(100)(endpoint_id) AS endpoint_ids, groupUniqArray(100)(status) AS statuses,"
            f" {milliseconds('min(ended_at)')} AS first_ms, {milliseconds('max(ended_at)')} AS last_ms,"
            " argMax(request_id, ended_at) AS example_id, argMax(error_message, ended_at) AS example_message"
            f" FROM {REQUESTS} FINAL WHERE {where} AND {FAILED}"
            f" GROUP BY ending, error_type ORDER BY requests DESC, ending, error_type LIMIT {_KINDS_MAX}",
            values,
        )
        for row in rows:
            for name in ("pool_ids", "endpoint_ids", "statuses"):
                row[name] = sorted(value for value in row[name] if value not in {"", None})
        return [ErrorCount(**_told(row)) for row in rows]

    def tokens(self, wanted: Filter) -> list[TokenCount]:
        """Sum tokens by pool and model, as far as endpoints report them."""
        where, values = condition(self.group, wanted)
        rows = self.store.query(
            "SELECT pool_id, model, sum(times) AS requests,"
            " countIf(input_tokens IS NOT NULL OR output_tokens IS NOT NULL) AS reported,"
            " sum(ifNull(input_tokens, 0)) AS used_input, sum(ifNull(output_tokens, 0)) AS used_output"
            f" FROM {REQUESTS} FINAL WHERE {where} GROUP BY pool_id, model"
            f" ORDER BY pool_id, requests DESC, model LIMIT {_POINTS_MAX}",
            values,
        )
        finer = self._finer_tokens(wanted)
        return [
            TokenCount(
                pool_id=row["pool_id"], model=row["model"] or None, requests=row["requests"], reported=row["reported"],
                input_tokens=row["used_input"], output_tokens=row["used_output"],
                **finer.get((row["pool_id"], row["model"]), _NO_FINER_TOKENS),
            )
            for row in rows
        ]  # fmt: skip

    def shares(self, wanted: Filter, step_s: int, weights: dict[str, int]) -> Shares:
        """Hold what each pool was served against its weight. The filter's times are needed; of the rest, `pools`."""
        since_ms, until_ms = _times(wanted, step_s)
        return read_shares(self.store, self.group, Filter(since_ms=since_ms, until_ms=until_ms), step_s, weights)

    def gateways(self) -> list[GatewayRows]:
        """Say for each gateway when the last row of its requests was written."""
        rows = self.store.query(
            f"SELECT gateway_id, sum(times) AS requests, {milliseconds('max(ended_at)')} AS last_ended_ms,"
            f" {milliseconds('max(recorded_at)')} AS recorded_ms FROM {REQUESTS} FINAL"
            f" WHERE fabric_group_id = {{group:String}} GROUP BY gateway_id ORDER BY gateway_id LIMIT {_KINDS_MAX}",
            {"group": self.group},
        )
        return [GatewayRows(**_told(row)) for row in rows]

    def _with_delivery(self, rows: list[Row]) -> list[RequestEntry]:
        times: dict[tuple[str, str], int] = {}
        if rows:
            found = self.store.query(
                f"SELECT request_id, trace_id, delivery_ms FROM {DELIVERIES} WHERE fabric_group_id = {{group:String}}"
                " AND request_id IN {ids:Array(String)}",
                {"group": self.group, "ids": [row["request_id"] for row in rows]},
            )
            times = {(row["request_id"], row["trace_id"]): row["delivery_ms"] for row in found}
        return [RequestEntry(**_told(row), delivery_ms=times.get((row["request_id"], row["trace_id"]))) for row in rows]

    def _finer_tokens(self, wanted: Filter) -> dict[tuple[str, str], dict[str, int]]:
        """Sum, by pool and model, the kinds of tokens that attempts alone tell of."""
        where, values = condition(self.group, only_known(wanted, _OF_ATTEMPTS))
        rows = self.store.query(
            "SELECT pool_id, model, sum(ifNull(cached_input_tokens, 0)) AS cached,"
            f" sum(ifNull(reasoning_output_tokens, 0)) AS reasoning FROM {ATTEMPTS} FINAL"
            f" WHERE {where} GROUP BY pool_id, model LIMIT {_POINTS_MAX}",
            values,
        )
        return {
            (row["pool_id"], row["model"]): {
                "cached_input_tokens": row["cached"],
                "reasoning_output_tokens": row["reasoning"],
            }
            for row in rows
        }

    def _delivery(self, wanted: Filter) -> dict[str | None, Percentiles | None]:
        """Measure how long replies waited for their producers; None = of all pools. Other filters say nothing of it."""
        where, values = condition(self.group, only_known(wanted, _OF_DELIVERIES), time="delivered_at")
        rows = self.store.query(by_pool(f"{DELIVERIES} FINAL WHERE {where}", DELIVERY, {}), values)
        return {None if row["whole"] else row["pool_id"]: percentiles(row, DELIVERY)["delivery"] for row in rows}


_OF_ATTEMPTS = ("pool_id", "model", "gateway_id", "endpoint_id")
_OF_DELIVERIES = ("pool_id", "producer_id")
_NO_FINER_TOKENS = {"cached_input_tokens": 0, "reasoning_output_tokens": 0}


def _times(wanted: Filter, step_s: int) -> tuple[int, int]:
    since_ms, until_ms = wanted.since_ms or 0, wanted.until_ms or 0
    check_steps(since_ms, until_ms, step_s)
    return since_ms, until_ms


def _seconds(since_ms: int | None, until_ms: int | None) -> float | None:
    return None if since_ms is None or until_ms is None or until_ms <= since_ms else (until_ms - since_ms) / 1000


_ALWAYS = {"request_id", "pool_id", "ending", "trace_id", "span_id", "example_id"}


def _told(row: Row) -> dict[str, Any]:
    """An empty word in a column that may be empty means that there is none."""
    return {name: None if value == "" and name not in _ALWAYS else value for name, value in row.items()}


def _words(text: str) -> list[str]:
    """A list as the collector writes it."""
    try:
        return msgspec.json.decode(text, type=list[str]) if text else []
    except msgspec.MsgspecError:
        return [text]


def _pool_stats(
    row: Row, pool_id: str | None, seconds: float | None, delivery: dict[str | None, Percentiles | None]
) -> PoolStats:
    return PoolStats(
        pool_id=pool_id, requests=row["requests"], per_second=None if seconds is None else row["requests"] / seconds,
        endings=endings(row), cost_units=row["cost"], delivery=delivery.get(pool_id),
        **percentiles(row),
    )  # fmt: skip

"""The tables of the history, as statements that may be repeated.

`otel_traces` (and `otel_traces_trace_id_ts`) are those of the OpenTelemetry collector's ClickHouse exporter, column by
column, so that spans may come straight from a gateway or through a collector. Views on it fill typed tables, which all
questions are asked of: one row for each request, for each attempt at an endpoint, and for each reply that was taken.

A span may be written more than once (delivery is at least once), and its repeat has the same ids and times. The typed
tables are sorted by group, time and row id (request, attempt), and rows that agree in these are one: on disk after a
merge, in answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dispatch.telemetry import names

TRACES: Final = "otel_traces"
REQUESTS: Final = "dispatch_requests"
ATTEMPTS: Final = "dispatch_attempts"
DELIVERIES: Final = "dispatch_deliveries"
OWN_COMMENT: Final = "made by dispatch history init"
"""On tables of ours, whose TTL may be changed: a collector's table is its own."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its name, the column that its rows age by, and its statement, without TTL."""

    name: str
    time: str
    statement: str

    def create(self, ttl_days: int) -> str:
        """Return the statement that makes the table if it is not there."""
        return self.statement.format(ttl=self.ttl(ttl_days), comment=OWN_COMMENT)

    def alter_ttl(self, ttl_days: int) -> str:
        """Return the statement that changes how long rows are kept."""
        return f"ALTER TABLE {self.name} MODIFY {self.ttl(ttl_days)}"

    def ttl(self, ttl_days: int) -> str:
        """Return the clause that says how long rows are kept."""
        return f"TTL toDateTime({self.time}) + toIntervalDay({ttl_days})"


def statements(ttl_days: int) -> Iterator[str]:
    """Return everything that makes the history of a server, in order. Repeatable: what is there is left as it is."""
    for table in TABLES:
        yield table.create(ttl_days)
    yield from VIEWS


_TRACES = """CREATE TABLE IF NOT EXISTS otel_traces (
    Timestamp DateTime64(9) CODEC(Delta, ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    ParentSpanId String CODEC(ZSTD(1)),
    TraceState String CODEC(ZSTD(1)),
    SpanName LowCardinality(String) CODEC(ZSTD(1)),
    SpanKind LowCardinality(String) CODEC(ZSTD(1)),
    ServiceName LowCardinality(String) CODEC(ZSTD(1)),
    ResourceAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
    ScopeName String CODEC(ZSTD(1)),
    ScopeVersion String CODEC(ZSTD(1)),
    SpanAttributes Map(LowCardinality(String), String) CODEC(ZSTD(1)),
    Duration UInt64 CODEC(ZSTD(1)),
    StatusCode LowCardinality(String) CODEC(ZSTD(1)),
    StatusMessage String CODEC(ZSTD(1)),
    Events Nested (
        Timestamp DateTime64(9),
        Name LowCardinality(String),
        Attributes Map(LowCardinality(String), String)
    ) CODEC(ZSTD(1)),
    Links Nested (
        TraceId String,
        SpanId String,
        TraceState String,
        Attributes Map(LowCardinality(String), String)
    ) CODEC(ZSTD(1)),
    INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX idx_res_attr_key mapKeys(ResourceAttributes) TYPE bloom_filter(0.01) GRANULARITY 1,
    INDEX idx_res_attr_value mapValues(ResourceAttributes) TYPE bloom_filter(0.01) GRANULARITY 1,
    INDEX idx_span_attr_key mapKeys(SpanAttributes) TYPE bloom_filter(0.01) GRANULARITY 1,
    INDEX idx_span_attr_value mapValues(SpanAttributes) TYPE bloom_filter(0.01) GRANULARITY 1,
    INDEX idx_duration Duration TYPE minmax GRANULARITY 1
) ENGINE = MergeTree
PARTITION BY toDate(Timestamp)
ORDER BY (ServiceName, SpanName, toDateTime(Timestamp))
{ttl}
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1
COMMENT '{comment}'"""

_TRACE_TIMES = """CREATE TABLE IF NOT EXISTS otel_traces_trace_id_ts (
    TraceId String CODEC(ZSTD(1)),
    Start DateTime CODEC(Delta, ZSTD(1)),
    End DateTime CODEC(Delta, ZSTD(1)),
    INDEX idx_trace_id TraceId TYPE bloom_filter(0.01) GRANULARITY 1
) ENGINE = MergeTree
PARTITION BY toDate(Start)
ORDER BY (TraceId, Start)
{ttl}
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1
COMMENT '{comment}'"""

_REQUESTS = """CREATE TABLE IF NOT EXISTS dispatch_requests (
    fabric_group_id LowCardinality(String),
    ended_at DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    times UInt32 CODEC(ZSTD(1)),
    submitted_at DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    ending LowCardinality(String),
    outcome LowCardinality(String),
    pool_id LowCardinality(String),
    operation LowCardinality(String),
    model LowCardinality(String),
    stream Bool,
    caller_request_id String CODEC(ZSTD(1)),
    producer_id String CODEC(ZSTD(1)),
    gateway_id LowCardinality(String),
    dispatcher_id LowCardinality(String),
    endpoint_id LowCardinality(String),
    backend_address LowCardinality(String),
    attempt UInt16,
    cost_units UInt32 CODEC(ZSTD(1)),
    message_count Nullable(UInt32) CODEC(ZSTD(1)),
    body_bytes Nullable(UInt64) CODEC(ZSTD(1)),
    chunk_count Nullable(UInt32) CODEC(ZSTD(1)),
    queue_wait_ms Nullable(UInt64) CODEC(ZSTD(1)),
    execution_ms Nullable(UInt64) CODEC(ZSTD(1)),
    total_latency_ms Nullable(UInt64) CODEC(ZSTD(1)),
    skip_reason LowCardinality(String),
    status Nullable(UInt16),
    error_type LowCardinality(String),
    error_message String CODEC(ZSTD(1)),
    input_tokens Nullable(UInt64) CODEC(ZSTD(1)),
    output_tokens Nullable(UInt64) CODEC(ZSTD(1)),
    trace_id String CODEC(ZSTD(1)),
    span_id String CODEC(ZSTD(1)),
    parent_span_id String CODEC(ZSTD(1)),
    recorded_at DateTime64(3, 'UTC') DEFAULT now64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    INDEX of_request request_id TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX of_caller caller_request_id TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX of_producer producer_id TYPE bloom_filter(0.01) GRANULARITY 1
) ENGINE = ReplacingMergeTree
PARTITION BY toDate(ended_at)
ORDER BY (fabric_group_id, ended_at, request_id)
{ttl}
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1
COMMENT '{comment}'"""

_ATTEMPTS = """CREATE TABLE IF NOT EXISTS dispatch_attempts (
    fabric_group_id LowCardinality(String),
    ended_at DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    attempt UInt16,
    started_at DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    pool_id LowCardinality(String),
    operation LowCardinality(String),
    model LowCardinality(String),
    gateway_id LowCardinality(String),
    endpoint_id LowCardinality(String),
    backend_address LowCardinality(String),
    queue_wait_ms Nullable(UInt64) CODEC(ZSTD(1)),
    execution_ms UInt64 CODEC(ZSTD(1)),
    first_chunk_ms Nullable(UInt64) CODEC(ZSTD(1)),
    status Nullable(UInt16),
    verdict LowCardinality(String),
    error_type LowCardinality(String),
    error_message String CODEC(ZSTD(1)),
    response_id String CODEC(ZSTD(1)),
    response_model LowCardinality(String),
    finish_reasons LowCardinality(String),
    input_tokens Nullable(UInt64) CODEC(ZSTD(1)),
    output_tokens Nullable(UInt64) CODEC(ZSTD(1)),
    cached_input_tokens Nullable(UInt64) CODEC(ZSTD(1)),
    reasoning_output_tokens Nullable(UInt64) CODEC(ZSTD(1)),
    trace_id String CODEC(ZSTD(1)),
    span_id String CODEC(ZSTD(1)),
    INDEX of_request request_id TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree
PARTITION BY toDate(ended_at)
ORDER BY (fabric_group_id, ended_at, request_id, attempt)
{ttl}
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1
COMMENT '{comment}'"""

_DELIVERIES = """CREATE TABLE IF NOT EXISTS dispatch_deliveries (
    fabric_group_id LowCardinality(String),
    delivered_at DateTime64(3, 'UTC') CODEC(Delta, ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    pool_id LowCardinality(String),
    producer_id String CODEC(ZSTD(1)),
    delivery_ms UInt64 CODEC(ZSTD(1)),
    trace_id String CODEC(ZSTD(1)),
    INDEX of_request request_id TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree
PARTITION BY toDate(delivered_at)
ORDER BY (fabric_group_id, delivered_at, request_id)
{ttl}
SETTINGS index_granularity = 8192, ttl_only_drop_parts = 1
COMMENT '{comment}'"""

TABLES: Final = (
    Table(TRACES, "Timestamp", _TRACES),
    Table("otel_traces_trace_id_ts", "Start", _TRACE_TIMES),
    Table(REQUESTS, "ended_at", _REQUESTS),
    Table(ATTEMPTS, "ended_at", _ATTEMPTS),
    Table(DELIVERIES, "delivered_at", _DELIVERIES),
)

_TRACE_TIMES_VIEW = """CREATE MATERIALIZED VIEW IF NOT EXISTS otel_traces_trace_id_ts_mv TO otel_traces_trace_id_ts
AS SELECT TraceId, min(Timestamp) AS Start, max(Timestamp) AS End
FROM otel_traces
WHERE TraceId != ''
GROUP BY TraceId"""


def _word(attribute: str) -> str:
    return f"SpanAttributes['{attribute}']"


def _whole(attribute: str, kind: str = "UInt64", times: int = 1) -> str:
    """The attribute as a whole number; NULL where it is missing or none. Some writers say 12.0 for 12."""
    factor = f" * {times}" if times != 1 else ""
    return f"accurateCastOrNull(round(toFloat64OrNull({_word(attribute)}){factor}), '{kind}')"


_START = "toDateTime64(Timestamp, 3, 'UTC')"
_END = "fromUnixTimestamp64Milli(intDiv(toUnixTimestamp64Nano(Timestamp) + toInt64(Duration), 1000000), 'UTC')"

# What columns of several tables are made of.
_IDENTITY = {
    "fabric_group_id": _word(names.FABRIC_GROUP_ID),
    "request_id": _word(names.REQUEST_ID),
    "pool_id": _word(names.POOL_ID),
    "trace_id": "TraceId",
}
_RUN = {
    "ended_at": _END,
    "attempt": f"ifNull({_whole(names.ATTEMPT, 'UInt16')}, 0)",
    "operation": _word(names.GEN_AI_OPERATION_NAME),
    "model": _word(names.GEN_AI_REQUEST_MODEL),
    "gateway_id": _word(names.GATEWAY_ID),
    "endpoint_id": _word(names.ENDPOINT_ID),
    "backend_address": _word(names.BACKEND_ADDRESS),
    "status": _whole(names.STATUS, "UInt16"),
    "error_type": _word(names.ERROR_KIND),
    "error_message": _word(names.ERROR_MESSAGE),
    "input_tokens": _whole(names.GEN_AI_USAGE_INPUT_TOKENS),
    "output_tokens": _whole(names.GEN_AI_USAGE_OUTPUT_TOKENS),
    "span_id": "SpanId",
}

_ENTERED = f"{_word(names.ENDING)} != 'rejected'"


def _of_entered(expression: str) -> str:
    """What was refused has waited for nothing: its 0 ms would say that requests wait less than they do."""
    return f"if({_ENTERED}, {expression}, NULL)"


def _view(table: str, kind: str, columns: dict[str, str], more: str) -> str:
    # Older collectors write kinds as SPAN_KIND_CLIENT.
    kinds = f"SpanKind IN ('{kind.capitalize()}', 'SPAN_KIND_{kind.upper()}')"
    chosen = ",\n    ".join(f"{expression} AS {name}" for name, expression in columns.items())
    return (
        f"CREATE MATERIALIZED VIEW IF NOT EXISTS {table}_mv TO {table}\n"
        f"AS SELECT\n    {chosen}\nFROM {TRACES}\nWHERE ScopeName = '{names.SCOPE}' AND {kinds} AND {more}"
    )


VIEWS: Final = (
    _TRACE_TIMES_VIEW,
    _view(
        REQUESTS,
        "consumer",
        {
            **_IDENTITY,
            **_RUN,
            # A span that stands for many refusals is about no request, and so is its own row id.
            "request_id": f"if({_word(names.REQUEST_ID)} != '', {_word(names.REQUEST_ID)}, concat('refused-', SpanId))",
            "times": f"greatest(ifNull({_whole(names.LEFT_OUT, 'UInt32')}, 1), 1)",
            "submitted_at": _START,
            "ending": _word(names.ENDING),
            "outcome": _word(names.OUTCOME),
            "stream": f"{_word(names.GEN_AI_REQUEST_STREAM)} = 'true'",
            "caller_request_id": _word(names.CALLER_REQUEST_ID),
            "producer_id": _word(names.PRODUCER_ID),
            "dispatcher_id": _word(names.DISPATCHER_ID),
            "cost_units": f"ifNull({_whole(names.COST_UNITS, 'UInt32')}, 0)",
            "message_count": _whole(names.MESSAGE_COUNT, "UInt32"),
            "body_bytes": _whole(names.MESSAGING_BODY_SIZE),
            "chunk_count": _whole(names.CHUNK_COUNT, "UInt32"),
            "queue_wait_ms": _of_entered(_whole(names.QUEUE_WAIT_MS)),
            "execution_ms": _whole(names.EXECUTION_MS),
            "total_latency_ms": _of_entered(_whole(names.TOTAL_LATENCY_MS)),
            "skip_reason": _word(names.SKIP_REASON),
            "parent_span_id": "ParentSpanId",
        },
        f"{_word(names.ENDING)} != ''",
    ),
    _view(
        ATTEMPTS,
        "client",
        {
            **_IDENTITY,
            **_RUN,
            "started_at": _START,
            "queue_wait_ms": _whole(names.QUEUE_WAIT_MS),
            "execution_ms": f"ifNull({_whole(names.EXECUTION_MS)}, intDiv(Duration, 1000000))",
            "first_chunk_ms": _whole(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, times=1000),
            "verdict": _word(names.VERDICT),
            "response_id": _word(names.GEN_AI_RESPONSE_ID),
            "response_model": _word(names.GEN_AI_RESPONSE_MODEL),
            "finish_reasons": _word(names.GEN_AI_RESPONSE_FINISH_REASONS),
            "cached_input_tokens": _whole(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS),
            "reasoning_output_tokens": _whole(names.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS),
        },
        f"{_word(names.REQUEST_ID)} != ''",
    ),
    _view(
        DELIVERIES,
        "internal",
        {
            **_IDENTITY,
            "delivered_at": _END,
            "producer_id": _word(names.PRODUCER_ID),
            "delivery_ms": f"ifNull({_whole(names.DELIVERY_MS)}, intDiv(Duration, 1000000))",
        },
        f"startsWith(SpanName, '{names.DELIVER_SPAN.partition('{')[0]}')",
    ),
)

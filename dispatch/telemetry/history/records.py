"""What the history answers with. Times are milliseconds since 1970 of Valkey's clock; null = not known, or none.

Rows carry names, sizes and times: no content, no secrets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dispatch.errors import InvalidRequest

WANTED: Final = ("succeeded", "cancelled")
"""Endings that are no failure: it went well, or its caller wanted it no more."""

STEPS_MAX: Final = 1_000
_CURSOR_PARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which requests are meant: those of all facts that are given. Times are when they ended, `until_ms` excluded.

    `pools`: those that may be seen at all, None = all. `wait_over_ms` and the like: slower than that.
    """

    since_ms: int | None = None
    until_ms: int | None = None
    pools: tuple[str, ...] | None = None
    pool_id: str = ""
    model: str = ""
    ending: str = ""
    gateway_id: str = ""
    endpoint_id: str = ""
    producer_id: str = ""
    request_id: str = ""
    error_type: str = ""
    failed: bool = False
    wait_over_ms: int | None = None
    run_over_ms: int | None = None
    total_over_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a list goes on: after (that is: before in time) this row."""

    ended_ms: int
    request_id: str

    def __str__(self) -> str:
        return f"{self.ended_ms}:{self.request_id}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Read what `str` wrote.

        Raises:
            InvalidRequest: it is none.
        """
        parts = text.split(":", 1)
        if len(parts) != _CURSOR_PARTS or not (parts[0].isascii() and parts[0].isdecimal()):
            message = f"cursor {text[:60]!r} is none of this list: take it from the answer before"
            raise InvalidRequest(message, param="cursor", code="invalid_value")
        return cls(int(parts[0]), parts[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEntry:
    """One request that has ended.

    `times`: how many it stands for, which is 1 but where refusals were many. Waiting times are null of what was
    refused, `execution_ms` of what never ran, `delivery_ms` while no producer has taken the reply.
    """

    request_id: str
    times: int
    pool_id: str
    ending: str
    outcome: str | None
    submitted_ms: int
    ended_ms: int
    recorded_ms: int
    operation: str | None
    model: str | None
    stream: bool
    caller_request_id: str | None
    producer_id: str | None
    gateway_id: str | None
    dispatcher_id: str | None
    endpoint_id: str | None
    backend_address: str | None
    attempt: int
    cost_units: int
    message_count: int | None
    body_bytes: int | None
    chunk_count: int | None
    queue_wait_ms: int | None
    execution_ms: int | None
    total_latency_ms: int | None
    delivery_ms: int | None
    skip_reason: str | None
    status: int | None
    error_type: str | None
    error_message: str | None
    input_tokens: int | None
    output_tokens: int | None
    trace_id: str
    span_id: str
    parent_span_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """A part of the list, the newest first. `cursor` says where to go on; "" = this is the end."""

    rows: list[RequestEntry]
    cursor: str
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEntry:
    """One attempt at an endpoint. `verdict`: what the endpoint's breaker made of it."""

    attempt: int
    started_ms: int
    ended_ms: int
    operation: str | None
    model: str | None
    gateway_id: str | None
    endpoint_id: str | None
    backend_address: str | None
    queue_wait_ms: int | None
    execution_ms: int
    first_chunk_ms: int | None
    status: int | None
    verdict: str | None
    error_type: str | None
    error_message: str | None
    response_id: str | None
    response_model: str | None
    finish_reasons: list[str]
    input_tokens: int | None
    output_tokens: int | None
    cached_input_tokens: int | None
    reasoning_output_tokens: int | None
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStory:
    """One request with all its attempts, the first one first. `delivered_ms`: when its producer took the reply."""

    request: RequestEntry
    attempts: list[AttemptEntry]
    delivered_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds that half, 95 % and 99 % of the requests stayed within, to 0.5 %. `count`: of how many."""

    count: int
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """What ended in a pool. `pool_id` null = all that were asked for. `per_second`: ended, over the time asked for."""

    pool_id: str | None
    requests: int
    per_second: float | None
    endings: dict[str, int]
    cost_units: int
    queue_wait: Percentiles | None
    execution: Percentiles | None
    total_latency: Percentiles | None
    delivery: Percentiles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts, throughput and percentiles over a time, for all pools and for each; null times = open."""

    since_ms: int | None
    until_ms: int | None
    total: PoolStats
    pools: list[PoolStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    """What ended in one pool within one step."""

    start_ms: int
    pool_id: str
    requests: int
    per_second: float
    endings: dict[str, int]
    cost_units: int
    queue_wait: Percentiles | None
    execution: Percentiles | None
    total_latency: Percentiles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A time in steps. Steps and pools in which nothing ended are left out."""

    since_ms: int
    until_ms: int
    step_s: int
    points: list[SeriesPoint]
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """One kind of failure: how often, where, when last, and what one of them said."""

    ending: str
    error_type: str | None
    requests: int
    pool_ids: list[str]
    endpoint_ids: list[str]
    statuses: list[int]
    first_ms: int
    last_ms: int
    example_id: str
    example_message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens of one model in one pool. `reported`: of how many of the requests the endpoint said how many they took."""

    pool_id: str
    model: str | None
    requests: int
    reported: int
    input_tokens: int
    output_tokens: int
    cached_input_tokens: int
    reasoning_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRows:
    """What is written of a gateway's requests; `recorded_ms`: when its last row was."""

    gateway_id: str | None
    requests: int
    last_ended_ms: int
    recorded_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Records of the endings stream held against rows.

    `records` by ending; `missing`: requests without a row; `fresh`: how many have none yet and ended seconds ago;
    `unnamed`: records that stand for refusals without an id.
    """

    records: dict[str, int]
    written: int
    missing: list[str]
    fresh: int
    unnamed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Counters of the group, records of a part of its endings stream, and rows, side by side.

    `counters` and `rows`, by ending: all that the pools have counted, and all rows that are kept; null in the answers
    of further parts. They differ where rows have become too old, pools were removed, or the group is older than its
    history. `checked` compares record by record: `missing` is what should be there. `cursor`: "" = this is the end.
    """

    server_ms: int
    counters: dict[str, int] | None
    rows: dict[str, int] | None
    checked: Checked
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShare:
    """What a pool was served, in cost units of requests by when they began to run.

    `share` is of all that was served. `fair_share` is by weight among the pools that had work waiting all along
    (`backlogged`); null for others, whose share says nothing about fairness.
    """

    pool_id: str
    weight: int | None
    cost_units: int
    launched: int
    share: float
    backlogged: bool
    fair_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareStep:
    """One step. `jain` is Jain's index of service over weight among the backlogged pools: 1 is fair, 1/n is worst.

    Null where fewer than two pools were backlogged, or a weight is not known.
    """

    start_ms: int
    jain: float | None
    pools: list[PoolShare]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Service against weight over a time and in its steps. Requests that have not ended yet are not counted."""

    since_ms: int
    until_ms: int
    step_s: int
    total: ShareStep
    steps: list[ShareStep]


_BACKWARDS = "the time ends before it begins; since has to be earlier than until"


def check_span(since_ms: int | None, until_ms: int | None) -> None:
    """Make sure that a time does not end before it begins; None is open.

    Raises:
        InvalidRequest: it does.
    """
    if since_ms is not None and until_ms is not None and since_ms > until_ms:
        raise InvalidRequest(_BACKWARDS, param="until_ms", code="invalid_value")


def check_steps(since_ms: int, until_ms: int, step_s: int) -> None:
    """Make sure that a time falls into a bounded number of steps.

    Raises:
        InvalidRequest: it does not, or it is none.
    """
    if since_ms >= until_ms:
        raise InvalidRequest(_BACKWARDS, param="until_ms", code="invalid_value")
    if step_s < 1 or (until_ms - since_ms) / (step_s * 1000) > STEPS_MAX:
        least = max(1, -(-(until_ms - since_ms) // (STEPS_MAX * 1000)))
        message = f"step_s {step_s} makes more than {STEPS_MAX} steps of this time: at least {least} is needed"
        raise InvalidRequest(message, param="step_s", code="invalid_value")

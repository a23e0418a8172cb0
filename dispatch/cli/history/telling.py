"""Answers of the history as tables and lines for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import typer

from dispatch.cli.operating import moment, one_line, or_dash
from dispatch.cli.tables import print_table
from dispatch.telemetry.history.records import (
    AttemptEntry,
    ErrorCount,
    GatewayRows,
    Percentiles,
    PoolStats,
    RequestEntry,
    RequestStory,
    Series,
    Shares,
    ShareStep,
    Stats,
    TokenCount,
    Verification,
)

_MISSING_SHOWN = 20
_MINUTE_MS, _SECOND_MS = 60_000, 1_000


@dataclass(slots=True)
class Whole:
    """All parts of a verification as one."""

    counters: dict[str, int] = field(default_factory=dict)
    stream: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    written: int = 0
    fresh: int = 0
    unnamed: int = 0
    missing: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[Verification]) -> Whole:
        """Add the parts up."""
        whole = cls(counters=parts[0].counters or {}, rows=parts[0].rows or {})
        records: Counter[str] = Counter()
        for part in parts:
            records.update(part.checked.records)
            whole.written += part.checked.written
            whole.fresh += part.checked.fresh
            whole.unnamed += part.checked.unnamed
            whole.missing += part.checked.missing
        whole.stream = dict(records)
        return whole


def requests(rows: Sequence[RequestEntry]) -> None:
    """Print a list of requests."""
    print_table(
        ("request", "ended", "ending", "pool", "model", "waited", "ran", "delivery", "tokens", "gateway", "error"),
        [
            (
                row.request_id + (f" (x{row.times})" if row.times > 1 else ""), moment(row.ended_ms), row.ending,
                row.pool_id, one_line(or_dash(row.model)), duration(row.queue_wait_ms), duration(row.execution_ms),
                duration(row.delivery_ms), _tokens(row.input_tokens, row.output_tokens), or_dash(row.gateway_id),
                one_line(or_dash(row.error_type)),
            )
            for row in rows
        ],
    )  # fmt: skip


def story(told: RequestStory) -> None:
    """Print one request, line by line."""
    for name, value in _lines(told):
        typer.echo(f"{name + ':':<18}{one_line(value)}")


def _lines(told: RequestStory) -> Iterator[tuple[str, str]]:
    row = told.request
    yield "request", row.request_id
    yield "ending", row.ending + (f" (the run {row.outcome})" if row.outcome not in {None, row.ending} else "")
    if row.error_type:
        yield "error", f"{row.error_type}: {or_dash(row.error_message)}"
    yield "pool", row.pool_id
    yield "producer", or_dash(row.producer_id)
    if row.caller_request_id:
        yield "caller's id", row.caller_request_id
    yield "model", or_dash(row.model)
    yield "messages", or_dash(row.message_count)
    yield "body", "-" if row.body_bytes is None else f"{row.body_bytes} bytes"
    yield "cost", str(row.cost_units)
    yield "submitted", moment(row.submitted_ms)
    why = f" (held up by {row.skip_reason})" if row.skip_reason else ""
    yield "waited", duration(row.queue_wait_ms) + why
    yield "ran", duration(row.execution_ms)
    yield "ended", f"{moment(row.ended_ms)}, after {duration(row.total_latency_ms)}"
    yield "reply taken", "-" if row.delivery_ms is None else f"{duration(row.delivery_ms)} later"
    if row.chunk_count:
        yield "streamed", f"{row.chunk_count} chunks"
    yield "tokens", _tokens(row.input_tokens, row.output_tokens)
    for one in told.attempts:
        yield f"attempt {one.attempt}", _attempt(one)
    yield "trace", row.trace_id


def _attempt(one: AttemptEntry) -> str:
    parts = [f"{moment(one.started_ms)} on gateway {or_dash(one.gateway_id)}, endpoint {or_dash(one.endpoint_id)}"]
    parts.append(f"ran {duration(one.execution_ms)}")
    if one.first_chunk_ms is not None:
        parts.append(f"first chunk after {duration(one.first_chunk_ms)}")
    if one.status is not None:
        parts.append(f"status {one.status}")
    if one.error_type:
        parts.append(f"{one.error_type}: {or_dash(one.error_message)}")
    if one.finish_reasons:
        parts.append("finished: " + " ".join(one.finish_reasons))
    return "; ".join(parts)


def stats(found: Stats) -> None:
    """Print counts and percentiles."""
    print_table(
        ("pool", "ended", "per s", "not succeeded", "waited p50/95/99", "ran", "in all", "delivery"),
        [
            (
                pool.pool_id or "all", str(pool.requests), _rate(pool.per_second), _failures(pool),
                _spread(pool.queue_wait), _spread(pool.execution), _spread(pool.total_latency), _spread(pool.delivery),
            )
            for pool in (*found.pools, found.total)
        ],
    )  # fmt: skip


def series(found: Series) -> None:
    """Print steps."""
    print_table(
        ("from", "pool", "ended", "per s", "endings", "waited p50/95/99", "ran", "in all"),
        [
            (
                moment(point.start_ms), point.pool_id, str(point.requests), _rate(point.per_second),
                _counts(point.endings), _spread(point.queue_wait), _spread(point.execution),
                _spread(point.total_latency),
            )
            for point in found.points
        ],
    )  # fmt: skip


def errors(found: Sequence[ErrorCount]) -> None:
    """Print failures."""
    print_table(
        ("ending", "error", "count", "pools", "endpoints", "last", "for example", "which said"),
        [
            (
                row.ending, one_line(or_dash(row.error_type)), str(row.requests), " ".join(row.pool_ids),
                or_dash(" ".join(row.endpoint_ids)), moment(row.last_ms), row.example_id,
                one_line(or_dash(row.example_message)),
            )
            for row in found
        ],
    )  # fmt: skip


def tokens(found: Sequence[TokenCount]) -> None:
    """Print sums of tokens."""
    print_table(
        ("pool", "model", "requests", "reported", "input", "cached", "output", "reasoning"),
        [
            (
                row.pool_id, one_line(or_dash(row.model)), str(row.requests), str(row.reported), str(row.input_tokens),
                str(row.cached_input_tokens), str(row.output_tokens), str(row.reasoning_output_tokens),
            )
            for row in found
        ],
    )  # fmt: skip


def shares(found: Shares) -> None:
    """Print shares, over the time and in steps."""
    print_table(
        ("from", "pool", "weight", "launched", "cost", "share", "fair share", "jain"),
        [row for step in found.steps for row in _share_rows(moment(step.start_ms), step)]
        + list(_share_rows("all", found.total)),
    )


def _share_rows(when: str, step: ShareStep) -> Iterator[tuple[str, ...]]:
    for at, pool in enumerate(step.pools):
        fair = "-" if pool.fair_share is None else f"{pool.fair_share:.1%}"
        index = "-" if step.jain is None else f"{step.jain:.3f}"
        yield (
            when if at == 0 else "", pool.pool_id, or_dash(pool.weight), str(pool.launched), str(pool.cost_units),
            f"{pool.share:.1%}", fair, index if at == 0 else "",
        )  # fmt: skip


def gateways(found: Sequence[GatewayRows]) -> None:
    """Print when last rows were written."""
    print_table(
        ("gateway", "requests", "last ended", "last row written"),
        [
            (
                row.gateway_id or "none (never ran)",
                str(row.requests),
                moment(row.last_ended_ms),
                moment(row.recorded_ms),
            )
            for row in found
        ],
    )


def verification(whole: Whole) -> None:
    """Print counters, stream and rows side by side, and what is missing."""
    names = [*dict.fromkeys((*whole.counters, *whole.stream, *whole.rows))]
    print_table(
        ("ending", "counted", "in the stream", "rows"),
        [
            (name, str(whole.counters.get(name, 0)), str(whole.stream.get(name, 0)), str(whole.rows.get(name, 0)))
            for name in names
        ],
    )
    looked = whole.written + whole.fresh + len(whole.missing)
    typer.echo(
        f"{looked} records of the stream were looked up: {whole.written} have a row, {len(whole.missing)} have none",
        nl=False,
    )
    typer.echo(f" ({whole.fresh} more ended seconds ago)" if whole.fresh else "")
    for request_id in whole.missing[:_MISSING_SHOWN]:
        typer.echo(f"missing: {request_id}")
    if len(whole.missing) > _MISSING_SHOWN:
        typer.echo(f"... and {len(whole.missing) - _MISSING_SHOWN} more (--json lists them)")


def duration(ms: float | None) -> str:
    """Return milliseconds as a person says them."""
    if ms is None:
        return "-"
    if ms < _SECOND_MS:
        return f"{ms:.0f} ms"
    return f"{ms / _SECOND_MS:.1f} s" if ms < _MINUTE_MS else f"{ms / _MINUTE_MS:.1f} min"


def _spread(found: Percentiles | None) -> str:
    return "-" if found is None else " / ".join(duration(value) for value in (found.p50, found.p95, found.p99))


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:.3g}"


def _failures(pool: PoolStats) -> str:
    return _counts({name: count for name, count in pool.endings.items() if name != "succeeded"})


def _counts(endings: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in endings.items()) or "-"


def _tokens(given: int | None, made: int | None) -> str:
    return "-" if given is None and made is None else f"{or_dash(given)} + {or_dash(made)}"

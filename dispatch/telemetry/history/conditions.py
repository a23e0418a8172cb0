"""A filter as a condition in SQL. What is asked for travels as parameters: a name is data, whatever it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dispatch.telemetry.history.records import WANTED, Cursor, Filter, check_span

Parameters = dict[str, Any]

_EQUAL = {
    "pool_id": "pool_id", "model": "model", "ending": "ending", "gateway_id": "gateway_id",
    "endpoint_id": "endpoint_id", "producer_id": "producer_id", "error_type": "error_type",
}  # fmt: skip
"""By member of the filter: the column that is to be equal to it."""

_OVER = {
    "wait_over_ms": "queue_wait_ms", "run_over_ms": "execution_ms", "total_over_ms": "total_latency_ms"
}  # fmt: skip


def condition(group: str, wanted: Filter, *, time: str = "ended_at") -> tuple[str, Parameters]:
    """Return the condition on rows. `time`: the column of the time that is asked for.

    Raises:
        InvalidRequest: the time ends before it begins.
    """
    check_span(wanted.since_ms, wanted.until_ms)
    parts = ["fabric_group_id = {group:String}"]
    values: Parameters = {"group": group}
    for name, sign in (("since_ms", ">="), ("until_ms", "<")):
        if getattr(wanted, name) is not None:
            parts.append(f"{time} {sign} {moment(name)}")
            values[name] = getattr(wanted, name)
    for name, column in _EQUAL.items():
        if getattr(wanted, name):
            parts.append(f"{column} = {{{name}:String}}")
            values[name] = getattr(wanted, name)
    for name, column in _OVER.items():
        if getattr(wanted, name) is not None:
            parts.append(f"{column} > {{{name}:UInt64}}")
            values[name] = getattr(wanted, name)
    if wanted.request_id:
        parts.append("(request_id = {request_id:String} OR caller_request_id = {request_id:String})")
        values["request_id"] = wanted.request_id
    if wanted.failed:
        parts.append(FAILED)
    if wanted.pools is not None:
        parts.append("pool_id IN {pools:Array(String)}")
        values["pools"] = list(wanted.pools)
    return " AND ".join(parts), values


FAILED = f"ending NOT IN ({', '.join(repr(ending) for ending in WANTED)})"


def only_known(wanted: Filter, names: Iterable[str]) -> Filter:
    """Return the filter without what a table does not know: of its facts, only `names` remain, and times and pools."""
    kept = {name: getattr(wanted, name) for name in names}
    return Filter(since_ms=wanted.since_ms, until_ms=wanted.until_ms, pools=wanted.pools, **kept)


def before(cursor: Cursor) -> tuple[str, Parameters]:
    """Return the condition on rows that come after the cursor in a list whose newest are the first."""
    at = moment("cursor_ms")
    condition = f"ended_at <= {at} AND (ended_at < {at} OR request_id < {{cursor_id:String}})"
    return condition, {"cursor_ms": cursor.ended_ms, "cursor_id": cursor.request_id}


def moment(parameter: str) -> str:
    """Return the time that a parameter holds as milliseconds."""
    return f"fromUnixTimestamp64Milli({{{parameter}:Int64}}, 'UTC')"


def milliseconds(column: str) -> str:
    """Return a time as milliseconds."""
    return f"toUnixTimestamp64Milli({column})"

"""Is everything that ended in the history? The endings stream is the ground truth for as long as it keeps a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dispatch.telemetry.history.conditions import milliseconds, moment
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import Checked, Filter, Verification
from dispatch.telemetry.history.schema import REQUESTS
from dispatch.telemetry.history.store import HistoryStore

GRACE_MS = 10_000
"""What ended less than so long ago may be on its way."""


def verification(
    history: History, page: Mapping[str, Any], pools: Sequence[Mapping[str, Any]], *, first: bool
) -> Verification:
    """Verify one page of the section `endings`; with the first one, count, too. `pools`: rows of that section.

    Raises:
        HistoryUnavailable: the history does not answer.
    """
    counters: Counter[str] = Counter()
    for pool in pools:
        counters.update(pool.get("endings") or {})
        counters["rejected"] += sum((pool.get("rejected") or {}).values())
    checked = check_records(history.store, history.group, page["rows"], page["server_ms"])
    return Verification(
        server_ms=page["server_ms"],
        counters={name: count for name, count in counters.items() if count} if first else None,
        rows=history.stats(Filter()).total.endings if first else None,
        checked=checked,
        cursor=page["cursor"],
    )


def check_records(store: HistoryStore, group: str, records: Sequence[Mapping[str, Any]], now_ms: int) -> Checked:
    """Look for the row of each record of the endings stream (as the section `endings` of a snapshot has them).

    A record without a request id stands for refusals that have none, and is counted only.

    Raises:
        HistoryUnavailable: the history does not answer.
    """
    named = {(row["request_id"], row["ended_ms"]): row for row in records if row.get("request_id")}
    there = _there(store, group, list(named))
    absent = [row for key, row in named.items() if key not in there]
    return Checked(
        records=dict(Counter(row["ending"] for row in records)),
        written=len(there),
        missing=[row["request_id"] for row in absent if row["ended_ms"] <= now_ms - GRACE_MS],
        fresh=sum(row["ended_ms"] > now_ms - GRACE_MS for row in absent),
        unnamed=len(records) - len(named),
    )


def _there(store: HistoryStore, group: str, keys: list[tuple[str, int]]) -> set[tuple[str, int]]:
    if not keys:
        return set()
    times = [ended_ms for _, ended_ms in keys]
    rows = store.query(
        f"SELECT request_id, {milliseconds('ended_at')} AS ended_ms FROM {REQUESTS}"
        f" WHERE fabric_group_id = {{group:String}} AND ended_at >= {moment('first_ms')}"
        f" AND ended_at <= {moment('last_ms')} AND request_id IN {{ids:Array(String)}}",
        {"group": group, "first_ms": min(times), "last_ms": max(times), "ids": [request_id for request_id, _ in keys]},
    )
    return {(row["request_id"], row["ended_ms"]) for row in rows} & set(keys)

"""From a moment of a group to the rows its page shows: numbers and moments, and words where a rule speaks. Pure.

A member that is None should have a value and has none: the page says `unknown`. Times are the server's clock, so that
ages can tick in the browser.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dispatch.fabric.view import EndpointRow, EventRow, FabricView, GatewayRow, PoolRow, RequestRow
from dispatch.studio.lines import Lines, Recent
from dispatch.studio.redacting import address_of, without_secrets
from dispatch.studio.trend import PoolTrend, Trend
from dispatch.studio.why import why_of

LEASES_SHOWN = 500
_EVENTS_SHOWN = 50
_GONE_MS = 600_000
_BEAT_LATE_MS = 10_000


@dataclass(slots=True)
class Memory:
    """What a page needs beside the moment itself: trends (10 s and 5 min), lines, what ended, and who was there."""

    short: Trend | None = None
    long: Trend | None = None
    lines: Lines = field(default_factory=Lines)
    recent: Recent = field(default_factory=Recent)
    gone: dict[str, tuple[GatewayRow, int]] = field(default_factory=dict)


def tables_of(view: FabricView, memory: Memory) -> dict[str, dict[str, dict[str, Any]]]:
    """Return all tables of a page."""
    endpoints = {row.endpoint_id: row for row in view.endpoints or ()}
    pools = view.pools or ()
    return {
        "one": {"group": _group(view), "totals": _totals(view, memory)},
        "pools": {row.pool_id: _pool(row, endpoints.get(row.endpoint_id or ""), memory, view) for row in pools},
        "endpoints": {name: _endpoint(row) for name, row in endpoints.items()},
        "gateways": _gateways(view, memory),
        "leases": {row.request_id: _lease(row) for row in (view.running or ())[:LEASES_SHOWN]},
        "events": _events(view.events or ()),
    }


def _group(view: FabricView) -> dict[str, Any]:
    group = view.group
    if group is None:
        return {"policy": None, "generation": None}
    return {
        "policy": group.policy,
        "generation": group.generation,
        "cap": group.total_concurrent_dispatch,
        "max_queued": group.max_queued,
        "lease_ms": group.lease_ms,
        "dead": group.dead,
    }


def _totals(view: FabricView, memory: Memory) -> dict[str, Any]:
    group, pools = view.group, view.pools
    waiting_pools = [row for row in pools or () if row.pending]
    heads = [row.head_submitted_ms for row in waiting_pools]
    oldest = None if None in heads else min((ms for ms in heads if ms is not None), default=None)
    live = [row for row in view.gateways or () if not row.draining]
    facts = memory.recent.facts()
    counted = memory.lines.not_succeeded(view)
    claimed = [row.claimed_ms for row in view.running or () if row.claimed_ms is not None]
    return {
        "waiting": None if group is None else group.pending,
        "delayed": None if group is None else group.delayed,
        "oldest_ms": oldest,
        "waiting_pools": None if pools is None else len(waiting_pools),
        "in_flight": None if group is None else group.in_flight,
        "longest_ms": min(claimed, default=None),
        "gateways": None if view.gateways is None else len(view.gateways),
        "live": None if view.gateways is None else len(live),
        "arriving": _sum(memory.short, "arriving_per_s"),
        "launched": _sum(memory.short, "launched_per_s"),
        "finished": _rounded(_last(memory.lines.group["finished"])),
        "not_ok": None if counted is None else counted[0],
        "ended": None if counted is None else counted[1],
        "error": facts["error"],
        "wait_ms": facts["wait_ms"],
        "run_ms": facts["run_ms"],
        "sample": facts["sample"],
        "since_ms": memory.lines.since_ms,
        "weights": None if pools is None else sum(row.quantum or 0 for row in pools),
        "leases": None if view.running is None else len(view.running),
    }


def _sum(trend: Trend | None, name: str) -> float | None:
    """Return the sum over all pools; None if that of one is not known."""
    if trend is None or not trend.pools:
        return None
    values = [getattr(each, name) for each in trend.pools.values()]
    known = [value for value in values if value is not None]
    return None if len(known) < len(values) else _rounded(sum(known))


def _last(line: Iterable[float | None]) -> float | None:
    values = list(line)
    return values[-1] if values else None


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def _pool(row: PoolRow, endpoint: EndpointRow | None, memory: Memory, view: FabricView) -> dict[str, Any]:
    short = _of(memory.short, row.pool_id)
    long = _of(memory.long, row.pool_id)
    why = why_of(row, endpoint, view)
    backlog = row.max_queue_depth
    return {
        "weight": row.quantum,
        "endpoint": row.endpoint_id,
        "enabled": row.enabled,
        "waiting": row.pending,
        "bytes": row.pending_bytes,
        "delayed": row.delayed,
        "oldest_ms": row.head_submitted_ms if row.pending else None,
        "head_cost": row.head_cost if row.pending else None,
        "in_flight": row.in_flight,
        "min": row.min_concurrent,
        "cap": row.max_concurrent,
        "depth": backlog,
        "deficit": row.deficit,
        "place": row.place,
        "delivery": row.delivery,
        "code": why.code,
        "icon": why.icon,
        "tone": why.tone,
        "why": why.text,
        "more": why.more,
        "until_ms": why.until_ms,
        "since_ms": why.since_ms,
        "stopped": _stopped(row),
        "share": _rounded(long.share, 3),
        "fair": _rounded(long.fair_share, 3),
        "asked": _asked(row, long),
        "arriving": _rounded(short.arriving_per_s),
        "launched": _rounded(short.launched_per_s),
        "growth": _rounded(short.growth_per_s),
        "skips": dict(sorted(long.skips.items())),
        "endings": dict(row.endings),
        "rejected": dict(row.rejected),
        "submitted_n": row.submitted,
        "launched_n": row.launched,
        "served": row.cost_served,
    }


_NOTHING_KNOWN = PoolTrend()


def _of(trend: Trend | None, pool: str) -> PoolTrend:
    return (trend.of(pool) if trend is not None else None) or _NOTHING_KNOWN


def _asked(row: PoolRow, long: PoolTrend) -> str:
    """Return the word beside the share: its fair share counts (`fair`), it got `all it asked`, or it is `paused`."""
    if row.paused is not None:
        return "paused"
    if long.share is None:
        return "unknown"
    return "fair" if long.backlogged else "all"


def _stopped(row: PoolRow) -> dict[str, Any] | None:
    note = row.paused or row.draining
    if note is None:
        return None
    return {"state": "paused" if row.paused else "draining", "by": note.by, "at_ms": note.at_ms, "reason": note.reason}


def _endpoint(row: EndpointRow) -> dict[str, Any]:
    gate = row.gate
    shown: dict[str, Any] = {
        "address": address_of(row.url),
        "cap": row.max_concurrent,
        "in_flight": row.in_flight,
        "breaker": row.breaker,
        "breaker_since_ms": row.breaker_since_ms,
        "failures_in_a_row": row.failures_in_a_row,
        "breaker_failures": row.breaker_failures,
        "open_until_ms": row.open_until_ms,
        "good_probes": row.good_probes,
        "close_after": row.close_after,
        "hold_until_ms": row.hold_until_ms,
        "reason": row.block_reason,
        "waiting_pools": row.waiting_pools,
        "attempts": row.attempts,
        "failures": row.failures,
        "error": row.last_error_type,
        "error_ms": row.last_error_ms,
        "probing": row.probe is not None,
        "gated": gate is not None,
    }
    if gate is not None:
        shown |= {
            "engine": gate.engine,
            "target": gate.target,
            "token_limit_ms": gate.token_limit_ms,
            "fail": gate.fail,
            "queue": _rounded(gate.waiting, 1),
            "token_ms": _rounded(gate.token_ms, 1),
            "sampled_ms": gate.sampled_ms,
            "stale": gate.stale,
        }
    return shown


def _gateways(view: FabricView, memory: Memory) -> dict[str, dict[str, Any]]:
    """Return those that are registered, and for ten minutes those that were."""
    if view.gateways is None:
        return {}
    here = {row.gateway_id: row for row in view.gateways}
    for name in [name for name, (_, at) in memory.gone.items() if name in here or view.server_ms - at > _GONE_MS]:
        del memory.gone[name]
    shown = {name: _gateway(row, view.server_ms) for name, row in here.items()}
    shown.update((name, _gateway(row, view.server_ms) | {"state": "gone"}) for name, (row, _) in memory.gone.items())
    return shown


def note_gone(before: FabricView | None, view: FabricView, memory: Memory) -> None:
    """Remember the gateways that have left since the view before."""
    if before is None or before.gateways is None or view.gateways is None:
        return
    here = {row.gateway_id for row in view.gateways}
    memory.gone.update((row.gateway_id, (row, view.server_ms)) for row in before.gateways if row.gateway_id not in here)


def _gateway(row: GatewayRow, now: int) -> dict[str, Any]:
    late = row.beat_ms is not None and now - row.beat_ms > _BEAT_LATE_MS
    return {
        "state": "draining" if row.draining else "late" if late else "live",
        "host": row.host,
        "pid": row.pid,
        "version": row.version,
        "slots": row.slots,
        "in_flight": row.in_flight,
        "started_ms": row.started_ms,
        "beat_ms": row.beat_ms,
    }


def _lease(row: RequestRow) -> dict[str, Any]:
    state = "cancelling" if row.cancel_asked_by else "streaming" if row.first_chunk_ms else "running"
    return {
        "pool": row.pool_id,
        "producer": row.producer_id,
        "gateway": row.gateway_id,
        "endpoint": row.endpoint_id,
        "model": row.model,
        "cost": row.cost,
        "attempt": row.attempt,
        "submitted_ms": row.submitted_ms,
        "claimed_ms": row.claimed_ms,
        "until_ms": row.lease_until_ms,
        "deadline_ms": row.deadline_ms,
        "first_chunk_ms": row.first_chunk_ms,
        "state": state,
    }


def _events(rows: Iterable[EventRow]) -> dict[str, dict[str, Any]]:
    """Return the newest events. A breaker that opens and probes again and again is one, with how often it moved."""
    shown: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] | None = None
    for row in rows:
        event = event_shown(row)
        if last is not None and _goes_on(event, last):
            last["times"] = last.get("times", 1) + 1
            last["first_ms"] = row.at_ms
            continue
        if len(shown) == _EVENTS_SHOWN:
            break
        shown[row.event_id] = last = event
    return shown


def _goes_on(event: dict[str, Any], last: dict[str, Any]) -> bool:
    return all(each["kind"] == "breaker" and each["facts"].get("to") != "closed" for each in (event, last)) and (
        event["facts"].get("endpoint") == last["facts"].get("endpoint")
    )


def event_shown(row: EventRow) -> dict[str, Any]:
    """Return what a page is told of an event."""
    facts = {name: without_secrets(str(value)) for name, value in row.facts.items()}
    return {"kind": row.kind, "at_ms": row.at_ms, "facts": facts}

"""Rules about pools and endpoints: what keeps waiting work from being launched."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch.fabric.view import EndpointRow, PoolRow
from dispatch.studio.findings import Act, Finding, Situation
from dispatch.studio.looking import (
    TROUBLES,
    address_of,
    ago,
    covered,
    live_gateways,
    names_of,
    quoted,
    slots_free,
    waiting_pools,
)
from dispatch.studio.words import REASONS, count, duration, plural, rate

_HEAD_WAITS_MS = 2_000
"""Work that flows waits too; a pool whose head waits shorter than this does not grow."""


def breaker_open(s: Situation) -> Iterator[Finding]:
    """An endpoint's breaker is open, or being probed."""
    for endpoint in s.view.endpoints or ():
        if endpoint.breaker not in {"open", "half_open"}:
            continue
        pools, name = waiting_pools(s.view, endpoint.endpoint_id), endpoint.endpoint_id
        failed = plural(endpoint.failures_in_a_row or endpoint.breaker_failures or 0, "failed call", "failed calls")
        state = f"the breaker of {name} is open after {failed} in a row"
        if endpoint.breaker == "half_open":
            good = f"{endpoint.good_probes or 0} of {endpoint.close_after or 1} good probes"
            state = f"the breaker of {name} is half open, {good}"
        sentence = (
            f"{names_of(pools)} {'stand' if len(pools) > 1 else 'stands'} still: {state}."
            if pools
            else f"{_capital(state)}; nothing waits for it."
        )
        yield Finding(
            rule="breaker_open",
            kind="broken",
            subject=f"endpoint:{name}",
            sentence=sentence,
            since_ms=endpoint.breaker_since_ms,
            act=Act("Open endpoint", "endpoint", name),
            look_first=_where_it_fails(endpoint),
            signals=("backend-errors", "pending-grows") if pools else ("backend-errors",),
            covers=covered(pools),
        )


def endpoint_fails(s: Situation) -> Iterator[Finding]:
    """An endpoint's last calls failed, and its breaker is still closed."""
    for endpoint in s.view.endpoints or ():
        failed, at_ms = endpoint.failures_in_a_row or 0, endpoint.last_error_ms
        if endpoint.breaker != "closed" or not failed or at_ms is None:
            continue
        if s.view.server_ms - at_ms > s.limits.recent_ms:
            continue
        name, trouble = endpoint.endpoint_id, TROUBLES.get(endpoint.last_error_type or "", "fails")
        calls = plural(failed, "failed call", "failed calls")
        yield Finding(
            rule="endpoint_fails",
            kind="broken",
            subject=f"endpoint:{name}",
            sentence=f"{name} {trouble}: {calls} in a row, the last {ago(s.view, at_ms)} ago; its breaker opens at "
            f"{endpoint.breaker_failures or 'an unknown number'}.",
            act=Act("Open endpoint", "endpoint", name),
            look_first=_where_it_fails(endpoint),
            signals=("backend-errors",),
        )


def endpoint_held(s: Situation) -> Iterator[Finding]:
    """An endpoint's gate holds, or it asked to wait, and something waits for it."""
    for endpoint in s.view.endpoints or ():
        pools = waiting_pools(s.view, endpoint.endpoint_id)
        if endpoint.block_reason != "endpoint_gated" or not pools:
            continue
        name = endpoint.endpoint_id
        if endpoint.hold_until_ms is not None:
            left = duration(max(1, endpoint.hold_until_ms - s.view.server_ms))
            why = f"{name} asked to wait (429 or 503), {left} are left. The backend is the bottleneck."
        else:
            why = _gate_told(endpoint)
        since = [row.block_since_ms for row in pools if row.block_since_ms is not None]
        yield Finding(
            rule="endpoint_held",
            kind="held",
            subject=f"endpoint:{name}",
            sentence=f"{names_of(pools)} {'are' if len(pools) > 1 else 'is'} slowed: {why}",
            since_ms=min(since, default=None),
            act=Act("Open endpoint", "endpoint", name),
            look_first=f"saturation of {name} at {address_of(endpoint)}: engine queue, ms per token",
            signals=("pending-grows",),
            covers=covered(pools),
        )


def gate_stale(s: Situation) -> Iterator[Finding]:
    """The last sample of an endpoint's engine is too old to go by, although a gateway lives to take one."""
    if live_gateways(s.view) == []:
        return
    for endpoint in s.view.endpoints or ():
        gate, name = endpoint.gate, endpoint.endpoint_id
        if gate is None or not gate.stale:
            continue
        old = (
            f"{name} has given no engine metrics yet"
            if gate.sampled_ms is None
            else f"Engine metrics of {name} are {ago(s.view, gate.sampled_ms)} old"
        )
        yield Finding(
            rule="gate_stale",
            kind="held",
            subject=f"endpoint:{name}",
            sentence=f"{old}; fail mode {gate.fail or 'unknown'} applies.",
            since_ms=gate.sampled_ms,
            act=Act("Open endpoint", "endpoint", name),
            look_first=f"the metrics page of the engine {gate.engine or ''} behind {address_of(endpoint)}",
            signals=("pending-grows",) if gate.fail == "closed" else (),
        )


def pool_capped(s: Situation) -> Iterator[Finding]:
    """A pool grows at its cap while its endpoint has room."""
    for pool in waiting_pools(s.view):
        growth, endpoint = _growth(s, pool), s.view.endpoint(pool.endpoint_id)
        if growth is None or endpoint is None or pool.max_concurrent is None:
            continue
        free = slots_free(endpoint)
        if (pool.in_flight or 0) < pool.max_concurrent or free == 0:
            continue
        room = "has no cap" if free is None else f"has {plural(free, 'slot', 'slots')} free"
        yield Finding(
            rule="pool_capped",
            kind="capped",
            subject=f"pool:{pool.pool_id}",
            sentence=f"{pool.pool_id} grows by {rate(growth)} at its cap of {count(pool.max_concurrent)}, while "
            f"{endpoint.endpoint_id} {room}.",
            since_ms=pool.block_since_ms,
            act=Act("Change cap", "change_cap", pool.pool_id),
            look_first=f"max_concurrent of {pool.pool_id}",
            signals=("pending-grows",),
        )


def queue_filling(s: Situation) -> Iterator[Finding]:
    """A pool holds nearly as many requests, or bytes of them, as it may, or refuses already."""
    for pool in s.view.pools or ():
        trend = s.trend.of(pool.pool_id) if s.trend else None
        refused = trend.rejected_per_s if trend else None
        bounds = ((pool.pending, pool.max_queue_depth, "waiting"), (pool.pending_bytes, pool.max_queue_bytes, "bytes"))
        fullest = max(bounds, key=lambda each: (each[0] or 0) / each[1] if each[1] else 0)
        held, most, word = fullest
        full = bool(held and most and held * 100 > s.limits.queue_percent * most)
        if not full and not refused:
            continue
        told = f"{count(held)} of {count(most)} {word}"
        yield Finding(
            rule="queue_filling",
            kind="capped",
            subject=f"pool:{pool.pool_id}",
            sentence=f"{pool.pool_id} refuses: {rate(refused)} rejected, {told}."
            if refused
            else f"{pool.pool_id} refuses soon: {told}.",
            act=Act("Open pool", "pool", pool.pool_id),
            look_first=f"what {pool.pool_id} waits for: {_why(pool)}",
            signals=("pending-grows",),
        )


def stopped_by_person(s: Situation) -> Iterator[Finding]:
    """Somebody paused or drains a pool in which requests wait."""
    for pool in s.view.pools or ():
        note, word = (pool.paused, "paused") if pool.paused else (pool.draining, "being drained")
        if note is None or not pool.pending:
            continue
        yield Finding(
            rule="stopped_by_person",
            kind="person",
            subject=f"pool:{pool.pool_id}",
            sentence=f"{pool.pool_id} is {word} by {note.by or 'somebody'}{quoted(note.reason)}; "
            f"{plural(pool.pending, 'request waits', 'requests wait')} in it.",
            since_ms=note.at_ms,
            act=Act("Resume", "resume", pool.pool_id),
            look_first=f"whether {note.by or 'whoever did it'} still wants it",
            signals=("pending-grows",),
        )


def pool_grows(s: Situation) -> Iterator[Finding]:
    """A pool grows, and nothing else was said of it."""
    for pool in waiting_pools(s.view):
        growth = _growth(s, pool)
        if growth is None:
            continue
        if pool.head_submitted_ms is not None and s.view.server_ms - pool.head_submitted_ms < _HEAD_WAITS_MS:
            continue
        yield Finding(
            rule="pool_grows",
            kind="held",
            subject=f"pool:{pool.pool_id}",
            sentence=f"{pool.pool_id} grows by {rate(growth)}, {count(pool.pending)} wait: {_why(pool)}.",
            since_ms=pool.block_since_ms,
            act=Act("Open pool", "pool", pool.pool_id),
            look_first=_look(pool),
            signals=("pending-grows",),
        )


def _growth(s: Situation, pool: PoolRow) -> float | None:
    """Return by how much the pool grows; None when it does not, or that is not known."""
    trend = s.trend.of(pool.pool_id) if s.trend else None
    return trend.growth_per_s if trend and trend.growing else None


def _gate_told(endpoint: EndpointRow) -> str:
    gate, name = endpoint.gate, endpoint.endpoint_id
    if gate is None:
        return f"{name} says that it is busy enough."
    if gate.stale:
        return f"the gate of {name} is closed, since its engine metrics are too old (fail mode {gate.fail})."
    launched = gate.launched_since or 0
    if gate.waiting is not None and gate.target is not None and gate.waiting + launched >= gate.target:
        return (
            f"the gate of {name} holds at {count(gate.waiting + launched)} queued, target {count(gate.target)}. "
            "The backend is the bottleneck."
        )
    limit = "unknown" if gate.token_limit_ms is None else f"{gate.token_limit_ms} ms"
    told = f"{duration(gate.token_ms)} per token, limit {limit}"
    return f"the gate of {name} holds at {told}. The backend is the bottleneck."


def _where_it_fails(endpoint: EndpointRow) -> str:
    error = f"last error {endpoint.last_error_type}; " if endpoint.last_error_type else ""
    return f"{error}the address {address_of(endpoint)} and that it listens; the gateway's log has the full error"


def _why(pool: PoolRow) -> str:
    if pool.block_reason is None:
        return "it arrives faster than it leaves"
    reason = REASONS.get(pool.block_reason)
    why = reason.why if reason else pool.block_reason
    return why[0].lower() + why[1:]


def _look(pool: PoolRow) -> str:
    reason = REASONS.get(pool.block_reason or "")
    return (
        reason.look if reason and reason.look else f"the weight of {pool.pool_id}, its cap, and the endpoint's latency"
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]

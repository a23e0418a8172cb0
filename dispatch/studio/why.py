"""Why a pool waits, in a line and a line below. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch.fabric.view import EndpointRow, FabricView, PoolRow
from dispatch.studio.looking import is_live
from dispatch.studio.words import FLOWING, NOT_KNOWN, REASONS, UNKNOWN, Reason, count, plural


@dataclass(frozen=True, slots=True)
class Why:
    """`text` names the cause, `more` its number; `until_ms`: when it may end by time alone."""

    code: str
    icon: str
    tone: str
    text: str
    more: str = ""
    until_ms: int | None = None
    since_ms: int | None = None


def why_of(pool: PoolRow, endpoint: EndpointRow | None, view: FabricView) -> Why:
    """Say why the pool waits, or that it flows."""
    if pool.paused is not None or pool.draining is not None or pool.enabled is False:
        return _stopped(pool)
    if pool.pending is None:
        return Why("unknown", NOT_KNOWN.icon, NOT_KNOWN.tone, "Reason unknown", "the snapshot has none")
    if pool.pending == 0:
        return _idle(pool, endpoint)
    if pool.block_reason is None:
        return _unserved(view) or Why("flowing", FLOWING.icon, FLOWING.tone, FLOWING.why, "served as it arrives")
    return _held(pool, endpoint, view, REASONS.get(pool.block_reason))


def _unserved(view: FabricView) -> Why | None:
    """Return why nobody takes what the scheduler would launch; None = somebody does, or it is not known."""
    if view.gateways is None:
        return None
    takers = [row for row in view.gateways if not row.draining and is_live(view, row)]
    if not takers:
        icon = REASONS["endpoint_open"].icon
        return Why("no_gateway", icon, "broken", "No gateway is live", "requests wait until their deadline")
    slots = sum(row.slots or 0 for row in takers)
    used = sum(row.in_flight or 0 for row in takers)
    if slots and used >= slots:
        icon = REASONS["global_capacity"].icon
        return Why("gateways_full", icon, "hold", "Gateways are full", f"{count(used)} of {count(slots)} slots in use")
    return None


def _stopped(pool: PoolRow) -> Why:
    note, code, word = pool.paused, "paused", "Paused"
    if note is None:
        note, code, word = pool.draining, "draining", "Draining"
    if note is None:
        return Why("disabled", REASONS["paused"].icon, "person", "Disabled in the config", "new requests are refused")
    who = f"{word} by {note.by}" if note.by else word
    why = f"\u201c{note.reason}\u201d" if note.reason else "no reason was given"
    return Why(code, REASONS[code].icon, "person", who, why, since_ms=note.at_ms)


def _idle(pool: PoolRow, endpoint: EndpointRow | None) -> Why:
    """Nothing waits for its first launch; what is broken behind it is said all the same."""
    if endpoint is not None and endpoint.breaker == "open":
        return _open(endpoint, "nothing waits; ")
    if pool.delayed:
        more = f"{plural(pool.delayed, 'request waits', 'requests wait')} for the next attempt"
        return Why("flowing", FLOWING.icon, FLOWING.tone, FLOWING.why, more)
    if not pool.in_flight:
        return Why("idle", "idle", "grey", "Idle", "nothing waits")
    return Why("flowing", FLOWING.icon, FLOWING.tone, FLOWING.why, "nothing waits")


def _open(endpoint: EndpointRow, before: str = "") -> Why:
    reason = REASONS["endpoint_open"]
    cause = endpoint.last_error_type or "last error unknown"
    if endpoint.probe is not None:
        return Why(
            "endpoint_open", reason.icon, reason.tone, f"Breaker of {endpoint.endpoint_id} probes",
            f"{before}{cause}, a probe is under way", since_ms=endpoint.breaker_since_ms,
        )  # fmt: skip
    return Why(
        "endpoint_open", reason.icon, reason.tone, f"Breaker of {endpoint.endpoint_id} is open",
        f"{before}{cause}", endpoint.open_until_ms, endpoint.breaker_since_ms,
    )  # fmt: skip


def _held(pool: PoolRow, endpoint: EndpointRow | None, view: FabricView, reason: Reason | None) -> Why:
    if reason is None:
        return Why(pool.block_reason or "", NOT_KNOWN.icon, NOT_KNOWN.tone, f"Reason unknown ({pool.block_reason})")
    name = endpoint.endpoint_id if endpoint is not None else pool.endpoint_id or UNKNOWN
    text, more, until = reason.why, "", None
    match pool.block_reason:
        case "insufficient_credit":
            more = f"head costs {count(pool.head_cost)}, credit {count(pool.deficit)}"
        case "protected":
            more = "their protected slots are kept free"
        case "lane_capacity":
            more = f"{count(pool.in_flight)} of {count(pool.max_concurrent)} slots in use"
        case "global_capacity":
            group = view.group
            cap = None if group is None else group.total_concurrent_dispatch
            more = f"{count(None if group is None else group.in_flight)} of {count(cap)} slots in use"
        case "endpoint_capacity":
            text = f"{name} is full"
            if endpoint is not None:
                more = f"{count(endpoint.in_flight)} of {count(endpoint.max_concurrent)} slots in use"
        case "endpoint_gated":
            text, more, until = _gated(name, endpoint)
        case "endpoint_open" if endpoint is not None:
            return _open(endpoint)
    return Why(pool.block_reason or "", reason.icon, reason.tone, text, more, until, pool.block_since_ms)


def _gated(name: str, endpoint: EndpointRow | None) -> tuple[str, str, int | None]:
    if endpoint is not None and endpoint.hold_until_ms is not None:
        return f"{name} asked to wait", "it said Retry-After", endpoint.hold_until_ms
    gate = None if endpoint is None else endpoint.gate
    if gate is None:
        return f"Gate of {name} holds", "", None
    if gate.stale:
        return f"Gate of {name} holds", f"its sample is too old, fail mode {gate.fail or UNKNOWN}", None
    queued = UNKNOWN if gate.waiting is None else f"{gate.waiting:g}"
    if gate.waiting is not None and gate.target is not None and gate.waiting < gate.target and gate.token_ms:
        return f"Gate of {name} holds", f"{gate.token_ms:.0f} ms per token, limit {count(gate.token_limit_ms)}", None
    return f"Gate of {name} holds", f"{queued} queued in the engine, target {count(gate.target)}", None

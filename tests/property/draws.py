"""What random histories are drawn from: configs and their changes, requests, how leases and chores go."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dispatch.fabric import records as r
from tests.property.accidents import LONG_MS

POOLS = ("a", "b", "c", "d")
CROWD = tuple(f"p{number}" for number in range(9))
"""More pools, in some histories: with them a pass of barren visits is longer than one call."""
URL = "http://127.0.0.1:9/v1"

SHORT_MS = 3_000
"""Comes due before a gateway that sleeps would look by itself, and in some histories really."""

pool_fields = {
    "quantum": st.sampled_from((1, 2, 4, 8, 50)),
    "min_concurrent": st.sampled_from((0, 0, 1, 2)),
    "max_concurrent": st.sampled_from((None, None, 1, 2, 3)),
    "max_burst_per_visit": st.sampled_from((None, None, 1, 2)),
    "endpoint": st.sampled_from(("e", "f")),
    "delivery": st.sampled_from(("at_most_once", "at_least_once")),
    "max_queue_depth": st.sampled_from((10_000, 10_000, 10_000, 3)),
    "max_queue_bytes": st.sampled_from((1_000_000, 1_000_000, 10_000)),
    "enabled": st.sampled_from((True, True, True, False)),
    "display_name": st.sampled_from(("", "x")),
    "priority_ageing_ms": st.sampled_from((0, LONG_MS)),
    "max_attempts": st.sampled_from((None, 1, 2, 4, 4)),
    "retry_on": st.sampled_from((["unreachable", "disconnected", "overloaded"], ["unreachable", "502"], [])),
    "retry_base_ms": st.sampled_from((1, SHORT_MS, LONG_MS // 4)),
    "retry_cap_ms": st.sampled_from((LONG_MS // 4, LONG_MS // 2)),
    "on_open": st.sampled_from(("queue", "queue", "reject")),
}
endpoint_fields = {
    "max_concurrent": st.sampled_from((None, 1, 2)),
    "breaker_failures": st.sampled_from((1, 2, 3)),
    "open_ms": st.sampled_from((LONG_MS, LONG_MS // 2, SHORT_MS, 10)),
    "close_after": st.sampled_from((1, 2)),
    "probe_timeout_ms": st.sampled_from((LONG_MS, LONG_MS // 2)),
    "gate": st.sampled_from(("none", "none", "vllm")),
    "gate_target": st.sampled_from((1, 3)),
    "gate_token_ms": st.just(150),
    "gate_poll_ms": st.just(LONG_MS),
    "gate_stale_ms": st.just(LONG_MS),
    "gate_fail": st.sampled_from(("open", "closed")),
}
group_fields = {
    "policy": st.sampled_from(("drr", "fifo")),
    "total_concurrent_dispatch": st.integers(1, 6),
    "cost_max": st.sampled_from((4, 16)),
    "cost_min": st.sampled_from((1, 2)),
    "max_queued": st.sampled_from((100_000, 100_000, 12)),
    "retry_budget_percent": st.sampled_from((0, 20, 100)),
    "retry_budget_min_per_s": st.sampled_from((0, 3, 3)),
    "hold_max_ms": st.sampled_from((LONG_MS, LONG_MS // 3)),
    "dead_kept": st.sampled_from((0, 1, 1_000)),
}
keys = st.sampled_from(("", "k", "l", "m"))
levels = st.sampled_from((None, None, 0, 2, 3))
any_pool = st.sampled_from((*POOLS, *POOLS, "default"))
costs = st.one_of(st.just(1), st.integers(0, 20))
small = st.integers(0, 40)
"""Picks one of what is there."""
picks = st.lists(small, max_size=4)
outcomes = st.sampled_from(list(r.Outcome))
verdicts = st.sampled_from((r.Verdict.NEUTRAL, r.Verdict.GOOD, r.Verdict.BACKPRESSURE, *[r.Verdict.FAILURE] * 2))
holds = st.sampled_from((0, SHORT_MS, LONG_MS // 4, LONG_MS // 2))
failures = st.fixed_dictionaries(
    {
        "error_type": st.sampled_from(("endpoint_unreachable", "endpoint_disconnected", "endpoint_overloaded", "test")),
        "retryable": st.sampled_from((True, True, False)),
        "status": st.sampled_from((None, None, 502, 500)),
        "hold_ms": holds,
        "verdict": verdicts,
    }
)
"""How a failed attempt went, beside its outcome."""
samples = st.fixed_dictionaries(
    {"waiting": st.sampled_from((None, 0.0, 1.0, 5.0)), "token_ms": st.sampled_from((None, 20.0, 400.0))}
)


def pick(found: list[Any], at: int) -> Any:
    """Return one of what is there."""
    return found[at % len(found)]


other_submits = st.sampled_from(
    (
        *("content", "large", "large and stored", "same id", "same id and nonce", "unknown pool", "another session"),
        *("detached", "key", "key", "key, detached", "short wait"),
    )
)


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, Any]:
    """One change of a config: of the group, of an endpoint's or a pool's field, or one that comes or goes."""
    kind = draw(st.sampled_from(("pool", "pool", "pool", "group", "endpoint", "endpoint", "drop", "drop endpoint")))
    if kind == "drop endpoint":
        return kind, draw(st.sampled_from(("e", "f"))), None
    if kind == "group":
        name = draw(st.sampled_from(sorted(group_fields)))
        return kind, name, draw(group_fields[name])
    if kind == "endpoint":
        name = draw(st.sampled_from(sorted(endpoint_fields)))
        return kind, draw(st.sampled_from(("e", "f"))), {name: draw(endpoint_fields[name])}
    pool = draw(st.sampled_from(POOLS))
    if kind == "drop":
        return kind, pool, None
    name = draw(st.sampled_from(sorted(pool_fields)))
    return kind, pool, {name: draw(pool_fields[name])}


def changed(document: dict[str, Any], change: tuple[str, str, Any]) -> dict[str, Any]:
    """Return the document with a change of `changes` made. What is not there comes back, as a plain one.

    The pools of an endpoint that is dropped use another one.
    """
    kind, name, value = change
    pools, endpoints = document["pools"], document["endpoints"]
    if kind == "group":
        return {**document, name: value}
    if kind == "endpoint":
        changed_one = next((e for e in endpoints if e["endpoint_id"] == name), plain_endpoint(name, {})) | value
        return {**document, "endpoints": [*(e for e in endpoints if e["endpoint_id"] != name), changed_one]}
    if kind == "drop endpoint":
        left = [e for e in endpoints if e["endpoint_id"] != name]
        other = left[0]["endpoint_id"] if left else name
        return {**document, "endpoints": left, "pools": [pool | {"endpoint": other} for pool in pools]}
    others = [pool for pool in pools if pool["pool_id"] != name]
    if kind == "drop":
        return {**document, "pools": others}
    pool = next((pool for pool in pools if pool["pool_id"] == name), plain_pool(name))
    return {**document, "pools": [*others, pool | value]}


def plain_pool(name: str) -> dict[str, Any]:
    return {
        "pool_id": name,
        "endpoint": "e",
        "default_timeout_ms": LONG_MS,
        "max_timeout_ms": 2 * LONG_MS,
        "priority_ageing_ms": LONG_MS,
        "delivery": "at_least_once" if name in {"b", "d"} else "at_most_once",
        "max_attempts": 3,
        "retry_base_ms": LONG_MS // 4,
        "retry_cap_ms": LONG_MS // 2,
    }


def plain_endpoint(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    times = {"open_ms": LONG_MS, "probe_timeout_ms": LONG_MS, "gate_poll_ms": LONG_MS, "gate_stale_ms": LONG_MS}
    return {"endpoint_id": name, "url": URL, "breaker_failures": 2, "close_after": 1} | times | fields


def report_of(chore: r.Chore, said: dict[str, Any], sample: dict[str, Any]) -> r.ChoreReport:
    """Return what a chore came to: what `failures` says of a probe, and a sample."""
    said = {name: said[name] for name in ("verdict", "hold_ms", "error_type")}
    return r.ChoreReport(kind=chore.kind.lower(), endpoint_id=chore.endpoint_id, token=chore.token, **said, **sample)


def settlement(lease: r.Lease, outcome: r.Outcome, **went: Any) -> r.Settlement:
    """Return how a lease went, by default well for its endpoint."""
    said = {"verdict": r.Verdict.GOOD, "error_type": "test"} | went
    return r.Settlement(request_id=lease.request_id, fence=lease.fence, outcome=outcome, **said)

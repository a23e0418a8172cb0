"""Which situations random histories met: agreement about what never happened shows nothing."""

from __future__ import annotations

from typing import Any

from tests.model.records import Group

ALWAYS = {"ending succeeded", "ending cancelled", "ending expired", "keys", "tombstones"}
"""Met by any two hundred histories. Which of the others a short run meets is chance; a long one meets all."""

COMMON = {
    "a capped pool", "a holder", "a paused pool", "a second attempt", "debt", "grace", "kept pools", "keys",
    "several pools wait for an endpoint", "tags of idle keys", "tombstones", "virtual rounds", "ending succeeded",
    "ending cancelled", "ending expired", "ending failed", "ending lost", "ending malformed", "ending producer_gone",
    "an open endpoint", "a breaker that closed", "a hold", "a pool that waits for an open endpoint",
    "a pool that waits for a gate", "a delayed request", "several tries", "a probe",
}  # fmt: skip
RARE = {
    "a pass over several calls", "ending dead", "ending reply_dropped", "a watcher's probe", "a good probe of several",
    "a refusal by an open endpoint", "a spent budget", "dead requests",
}  # fmt: skip


def situations(group: Group, now: int) -> dict[str, Any]:
    """Say of each situation whether the group is in it; what is true counts."""
    pools, endpoints = group.pools.values(), group.endpoints.values()
    return {
        "virtual rounds": group.round,
        "a pass over several calls": group.pass_limit is not None,
        "kept pools": group.kept,
        "a holder": any(endpoint.holder for endpoint in endpoints),
        "several pools wait for an endpoint": sum(pool.on_endpoint for pool in pools) > 1,
        "a capped pool": any(pool.parked == "lane_capacity" for pool in pools),
        "debt": any(pool.deficit < 0 for pool in pools),
        "keys": any(len(pool.tags) > 1 for pool in pools),
        "tags of idle keys": any(pool.idle_tags for pool in pools),
        "a paused pool": any(pool.parked == "paused" for pool in pools),
        "tombstones": any(pool.tombstones for pool in pools),
        "grace": group.grace_until_ms > now,
        "an open endpoint": any(endpoint.breaker == "open" for endpoint in endpoints),
        "a probe": any(endpoint.probe and endpoint.probe.request_id for endpoint in endpoints),
        "a watcher's probe": any(endpoint.probe and not endpoint.probe.request_id for endpoint in endpoints),
        "a good probe of several": any(endpoint.good for endpoint in endpoints),
        "a breaker that closed": any(move.after == "closed" for move in group.moves),
        "a hold": any(endpoint.hold_until_ms > now for endpoint in endpoints),
        "a pool that waits for an open endpoint": any(p.parked == "endpoint_open" for p in pools),
        "a pool that waits for a gate": any(pool.parked == "endpoint_gated" for pool in pools),
        "a delayed request": group.delayed(),
        "several tries": any(len(request.tries) > 1 for request in group.requests.values()),
        "a spent budget": len(group.retries) > 2,
        "a refusal by an open endpoint": any(pool.rejected["endpoint_open"] for pool in pools),
        "dead requests": len(group.dead) > 1,
        "a second attempt": any(request.attempt > 1 for request in group.requests.values()),
        **{f"ending {ended.ending}": True for ended in group.ended},
    }

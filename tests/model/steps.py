"""Short steps for tests of the twin: a group with pools, and operations with what a test does not mind filled in."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dispatch.fabric import records as r
from tests.model.bench import document, submission
from tests.model.reference import Claimant, Reference

NOW = 1_000_000
LEASE_MS = 30_000
LIVENESS_MS = 30_000
SECOND = 1_000


def configured(pools: dict[str, dict[str, Any]] | None = None, **group: Any) -> Reference:
    twin = Reference()
    config = document(pools or {"a": {}}, **{"lease_ms": LEASE_MS, "liveness_ms": LIVENESS_MS, **group})
    assert twin.configure(config, expected_generation=0, actor="test", nonce="first").status == "APPLIED"
    return twin


def reconfigured(twin: Reference, pools: dict[str, dict[str, Any]], **group: Any) -> None:
    generation = twin.group.generation
    config = document(pools, **{"lease_ms": LEASE_MS, "liveness_ms": LIVENESS_MS, **group})
    answer = twin.configure(config, expected_generation=generation, actor="test", nonce=f"n{generation}")
    assert answer.status == "APPLIED", answer


def submit(twin: Reference, request_id: str, pool: str = "a", *, now: int = NOW, **fields: Any) -> Any:
    return twin.submit(replace(submission(request_id, pool, 1), **fields), now)


def claim(twin: Reference, want: int = 1, *, now: int = NOW, gateway: str = "g", nonce: str = "") -> r.Claim:
    return twin.claim(Claimant(gateway, f"{gateway}/group", nonce or f"claim-{twin.group.fence}-{now}"), want, now)


def settle(
    twin: Reference,
    *leases: r.Lease,
    outcome: r.Outcome = r.Outcome.SUCCEEDED,
    now: int = NOW,
    nonce: str = "",
    gateway: str = "g",
    **went: Any,
) -> tuple[str, ...]:
    """Settle leases of one gateway alike; `went` are fields of the settlements. Claims nothing."""
    items = [r.Settlement(request_id=e.request_id, fence=e.fence, outcome=outcome, **went) for e in leases]
    named = nonce or f"settle-{twin.group.fence}-{len(twin.group.ended)}-{now}-{leases[0].fence}"
    return twin.settle(Claimant(gateway, f"{gateway}/group", named), 0, items, now).answers


def fail(twin: Reference, *leases: r.Lease, now: int = NOW, **went: Any) -> tuple[str, ...]:
    """Let leases fail as when nothing listens at the endpoint."""
    said = {"error_type": "endpoint_unreachable", "retryable": True, "verdict": r.Verdict.FAILURE} | went
    return settle(twin, *leases, outcome=r.Outcome.FAILED, now=now, **said)


def ids(claimed: r.Claim) -> list[str]:
    return [lease.request_id for lease in claimed.leases]


def endings(twin: Reference) -> list[tuple[str, str]]:
    return [(ended.request_id, ended.ending) for ended in twin.group.ended]


def beat(*held: tuple[str, int], nonces: tuple[str, ...] = ()) -> r.Heartbeat:
    return r.Heartbeat(gateway_id="g", host="h", pid=1, version="1", slots=8, held=held, nonces=nonces)

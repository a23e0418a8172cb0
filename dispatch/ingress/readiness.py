"""`GET /readyz`: whether this gateway takes calls, and why not."""

from __future__ import annotations

import msgspec

from dispatch.gateway.status import GatewayStatus


def readiness(status: GatewayStatus) -> tuple[bool, bytes]:
    """Return whether calls can be served now, and the JSON that says so (`ready`, `reason` and the status)."""
    reason = _reason(status)
    facts = {
        "ready": reason is None,
        "reason": reason,
        "gateway_id": status.gateway_id,
        "fabric_group": status.fabric_group,
        "draining": status.draining,
        "slots": status.slots,
        "in_flight": status.in_flight,
    }
    return reason is None, msgspec.json.encode(facts)


def _reason(status: GatewayStatus) -> str | None:
    if not status.enabled:
        return "queueing is disabled in this process"
    if not status.running:
        return "the gateway does not run"
    if status.draining:
        return "the gateway is shutting down"
    if not status.fabric_reachable:
        return f"the fabric group cannot be used: {status.fabric_problem or 'Valkey does not answer'}"
    return None

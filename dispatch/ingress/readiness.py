"""`GET /readyz`: whether this gateway takes calls, and why not."""

from __future__ import annotations

import msgspec

from dispatch.gateway.status import GatewayStatus
from dispatch.ingress.state import Host


async def readiness(gateway: Host, within_s: float) -> tuple[bool, bytes]:
    """Return whether calls can be served now, and the JSON that says so (`ready`, `reason` and the status).

    Valkey is asked, so that an idle gateway does not call itself ready while its server stands still.
    """
    status = gateway.status()
    reason = _reason(status)
    if reason is None and (problem := await gateway.check(within_s)):
        reason = f"the fabric group cannot be used: {problem}"
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

"""What a gateway says about itself, for readiness and status pages."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    """One moment of one gateway.

    `running`: it was started and has not ended. `fabric_since` (seconds since the epoch): since when the fabric group
    has been reachable, or not; `fabric_problem` says why not. `heartbeat_age_s`: how long ago the newest confirmed
    heartbeat was sent, None = there was none. `settled` counts answers to settles by word.
    """

    gateway_id: str
    fabric_group: str
    enabled: bool
    running: bool
    draining: bool = False
    slots: int = 0
    in_flight: int = 0
    fabric_reachable: bool = False
    fabric_since: float | None = None
    fabric_problem: str = ""
    heartbeat_age_s: float | None = None
    settled: dict[str, int] = field(default_factory=dict)

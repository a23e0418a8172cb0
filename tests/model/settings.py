"""A group's config as the twin knows it: what scheduling and the life cycle depend on, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

DEFAULT_POOL = "default"
DEFAULT_TOTAL = 8
ATTEMPTS = {"at_most_once": 1, "at_least_once": 3}
"""`max_attempts` of a pool that names none, by delivery mode."""
RETRY_ON = frozenset({"unreachable", "disconnected", "overloaded"})


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """One pool's config."""

    pool_id: str
    display_name: str = ""
    quantum: int = 1
    min_concurrent: int = 0
    max_concurrent: int | None = None
    max_burst_per_visit: int | None = None
    enabled: bool = True
    endpoint: str = ""
    delivery: str = "at_most_once"
    max_attempts: int = 0
    """0 in a document without it: by delivery mode."""
    retry_on: frozenset[str] = RETRY_ON
    retry_base_ms: int = 500
    retry_cap_ms: int = 30_000
    on_open: str = "queue"
    priority_ageing_ms: int = 10_000
    max_queue_depth: int = 10_000
    max_queue_bytes: int = 268_435_456
    default_timeout_ms: int = 600_000
    max_timeout_ms: int = 3_600_000

    @classmethod
    def from_document(cls, document: dict[str, Any], default_endpoint: str) -> Self:
        """Read a pool's document; a blank endpoint is the group's default one."""
        settings = cls(**document)
        return replace(
            settings,
            endpoint=settings.endpoint or default_endpoint,
            retry_on=frozenset(settings.retry_on),
            max_attempts=settings.max_attempts or ATTEMPTS[settings.delivery],
        )


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """One endpoint's config."""

    endpoint_id: str
    url: str
    max_concurrent: int | None = None
    breaker_failures: int = 5
    open_ms: int = 30_000
    close_after: int = 3
    probe_timeout_ms: int = 60_000
    gate: str = "none"
    gate_waiting_metric: str = ""
    gate_token_metric: str = ""
    gate_target: int = 3
    gate_token_ms: int = 150
    gate_poll_ms: int = 1_000
    gate_stale_ms: int = 5_000
    gate_fail: str = "open"


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """A whole config; pools and endpoints in document order."""

    policy: str = "drr"
    total_concurrent_dispatch: int = DEFAULT_TOTAL
    default_endpoint: str = ""
    max_queued: int = 100_000
    max_payload_bytes: int = 16_777_216
    cost_min: int = 1
    cost_max: int = 16
    lease_ms: int = 30_000
    liveness_ms: int = 30_000
    retention_ms: int = 60_000
    reply_ttl_ms: int = 300_000
    retry_budget_percent: int = 20
    retry_budget_min_per_s: int = 3
    hold_max_ms: int = 60_000
    idempotency_ttl_ms: int = 86_400_000
    dead_kept: int = 1_000
    dead_ttl_ms: int = 604_800_000
    pools: tuple[PoolSettings, ...] = ()
    endpoints: tuple[EndpointSettings, ...] = ()

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Read a config document, every default filled in.

        Raises:
            TypeError: it has a field the twin does not know.
        """
        plain = {name: value for name, value in document.items() if name not in {"pools", "endpoints"}}
        plain["total_concurrent_dispatch"] = plain.get("total_concurrent_dispatch") or DEFAULT_TOTAL
        endpoints = tuple(EndpointSettings(**endpoint) for endpoint in document.get("endpoints", ()))
        names = [endpoint.endpoint_id for endpoint in endpoints]
        if not plain.get("default_endpoint"):
            plain["default_endpoint"] = names[0] if names and "default" not in names else "default"
        listed = list(document.get("pools", ()))
        if not any(pool["pool_id"] == DEFAULT_POOL for pool in listed):
            listed.append({"pool_id": DEFAULT_POOL})
        pools = tuple(PoolSettings.from_document(pool, plain["default_endpoint"]) for pool in listed)
        return cls(**plain, pools=pools, endpoints=endpoints)

    def problems(self) -> list[str]:
        """Say what does not fit together (types and bounds of single fields are not the twin's business)."""
        found = []
        names = {endpoint.endpoint_id for endpoint in self.endpoints}
        for pool in self.pools:
            if pool.max_concurrent is not None and pool.min_concurrent > pool.max_concurrent:
                found.append(f"{pool.pool_id}: min_concurrent above max_concurrent")
            if pool.endpoint != self.default_endpoint and pool.endpoint not in names:
                found.append(f"{pool.pool_id}: no endpoint {pool.endpoint}")
            if pool.default_timeout_ms > pool.max_timeout_ms:
                found.append(f"{pool.pool_id}: default_timeout_ms above max_timeout_ms")
            if pool.retry_base_ms > pool.retry_cap_ms:
                found.append(f"{pool.pool_id}: retry_base_ms above retry_cap_ms")
        if sum(pool.min_concurrent for pool in self.pools if pool.enabled) > self.total_concurrent_dispatch:
            found.append("sum of min_concurrent above total_concurrent_dispatch")
        if self.cost_min > self.cost_max:
            found.append("cost_min above cost_max")
        return found

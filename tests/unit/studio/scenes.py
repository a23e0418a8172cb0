"""Views for the rules' tests: a quiet group, and what is different in it."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatch.fabric.view import (
    EndingRow,
    EndpointRow,
    FabricView,
    GatewayRow,
    GroupRow,
    PoolRow,
    ReaderRow,
    RequestRow,
)
from dispatch.studio.findings import Finding, Situation
from dispatch.studio.trend import trend_of
from dispatch.studio.verdict import findings

NOW = 1_700_000_000_000


def group(**facts: Any) -> GroupRow:
    usual = {
        "server_ms": NOW, "policy": "drr", "total_concurrent_dispatch": 8, "lease_ms": 30_000, "pending": 0,
        "in_flight": 0, "delayed": 0, "cost_max": 16, "readers": (ReaderRow(name="history", lag=0, last_ms=NOW),),
    }  # fmt: skip
    return GroupRow(**usual | facts)


def pool(name: str = "vision", **facts: Any) -> PoolRow:
    usual = {
        "pool_id": name, "quantum": 1, "endpoint_id": "vllm", "pending": 0, "in_flight": 0, "max_queue_depth": 100,
        "pending_bytes": 0, "max_queue_bytes": 1_000, "submitted": 0, "launched": 0, "cost_served": 0,
        "delivery": "at_most_once",
    }  # fmt: skip
    return PoolRow(**usual | facts)


def endpoint(name: str = "vllm", **facts: Any) -> EndpointRow:
    usual = {
        "endpoint_id": name, "url": "http://user:secret@vllm.prod:8000/v1?key=secret", "in_flight": 0,
        "max_concurrent": 16, "breaker": "closed", "failures_in_a_row": 0, "breaker_failures": 5, "close_after": 3,
    }  # fmt: skip
    return EndpointRow(**usual | facts)


def gateway(name: str = "gw-a", **facts: Any) -> GatewayRow:
    usual = {"gateway_id": name, "slots": 8, "beat_ms": NOW - 500, "version": "1.0", "in_flight": 0, "draining": False}
    return GatewayRow(**usual | facts)


def running(request_id: str, age_ms: int, **facts: Any) -> RequestRow:
    usual = {
        "request_id": request_id, "pool_id": "vision", "gateway_id": "gw-a", "endpoint_id": "vllm",
        "claimed_ms": NOW - age_ms, "lease_until_ms": NOW + 11_000,
    }  # fmt: skip
    return RequestRow(**usual | facts)


def ended(number: int, ending: str = "succeeded", **facts: Any) -> EndingRow:
    usual = {
        "record_id": f"{number}-0", "request_id": f"r{number}", "ending": ending, "pool": "vision", "producer": "app",
        "gateway": "gw-a", "endpoint": "vllm", "claimed_ms": NOW - 2_000, "ended_ms": NOW - 1_000,
    }  # fmt: skip
    return EndingRow(**usual | facts)


def view(**parts: Any) -> FabricView:
    usual: dict[str, Any] = {
        "name": "prod", "server_ms": NOW, "read_ms": NOW, "group": group(), "pools": (pool(),),
        "endpoints": (endpoint(),), "gateways": (gateway(),), "running": (), "endings": (), "events": (),
    }  # fmt: skip
    return FabricView(**usual | parts)


def later(before: FabricView, ms: int, **parts: Any) -> FabricView:
    """The same group, `ms` later."""
    return msgspec.structs.replace(before, server_ms=before.server_ms + ms, read_ms=before.read_ms + ms, **parts)


def found(*views: FabricView, **facts: Any) -> list[Finding]:
    """What is found in the last of the views."""
    return findings(Situation(view=views[-1], trend=trend_of(views), **facts))


def the_one(*views: FabricView, **facts: Any) -> Finding:
    rows = found(*views, **facts)
    assert len(rows) == 1, rows
    return rows[0]

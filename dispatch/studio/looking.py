"""What several rules ask of a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from dispatch.fabric.view import EndpointRow, FabricView, GatewayRow, PoolRow
from dispatch.studio.words import duration, plural

_LEASE_MS = 30_000
_NAMED = 3

TROUBLES: Mapping[str, str] = {
    "endpoint_unreachable": "cannot be reached",
    "endpoint_timeout": "does not answer in time",
    "endpoint_disconnected": "breaks off its answers",
    "endpoint_unreadable": "answers unreadably",
    "endpoint_failed": "answers with errors",
    "endpoint_unauthorized": "refuses the configured key",
}
"""What is wrong with an endpoint, by the error type of its failures."""


def waiting_pools(view: FabricView, endpoint_id: str | None = None) -> list[PoolRow]:
    """Return the pools that wait (for this endpoint) and were not stopped by a person, the fullest first."""
    rows = [
        row
        for row in view.pools or ()
        if (row.pending or 0) > 0 and row.paused is None and endpoint_id in {None, row.endpoint_id}
    ]
    return sorted(rows, key=lambda row: -(row.pending or 0))


def names_of(pools: Sequence[PoolRow]) -> str:
    """Return the first pool's name, and how many more there are."""
    first, more = pools[0].pool_id, len(pools) - 1
    return first if not more else f"{first} and {plural(more, 'more pool', 'more pools')}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list that does not grow beyond a line."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def covered(pools: Sequence[PoolRow]) -> tuple[str, ...]:
    """Return the pools as subjects of findings."""
    return tuple(f"pool:{row.pool_id}" for row in pools)


def lease_ms(view: FabricView) -> int:
    """Return how long leases of the group are; its default when that is not known."""
    return (view.group.lease_ms if view.group else None) or _LEASE_MS


def is_live(view: FabricView, gateway: GatewayRow) -> bool:
    """Say whether the gateway's last heartbeat is younger than a lease."""
    return gateway.beat_ms is not None and view.server_ms - gateway.beat_ms < lease_ms(view)


def live_gateways(view: FabricView) -> list[GatewayRow] | None:
    """Return the gateways that live; None = not known."""
    return None if view.gateways is None else [row for row in view.gateways if is_live(view, row)]


def ago(view: FabricView, ms: int | None) -> str:
    """Return how long ago a moment of the server was."""
    return "an unknown time" if ms is None else duration(max(1, view.server_ms - ms))


def address_of(endpoint: EndpointRow | None) -> str:
    """Return the endpoint's address without user, password and query."""
    if endpoint is None or not endpoint.url:
        return "its address"
    parts = urlsplit(endpoint.url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # what an operator typed
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def slots_free(endpoint: EndpointRow) -> int | None:
    """Return how many more requests may run on the endpoint; None = it has no cap."""
    if endpoint.max_concurrent is None:
        return None
    return max(0, endpoint.max_concurrent - (endpoint.in_flight or 0))


def quoted(reason: str) -> str:
    """Return a person's reason as the end of a clause; nothing when none was given."""
    return f' "{reason}"' if reason else ""

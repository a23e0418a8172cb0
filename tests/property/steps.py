"""Short steps for histories that are written by hand."""

from __future__ import annotations

from typing import Any

from dispatch.fabric import records as r
from tests.model.bench import submission
from tests.property.history import History


def submit(history: History, pool: str, *costs: int, producer: str = "u") -> list[str]:
    """Queue requests of these costs. Returns their ids."""
    made = []
    for cost in costs:
        made.append(history.new_id())
        history.submit(submission(made[-1], pool, cost, producer))
    return made


def settle(history: History, outcome: r.Outcome = r.Outcome.SUCCEEDED, *, pool: str = "", want: int = 0) -> None:
    """Settle what g0 holds (of one pool)."""
    leases = [lease for lease in history.known["g0"].values() if pool in {"", lease.pool_id}]
    items = [r.Settlement(request_id=lease.request_id, fence=lease.fence, outcome=outcome) for lease in leases]
    history.settle("g0", items, want)


def launched(history: History) -> list[str]:
    """Return the pools of what runs, in launch order."""
    return [request.pool_id for request in sorted(history.twin.group.leased(), key=lambda request: request.fence)]


def with_pool(document_: dict[str, Any], name: str, **fields: Any) -> dict[str, Any]:
    pools = [pool | fields if pool["pool_id"] == name else pool for pool in document_["pools"]]
    return {**document_, "pools": pools}

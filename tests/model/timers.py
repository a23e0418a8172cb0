"""What time does between calls, noticed by the next call that looks: retries come due, endpoints become free again.

Each is done in the order in which it came due. A request whose retry is due waits again in its place by arrival, not
at the end: it has stood in the line for it. Pools that were parked on an endpoint come back as after a freed slot.
"""

from __future__ import annotations

from tests.model import breaker, flows, line
from tests.model.records import Endpoint, Group, Request


def run(group: Group) -> None:
    """Do what has come due."""
    retries = [(request.retry_ms, f"retry:{request.id}", request) for request in group.delayed()]
    freed = [
        (_freed_ms(endpoint, group.now), f"endpoint:{endpoint.name}", endpoint)
        for endpoint in group.endpoints.values()
        if endpoint.was_blocked and not line.endpoint_blocked(group, endpoint)
    ]
    due = sorted([item for item in [*retries, *freed] if item[0] <= group.now], key=lambda item: item[:2])
    for _, _, subject in due:
        if isinstance(subject, Request):
            _wait_again(group, subject)
        else:
            line.use_room(group, subject)


def looked(group: Group) -> None:
    """Note how the endpoints stand after a call that looked at the clock."""
    for endpoint in group.endpoints.values():
        endpoint.was_blocked = bool(line.endpoint_blocked(group, endpoint))


def next_ms(group: Group) -> int | None:
    """Return the next moment at which something waiting may launch by time alone."""
    found = [request.retry_ms for request in group.delayed()]
    for endpoint in group.endpoints.values():
        moment = frees_ms(group, endpoint, group.now)
        found += [] if moment is None else [moment]
    return min(found, default=None)


def frees_ms(group: Group, endpoint: Endpoint, now: int) -> int | None:
    """Return when time alone will bring back who waits for the endpoint; None if nobody does, or something else will.

    Where a pool that came back has the turn, it stands in the line, and whoever claims next finds out what holds it up.
    """
    found = line.waiting(group, endpoint)
    if endpoint.holder and not any(line.below_minimum(group, pool) for pool in found):
        return None
    return breaker.frees_itself(endpoint, group.endpoint_in_flight(endpoint.name), now) if found else None


def overdue(group: Group, now: int) -> bool:
    """Whether something has come due that no call has noticed yet."""
    if any(request.retry_ms <= now for request in group.delayed()):
        return True
    return any(
        endpoint.was_blocked and not breaker.block_reason(endpoint, group.endpoint_in_flight(endpoint.name), now)
        for endpoint in group.endpoints.values()
    )


def _freed_ms(endpoint: Endpoint, now: int) -> int:
    return max((moment for moment in breaker.changes(endpoint) if moment <= now), default=now)


def _wait_again(group: Group, request: Request) -> None:
    pool = group.pools[request.pool_id]
    request.state, request.retry_ms = "queued", 0
    flows.give_back(pool, request)
    line.gained_work(group, pool)

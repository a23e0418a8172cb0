"""A lease is settled: its request ends, goes back unexecuted, or waits for another attempt. DESIGN sections 5 and 6."""

from __future__ import annotations

from dispatch.fabric import records as r
from tests.model import flows, lifecycle, line, retries
from tests.model.breaker import Said
from tests.model.endings import Verdict, awaited, finish, in_grace
from tests.model.records import Group, Request


def held(group: Group, gateway: str, request_id: str, fence: int) -> Request | None:
    """Return the request if the gateway holds its lease now."""
    request = group.requests.get(request_id)
    if request is None or request.state != "leased" or (request.gateway, request.fence) != (gateway, fence):
        return None
    return request if group.leases[request.id] >= group.now or in_grace(group, group.now) else None


def settle(group: Group, gateway: str, item: r.Settlement, now: int) -> str:
    """End a lease, or let its request wait again, if the gateway still holds it. Returns the word for it."""
    request = held(group, gateway, item.request_id, item.fence)
    if request is None:
        return "LEASE_LOST"
    said = Said(item.verdict, item.hold_ms, item.error_type)
    ending = str(item.outcome.value)
    if item.outcome == r.Outcome.RELEASE and not request.chunks:
        if request.cancelled_by:
            ending = "cancelled"
        elif now >= request.deadline_ms:
            ending = "expired"
        else:
            request.attempt -= 1
            lifecycle.give_back(group, request, said)
            return "REQUEUED"
    elif item.outcome in {r.Outcome.LOST, r.Outcome.RELEASE}:
        ending = lifecycle.after_loss(group, request, now)
        if not ending:
            lifecycle.run_again(group, request)
            return "REQUEUED"
    elif due_ms := retries.due_ms(group, request, item):
        retries.note_try(group, request, item.status, item.error_type)
        line.free_slot(group, request, said)
        lifecycle.unclaim(request, "delayed", due_ms)
        return "RETRY"
    heard = awaited(group, request, now)
    dropped = not heard and ending in {"succeeded", "failed"}
    finish(group, request, Verdict("reply_dropped" if dropped else ending, ending), now)
    _settle_cost(group, request, item.actual_cost_units)
    line.free_slot(group, request, said)
    return "OK" if heard else "PRODUCER_GONE"


def _settle_cost(group: Group, request: Request, actual: int | None) -> None:
    """Let pool and flow pay, or get back, what the request cost more or less than it was charged.

    Debt has no floor and is kept by an empty pool; a refund to an empty pool only pays debt.
    """
    if actual is None:
        return
    pool, limits = group.pools[request.pool_id], group.settings
    difference = max(limits.cost_min, min(actual, limits.cost_max)) - request.units
    if difference == 0:
        return
    pool.cost_served += difference
    pool.deficit -= difference
    if pool.place == "idle":
        pool.deficit = min(pool.deficit, 0)
    flows.settle(pool, request.flow, difference)
    line.head_changed(group, pool)
    line.restart_pass(group)

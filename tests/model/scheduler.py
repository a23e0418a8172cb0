"""Admission: which waiting requests leave their pools now. DESIGN section 6.

Room in the group is asked first: without it nothing is moved and nothing credited. Then pools of the kept list, one
launch each in turn; then the pool at the front of the line. There dead heads are ended, the visit gets its quantum
(once, with the virtual rounds it has due; a blocked pool opens no visit and gets none), a visit that cannot pay its
head ends, a pool that is blocked is parked, and what is left launches. One call is bounded in dead heads and in barren
visits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil

from dispatch.fabric.schema import LIMITS
from tests.model import breaker, flows, line, retries
from tests.model.endings import Verdict, awaited, finish
from tests.model.records import Group, Pool, Request


@dataclass(frozen=True)
class Claimant:
    """Who claims, and the nonce of the call."""

    gateway: str
    dispatcher: str
    nonce: str


@dataclass
class Round:
    """One claim call: what it made so far and what is left of its bounds."""

    group: Group
    claimant: Claimant
    now: int
    made: list[Request] = field(default_factory=list)
    dead_left: int = LIMITS["dead_heads_max"]
    barren_left: int = LIMITS["barren_visits_max"]
    spent: bool = False
    """More dead heads stand in the way than one call may end."""


def claim(group: Group, claimant: Claimant, want: int, now: int) -> tuple[list[Request], bool]:
    """Launch up to `want` requests. Returns them, and whether the caller should call again at once."""
    call = Round(group, claimant, now)
    full = False
    while len(call.made) < want and call.barren_left and not call.spent:
        if len(group.leases) >= group.settings.total_concurrent_dispatch:
            full = True
            break
        if group.kept:
            _serve_kept(call, group.pools[group.kept[0]])
        elif pool := line.front(group):
            _close_pass(group, pool)
            _visit(call, pool)
        else:
            break
    if full and (pool := line.front(group)):
        line.skip(pool, "protected" if group.kept else "global_capacity")
    stopped = call.spent or not call.barren_left
    again = want > 0 and not full and stopped and len(call.made) < want
    if len(call.made) == want or again:
        group.sleepers.discard(claimant.gateway)
    else:
        group.sleepers.add(claimant.gateway)
    return call.made, again


def units(group: Group, request: Request) -> int:
    """Return what a request counts for under the bounds in force now."""
    return max(group.settings.cost_min, min(request.cost, group.settings.cost_max))


def own_fate(request: Request, now: int, *, launches: bool = True) -> str:
    """Return why an entry must not launch, its producer aside: `tombstone`, an ending, or "" when it may.

    `launches`: it will be if it is well. Only then is its body looked at.
    """
    if request.state != "queued":
        return "tombstone"
    if now >= request.waits_until_ms:
        return "expired"
    return "malformed" if request.envelope_lost or (launches and request.body_lost) else ""


def fate(group: Group, request: Request, now: int, *, launches: bool) -> str:
    """Return why an entry must not launch, or "" when it may."""
    return own_fate(request, now, launches=launches) or ("" if awaited(group, request, now) else "producer_gone")


def affordable(group: Group, pool: Pool, head: Request) -> bool:
    """Whether the open visit goes on with this head."""
    burst = pool.settings.max_burst_per_visit
    return units(group, head) <= pool.deficit and (burst is None or pool.launches < burst)


def _end_head(call: Round, pool: Pool, ending: str) -> None:
    head = flows.head(pool)
    assert head is not None
    flows.pop(pool, head, None)
    if ending == "malformed":
        line.skip(pool, "malformed_head")
    if ending != "tombstone":
        finish(call.group, head, Verdict(ending), call.now)


def _live_head(call: Round, pool: Pool, launches: Callable[[Request], bool]) -> Request | None:
    """Return the pool's first request that may launch; dead ones before it are ended, within the call's bound.

    `launches` says of a head whether it will be launched if it is well.
    """
    while head := flows.head(pool):
        ending = fate(call.group, head, call.now, launches=launches(head))
        if not ending:
            return head
        if not call.dead_left:
            call.spent = True
            return None
        call.dead_left -= 1
        _end_head(call, pool, ending)
    return None


def _launch(call: Round, pool: Pool, head: Request) -> int:
    """Pop the head and lease it. Returns its units."""
    group, cost = call.group, units(call.group, head)
    flows.pop(pool, head, cost)
    group.fence += 1
    head.state, head.fence, head.attempt = "leased", group.fence, head.attempt + 1
    head.gateway, head.claim_nonce = call.claimant.gateway, call.claimant.nonce
    head.endpoint, head.claimed_ms, head.units = pool.settings.endpoint, call.now, cost
    head.queue_until_ms, head.due_ms = None, head.deadline_ms if head.queue_until_ms else head.due_ms
    group.leases[head.id] = call.now + group.settings.lease_ms
    if head.attempt == 1:
        retries.count_first(group)
    breaker.launched(group, group.endpoint(head.endpoint), head)
    pool.launched += 1
    pool.cost_served += cost
    pool.reason = ""
    call.made.append(head)
    return cost


def _after_launch(group: Group, pool: Pool) -> None:
    line.restart_pass(group)
    next_head = flows.head(pool)
    if not pool.live or next_head is None:
        line.leave(group, pool)
    elif group.fifo:
        pool.arrival = line.arrival(pool)
        line.turn_over(group, pool)
    elif pool.open and not affordable(group, pool, next_head):
        line.end_visit(group, pool)


def _serve_kept(call: Round, pool: Pool) -> None:
    """Serve the first of the kept list: a launch on a protected slot needs no credit and costs at most down to -M."""
    group = call.group
    stays = False
    if pool.place == "line" and line.below_minimum(group, pool):
        reason = line.blocked(group, pool)
        head = _live_head(call, pool, lambda _: not reason)
        if call.spent:
            return
        if head is None:
            line.lost_work(group, pool)
        elif reason:
            line.park(group, pool, reason)
        else:
            cost = _launch(call, pool, head)
            floor = min(pool.deficit, -group.settings.cost_max)
            pool.deficit = max(pool.deficit - cost, floor)
            _after_launch(group, pool)
            stays = pool.place == "line" and line.below_minimum(group, pool)
    group.kept.remove(pool.name)
    if stays:
        group.kept.append(pool.name)


def _visit(call: Round, pool: Pool) -> None:
    """Visit the front of the line: one launch, or one step towards the next."""
    group = call.group
    reason = line.blocked(group, pool)
    head = _live_head(call, pool, lambda entry: not reason and (group.fifo or _will_pay(group, pool, entry)))
    if call.spent:
        return
    if head is None:
        line.lost_work(group, pool)
        return
    if group.fifo and pool.arrival != head.seq:  # dead heads went: another pool may be first now
        pool.arrival = head.seq
        line.turn_over(group, pool)
        return
    if not group.fifo and (pool.open or not reason):  # a pool that is blocked gets no quantum
        _touch(group, pool)
        if not affordable(group, pool, head):
            call.barren_left -= 1
            _barren(group, pool, head)
            return
    if reason:
        line.park(group, pool, reason)
        return
    cost = _launch(call, pool, head)
    if not group.fifo:
        pool.deficit -= cost
        pool.launches += 1
    _after_launch(group, pool)


def _touch(group: Group, pool: Pool) -> None:
    """Collect due rounds, and open the visit if none is open: one quantum a visit."""
    line.collect(group, pool)
    if not pool.open:
        pool.open, pool.launches = True, 0
        pool.deficit += pool.settings.quantum


def _will_pay(group: Group, pool: Pool, head: Request) -> bool:
    """Whether the pool can pay this head in the visit that is open, or in the one that will be opened."""
    touched = replace(pool)
    _touch(group, touched)
    return affordable(group, touched, head)


def _barren(group: Group, pool: Pool, head: Request) -> None:
    """End a visit that launched nothing for want of credit, and note how many more such the pool needs."""
    line.skip(pool, "insufficient_credit")
    if group.pass_limit is None:
        group.pass_limit, group.pass_visits = group.turn, None
    if not line.blocked(group, pool):
        visits = max(1, ceil((units(group, head) - pool.deficit) / pool.settings.quantum))
        group.pass_visits = min(visits, group.pass_visits or visits)
    elif line.endpoint_blocked(group, group.endpoint(pool.settings.endpoint)):
        group.pass_held.add(pool.settings.endpoint)
    line.end_visit(group, pool)


def _close_pass(group: Group, first: Pool) -> None:
    """When barren visits have gone once round: add the rounds that launch nothing, one less than the fewest needed.

    None is added if an endpoint that held up a pool meanwhile is free by now: that pool was not asked.
    """
    if group.fifo or group.pass_limit is None or line.rank(group, first)[0] < group.pass_limit:
        return
    if all(line.endpoint_blocked(group, group.endpoint(name)) for name in group.pass_held):
        group.round += (group.pass_visits or 1) - 1
    line.restart_pass(group)

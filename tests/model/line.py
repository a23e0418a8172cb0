"""Who stands in the line, who is parked, and how they come back.

The rules, from DESIGN section 6:

* A pool takes the next turn number when it gets backlog and when its visit ends; the lowest turn is visited. Under
  policy fifo the rank is the arrival number of the pool's first entry instead.
* A pool that is reached and cannot launch (its cap, a pause, its endpoint) is parked: it keeps turn, deficit and open
  visit and comes back at that turn. Of the pools that wait for one endpoint the lowest turn comes back alone (it is the
  holder); when its turn is over and there is room, the next. Those below their minimum come back first, all at once.
* A pool that empties leaves: credit is forgotten, debt stays.
* Virtual rounds belong to pools that stand in the line: they are collected at the next touch and when the pool leaves
  the line; what goes by outside is not credited.
* A launch, a park, a return, and a slot that unblocks its endpoint or pool restart the pass; a join extends it.
"""

from __future__ import annotations

from tests.model import breaker, flows
from tests.model.records import Endpoint, Group, Pool, Request


def rank(group: Group, pool: Pool) -> tuple[int, str]:
    """Return the pool's place in the line or among an endpoint's waiting ones; the lowest is first, ties by name."""
    place = pool.arrival if group.fifo else pool.turn
    assert place is not None, f"{pool.name} has work and no rank"
    return place, pool.name


def front(group: Group) -> Pool | None:
    """Return the pool to visit."""
    in_line = [pool for pool in group.pools.values() if pool.place == "line"]
    return min(in_line, key=lambda pool: rank(group, pool), default=None)


def at_cap(group: Group, pool: Pool) -> bool:
    limit = pool.settings.max_concurrent
    return limit is not None and group.pool_in_flight(pool.name) >= limit


def endpoint_blocked(group: Group, endpoint: Endpoint) -> str:
    """Return why nothing may be launched on the endpoint, as a skip reason; "" when something may."""
    return breaker.block_reason(endpoint, group.endpoint_in_flight(endpoint.name), group.now)


def blocked(group: Group, pool: Pool) -> str:
    """Return why the pool may not launch although it can pay, as a skip reason; "" when it may."""
    if pool.state == "paused":
        return "paused"
    if at_cap(group, pool):
        return "lane_capacity"
    return endpoint_blocked(group, group.endpoint(pool.settings.endpoint))


def endpoint_open(group: Group, pool: Pool) -> bool:
    """Whether the breaker of the pool's endpoint lets nothing through."""
    return endpoint_blocked(group, group.endpoint(pool.settings.endpoint)) == "endpoint_open"


def below_minimum(group: Group, pool: Pool) -> bool:
    """Whether protected slots of the pool are unused. Policy fifo knows no protection."""
    return not group.fifo and group.pool_in_flight(pool.name) < pool.settings.min_concurrent


def skip(pool: Pool, reason: str) -> None:
    """Count a skip and remember why the pool waits."""
    pool.skips[reason] += 1
    pool.reason = reason


def arrival(pool: Pool) -> int:
    """Return the arrival number that ranks the pool under policy fifo: its head's.

    A head that has ended may hide an older one behind it if the pool has keys or levels: 0, so that it is looked at.
    """
    head = flows.head(pool)
    assert head is not None, f"{pool.name} has a place and no entry"
    return 0 if flows.mixed(pool) and pool.tombstones else head.seq


def next_turn(group: Group) -> int:
    group.turn += 1
    return group.turn - 1


def restart_pass(group: Group) -> None:
    group.pass_limit = group.pass_visits = None
    group.pass_held.clear()


def collect(group: Group, pool: Pool) -> None:
    """Credit the virtual rounds since the pool's last touch."""
    pool.deficit += pool.settings.quantum * (group.round - pool.mark)
    pool.mark = group.round


def consider_kept(group: Group, pool: Pool) -> None:
    """List the pool for protected slots if it may launch on one."""
    if pool.name not in group.kept and pool.place == "line" and below_minimum(group, pool):
        group.kept.append(pool.name)


def enter(group: Group, pool: Pool) -> None:
    """Give a pool that has got backlog its place, at the end."""
    pool.place, pool.turn, pool.mark = "line", next_turn(group), group.round
    pool.arrival = arrival(pool)
    if group.pass_limit is not None:
        group.pass_limit = group.turn
    consider_kept(group, pool)


def come_back(group: Group, pool: Pool) -> None:
    """Bring a parked pool back at its turn."""
    pool.place, pool.parked, pool.reason, pool.mark = "line", "", "", group.round
    pool.arrival = arrival(pool)
    restart_pass(group)
    consider_kept(group, pool)


def waiting(group: Group, endpoint: Endpoint) -> list[Pool]:
    """Return the pools that are parked on the endpoint."""
    return [pool for pool in group.pools.values() if pool.on_endpoint and pool.settings.endpoint == endpoint.name]


def use_room(group: Group, endpoint: Endpoint) -> None:
    """Bring back who may use room on the endpoint: all below their minimum, and one other if nobody has its turn."""
    if endpoint_blocked(group, endpoint):
        return
    parked = sorted(waiting(group, endpoint), key=lambda pool: rank(group, pool))
    for pool in [pool for pool in parked if below_minimum(group, pool)]:
        parked.remove(pool)
        come_back(group, pool)
    if parked and not endpoint.holder:
        endpoint.holder = parked[0].name
        come_back(group, parked[0])


def turn_over(group: Group, pool: Pool) -> None:
    """End the pool's turn on its endpoint, so that the next may come."""
    endpoint = group.endpoint(pool.settings.endpoint)
    if endpoint.holder == pool.name:
        endpoint.holder = ""
    use_room(group, endpoint)


def park(group: Group, pool: Pool, reason: str) -> None:
    """Take a pool that cannot launch out of the line."""
    collect(group, pool)
    pool.place, pool.parked = "parked", reason
    head_changed(group, pool)
    skip(pool, reason)
    restart_pass(group)
    turn_over(group, pool)


def forget_credit(pool: Pool) -> None:
    """Close the visit of a pool without work: credit goes, debt stays."""
    pool.deficit, pool.open, pool.launches = min(pool.deficit, 0), False, 0


def leave(group: Group, pool: Pool) -> None:
    """Take an empty pool out, and the tombstones with it: nobody would come by to drop them."""
    if pool.place == "line":
        collect(group, pool)
    forget_credit(pool)
    flows.clear(pool)
    pool.place, pool.parked, pool.turn, pool.reason = "idle", "", None, ""
    turn_over(group, pool)


def end_visit(group: Group, pool: Pool) -> None:
    """End the visit: credit is kept up to one greatest cost; the pool goes to the end."""
    pool.deficit, pool.open, pool.launches = min(pool.deficit, group.settings.cost_max), False, 0
    pool.turn = next_turn(group)
    turn_over(group, pool)


def head_changed(group: Group, pool: Pool) -> None:
    """Rank the pool anew: its head is another, but it was not visited.

    In the line it is only moved forward: a younger head is found at the visit, which passes the endpoint's turn on.
    """
    if group.fifo and pool.place == "line":
        pool.arrival = min(arrival(pool), pool.arrival or 0)
    elif group.fifo and pool.place == "parked":
        pool.arrival = arrival(pool)


def gained_work(group: Group, pool: Pool) -> None:
    """Place a pool in which a request began to wait."""
    if pool.place == "idle":
        enter(group, pool)
    elif group.fifo and (pool.returned or flows.mixed(pool)):
        # What was given back may be older than the entry that ranked the pool, and older than the holder's; a better
        # level or another key may make a younger one the head.
        head_changed(group, pool)
        if pool.on_endpoint and not endpoint_blocked(group, group.endpoint(pool.settings.endpoint)):
            come_back(group, pool)


def lost_work(group: Group, pool: Pool) -> None:
    """Take the pool out if nothing waits in it any more; what is left may have another head."""
    if not pool.live and pool.place != "idle":
        leave(group, pool)
    elif flows.mixed(pool):
        head_changed(group, pool)


def free_slot(group: Group, request: Request, said: breaker.Said) -> None:
    """Remove a lease and let those come back who waited for what it held: its pool's cap, its endpoint, a minimum.

    `said`: how it went, for the endpoint's breaker.
    """
    pool, endpoint = group.pools[request.pool_id], group.endpoint(request.endpoint)
    held_up = endpoint_blocked(group, endpoint) or at_cap(group, pool)
    breaker.note(group, endpoint, (request.id, request.fence), said)
    del group.leases[request.id]
    if held_up and not (endpoint_blocked(group, endpoint) or at_cap(group, pool)):
        restart_pass(group)
    if pool.parked == "lane_capacity" and not at_cap(group, pool):
        come_back(group, pool)
    consider_kept(group, pool)
    if pool.on_endpoint:
        use_room(group, group.endpoint(pool.settings.endpoint))
    use_room(group, endpoint)

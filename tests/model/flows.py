"""Which of a pool's entries is its head: flows (fairness keys), levels (priorities) and what was given back.

* Each fairness key of a pool is a flow; requests without one share a flow. The flow with the lowest tag is next. Only a
  launch moves it: V = its tag, tag += cost. A flow that is joined, also again, gets max(V, its old tag); the tag of a
  flow in which nothing waits is kept until V has passed it. (Start-time fair queueing: Goyal, Vin and Cheng.)
* Inside a flow the request with the least `submitted_ms + level x ageing` is next, ties to the older.
* What was given back stands in arrival order among the rest; in a pool with keys it goes first: its key has paid.
* A settled cost moves the tag by what it differs from the estimate, not below V.

A pool that never saw a key has one flow and no tags; one that empties without a tag that counts is such a pool again.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from tests.model.records import Pool, Request

SHARED = "*"
"""The flow of requests without a fairness key."""


def head(pool: Pool) -> Request | None:
    """Return the entry that leaves next; it may be a tombstone."""
    given_back = pool.returned[0] if pool.returned else None
    if given_back and pool.keyed:
        return given_back
    waiting = _first_waiting(pool)
    return min((entry for entry in (given_back, waiting) if entry), key=lambda entry: entry.seq, default=None)


def _first_waiting(pool: Pool) -> Request | None:
    entries = pool.waiting
    if pool.keyed and pool.tags:
        flow = min(pool.tags, key=lambda name: (pool.tags[name], name))
        entries = [entry for entry in entries if entry.flow == flow]
    ageing = pool.settings.priority_ageing_ms
    return min(entries, key=lambda entry: (entry.submitted_ms + entry.level * ageing, entry.seq), default=None)


def mixed(pool: Pool) -> bool:
    """Whether the pool's next entry may be older than its head: keys or several levels are in use."""
    return pool.keyed or len({entry.level for entry in pool.waiting}) > 1


def in_order(pool: Pool) -> list[Request]:
    """Return the entries in the order in which they leave if nothing else happens and none costs anything."""
    left = replace(
        pool, waiting=[*pool.waiting], returned=[*pool.returned], tags={**pool.tags}, idle_tags={**pool.idle_tags}
    )
    found = []
    while entry := head(left):
        found.append(entry)
        pop(left, entry, None)
    return found


def append(pool: Pool, request: Request) -> None:
    """Add a request that has just arrived."""
    if request.flow != SHARED and not pool.keyed:
        pool.keyed = True
        if pool.waiting:
            pool.tags[SHARED] = pool.virtual_time
    pool.waiting.append(request)
    if pool.keyed and request.flow not in pool.tags:
        pool.tags[request.flow] = max(pool.virtual_time, pool.idle_tags.pop(request.flow, 0))


def give_back(pool: Pool, request: Request) -> None:
    """Add a request that was launched and is to wait again."""
    insort(pool.returned, request, key=lambda entry: entry.seq)


def pop(pool: Pool, request: Request, units: int | None) -> None:
    """Remove the head. `units`: what its launch is charged; None when it is dead and costs nothing."""
    if request in pool.returned:
        pool.returned.remove(request)
        return
    pool.waiting.remove(request)
    if not pool.keyed:
        return
    tag = pool.tags.pop(request.flow)
    if units is not None:
        pool.virtual_time, tag = tag, tag + units
    if any(entry.flow == request.flow for entry in pool.waiting):
        pool.tags[request.flow] = tag
    else:
        pool.idle_tags[request.flow] = tag
    _forget_passed(pool)


def settle(pool: Pool, flow: str, difference: int) -> None:
    """Let a flow pay, or get back, what a request cost more or less than was charged."""
    if not pool.keyed:
        return
    if flow in pool.tags:
        pool.tags[flow] = max(pool.virtual_time, pool.tags[flow] + difference)
    else:
        pool.idle_tags[flow] = max(pool.virtual_time, pool.idle_tags.get(flow, 0)) + difference
    _forget_passed(pool)


def clear(pool: Pool) -> None:
    """Drop what is left of a pool in which nothing waits: tombstones, and flows whose tags no longer count."""
    pool.idle_tags |= pool.tags
    pool.tags.clear()
    pool.waiting.clear()
    pool.returned.clear()
    _forget_passed(pool)
    if not pool.idle_tags:
        pool.keyed, pool.virtual_time = False, 0


def _forget_passed(pool: Pool) -> None:
    pool.idle_tags = {flow: tag for flow, tag in pool.idle_tags.items() if tag > pool.virtual_time}

"""The dead list: requests at which no attempt came to an end, kept whole for somebody to look at, retry or drop."""

from __future__ import annotations

from msgspec.structs import replace

from dispatch.errors import PoolUnknown, StateConflict
from dispatch.fabric import records as r
from tests.model import flows, lifecycle, line
from tests.model.records import Group, Request


def change(group: Group, action: str, request_id: str, new_id: str) -> r.DeadChange:
    """Drop a dead request, or submit it anew: detached, with a fresh deadline and no attempt counted.

    Raises:
        PoolUnknown: its pool is not configured any more.
        StateConflict: the new id is in use.
    """
    if request_id not in group.dead:
        return r.DeadChange("UNKNOWN")
    old = group.requests[request_id]
    if action == "drop":
        del group.dead[request_id], group.requests[request_id]
        return r.DeadChange("DROPPED")
    if group.find(new_id, group.now):
        raise StateConflict(f"there is a request {new_id} already")
    pool = group.pools.get(old.pool_id)
    if pool is None:
        raise PoolUnknown(old.pool_id, known=tuple(group.pools))
    refused = lifecycle.refusal(group, pool, old.bytes)
    if refused:
        return r.DeadChange("REFUSED", reason=refused.reason, value=refused.value, limit=refused.limit)
    del group.dead[request_id]
    old.kept_until_ms = group.now + group.settings.retention_ms
    again = replace(
        old.submission, request_id=new_id, detached=True, idempotency="", fingerprint="", max_wait_ms=None
    )  # fmt: skip
    group.seq += 1
    deadline = group.now + pool.settings.default_timeout_ms
    request = Request(again, group.seq, old.cost, group.now, deadline, due_ms=deadline)
    group.requests[new_id] = request
    flows.append(pool, request)
    pool.submitted += 1
    line.gained_work(group, pool)
    return r.DeadChange("RETRIED", new_id=new_id)

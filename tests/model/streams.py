"""Chunks of running streams: sent under the lease, in order, once. What was sent in part is never run again."""

from __future__ import annotations

from dispatch.fabric import records as r
from tests.model.endings import alive
from tests.model.records import Group, Told
from tests.model.settling import held


def append(group: Group, gateway: str, item: r.Chunks) -> str:
    """Send chunks to the request's producer. Returns the word for it; but for OK nothing is sent."""
    request = held(group, gateway, item.request_id, item.fence)
    if request is None:
        return "LEASE_LOST"
    if item.number + item.count <= request.chunks:
        return "OK"
    if item.number != request.chunks:
        return "GAP"
    if request.cancelled_by:
        return "CANCELLED"
    if not alive(group, request.producer, group.now):
        return "PRODUCER_GONE"
    group.frame += 1
    group.told.setdefault(request.producer, []).append(Told(group.frame, request.id, "chunks", item.number))
    request.chunks += item.count
    return "OK"

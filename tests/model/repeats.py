"""Replies that are kept, for repeats of a call with the same idempotency key and for whoever fetches a detached one.

A key stands for the first request that came with it, from its admission until its reply has been kept long enough: a
repeat with the same fingerprint is told to wait, or gets the reply that was kept. The key of a request at which no
attempt was made (it was cancelled, expired or dropped while it waited) is free again: a repeat is as good as the first.
"""

from __future__ import annotations

from dispatch.fabric import records as r
from tests.model.records import Group, Key, Request, Told


def known(group: Group, submission: r.Submission, now: int) -> r.Exists | r.Replayed | None:
    """Return what a submit's key, or its id, stands for already."""
    key = group.keys.get(submission.idempotency)
    if key and now < key.until_ms:
        first = group.find(key.request_id, now)
        state, ending = (first.state, first.ending) if first else ("ended", "")
        if key.fingerprint != submission.fingerprint:
            return r.Exists(state, key.request_id, same=False, ending=ending)
        if key.request_id in group.results:
            return r.Replayed(key.request_id, b"")
        if state != "ended":
            return r.Exists(state, key.request_id, same=True)
    earlier = group.find(submission.request_id, now)
    return r.Exists(earlier.state, earlier.id, ending=earlier.ending) if earlier else None


def claim(group: Group, request: Request) -> None:
    """Let the request's key stand for it, until it has ended for certain and its reply has been kept."""
    if request.submission.idempotency:
        until = request.deadline_ms + 2 * group.settings.lease_ms + group.settings.idempotency_ttl_ms
        group.keys[request.submission.idempotency] = Key(request.id, request.submission.fingerprint, until)


def keeps(request: Request) -> bool:
    """Whether the request's reply, now that it ends, is kept."""
    return request.submission.detached or (bool(request.submission.idempotency) and request.attempt > 0)


def ended(group: Group, request: Request, told: Told) -> None:
    """Keep the reply of a request that ends, or let its key go."""
    idempotency = request.submission.idempotency
    if keeps(request):
        group.results[request.id] = told
        if idempotency in group.keys:
            group.keys[idempotency].until_ms = group.now + group.settings.idempotency_ttl_ms
    elif idempotency:
        group.keys.pop(idempotency, None)

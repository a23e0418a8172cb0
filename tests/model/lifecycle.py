"""From submit to ending, whoever causes it: DESIGN sections 5 and 6b. Every operation takes the server's `now`, ms."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from dispatch.errors import PoolUnknown, StateConflict
from dispatch.fabric import records as r
from dispatch.fabric.schema import LIMITS
from tests.model import breaker, chores, flows, line, repeats, retries, timers
from tests.model.endings import Verdict, finish, in_grace
from tests.model.records import Group, Pool, Request

DEADLINES_PER_BEAT = 50

Submitted = r.Admitted | r.Exists | r.Replayed | r.Refused


def submit(group: Group, submission: r.Submission, now: int, *, stored: bool) -> Submitted:
    """Admit a request, or say why not. `stored`: its large body stands under its key already."""
    owner, until = group.alive.get(submission.producer_id, ("", 0))
    if now < until and owner != submission.session:
        raise StateConflict(f"another session owns producer {submission.producer_id}")
    earlier = group.find(submission.request_id, now)
    if earlier is not None and earlier.submission.nonce == submission.nonce:
        return r.Admitted(earlier.deadline_ms, now)
    if found := repeats.known(group, submission, now):
        return found
    pool = group.pools.get(submission.pool_id)
    if pool is None:
        raise PoolUnknown(submission.pool_id, known=tuple(group.pools))
    refused = refusal(group, pool, submission.body_bytes)
    inline = submission.body_bytes <= LIMITS["inline_body_bytes"]
    if refused is None and (len(submission.body) < submission.body_bytes if inline else not stored):
        refused = r.Refused("body_missing", len(submission.body), submission.body_bytes, None)
    if refused is not None:
        pool.rejected[refused.reason] += 1
        return refused
    asked = pool.settings.default_timeout_ms if submission.timeout_ms is None else submission.timeout_ms
    deadline = now + min(asked, pool.settings.max_timeout_ms)
    group.seq += 1
    request = Request(submission, group.seq, _cost(group, submission), now, deadline, due_ms=deadline)
    if submission.max_wait_ms is not None:
        request.due_ms = request.queue_until_ms = min(deadline, now + submission.max_wait_ms)
    group.requests[request.id] = request
    repeats.claim(group, request)
    group.alive[request.producer] = (submission.session, now + submission.liveness_ms)
    flows.append(pool, request)
    pool.submitted += 1
    line.gained_work(group, pool)
    return r.Admitted(deadline, now)


def _cost(group: Group, submission: r.Submission) -> int:
    units = submission.estimated_cost_units
    if units is None:
        units = 1 + 2 * submission.images + ceil(submission.pages / 8)
    return max(group.settings.cost_min, min(units, group.settings.cost_max))


def refusal(group: Group, pool: Pool, size: int) -> r.Refused | None:
    """Return the first bound the request would break."""
    config, limits = pool.settings, group.settings
    depth, held = len(pool.live), sum(request.bytes for request in pool.live)
    bounds = (
        ("pool_disabled", 0, 0, not config.enabled),
        ("pool_draining", depth, 0, pool.state == "draining"),
        ("body_too_large", size, limits.max_payload_bytes, size > limits.max_payload_bytes),
        ("pool_full", depth, config.max_queue_depth, depth >= config.max_queue_depth),
        ("pool_bytes_full", held, config.max_queue_bytes, held + size > config.max_queue_bytes),
        ("group_full", group.queued, limits.max_queued, group.queued >= limits.max_queued),
        ("endpoint_open", 0, 0, config.on_open == "reject" and line.endpoint_open(group, pool)),
    )
    return next((r.Refused(reason, value, limit, None) for reason, value, limit, broken in bounds if broken), None)


def cancel(group: Group, request_id: str, actor: str, now: int, *, only_waiting: bool = False) -> r.Cancellation:
    """End a request that waits (also for its retry); mark a running one, its gateway does the rest."""
    request = group.find(request_id, now)
    if request is None:
        return r.Cancellation("UNKNOWN")
    if request.state == "ended":
        return r.Cancellation("ENDED", request.ending)
    if request.state == "leased" and only_waiting:
        return r.Cancellation("RUNNING", request.gateway)
    if request.state == "leased":
        request.cancelled_by = actor
        return r.Cancellation("CANCELLING", request.gateway)
    end_waiting(group, request, "cancelled", now)
    return r.Cancellation("CANCELLED")


def renew(group: Group, beat: r.Heartbeat, now: int) -> r.Renewal:
    """Renew what the gateway names; say what it lost, what should stop, and what it does not know it holds."""
    in_grace(group, now)  # an outage is noticed before this heartbeat hides it
    group.last_beat_ms = now
    if beat.draining and beat.slots == 0 and not beat.held:  # a drained gateway's last heartbeat
        group.sleepers.discard(beat.gateway_id)
    grace = in_grace(group, now)
    lost, cancelled, renewed = [], [], []
    for request_id, fence in beat.held:
        request = group.requests.get(request_id)
        until = group.leases.get(request_id)
        if request is None or until is None or request.fence != fence or (until < now and not grace):
            lost.append(request_id)
            continue
        renewed.append(request)
        if request.cancelled_by:
            cancelled.append(request_id)
    named = {request_id for request_id, _ in beat.held}
    unknown = [
        request
        for request in group.leased()
        if request.gateway == beat.gateway_id and request.id not in named and request.claim_nonce not in beat.nonces
    ]
    for request in [*renewed, *unknown]:
        group.leases[request.id] = now + group.settings.lease_ms
    rows = lease_rows(group, unknown)
    timers.run(group)
    expire(group, DEADLINES_PER_BEAT, now)
    return r.Renewal(now, group.generation, tuple(lost), tuple(cancelled), rows, chores.due_in(group))


def reap(group: Group, limit: int, now: int) -> r.Reaped:
    """End or give back leases that ran out (not while an outage is digested), then end what is past its deadline."""
    counts = {"lost": 0, "requeued": 0, "expired": 0, "cancelled": 0}
    run_out: list[str] = []
    if not in_grace(group, now):
        ends = sorted((until, request_id) for request_id, until in group.leases.items() if until < now)
        run_out = [request_id for _, request_id in ends[:limit]]
    for request_id in run_out:
        counts[_reap_lease(group, group.requests[request_id], now)] += 1
    late, more = expire(group, limit, now)
    timers.run(group)
    return r.Reaped(
        now, counts["lost"], counts["requeued"], counts["expired"] + late, more=len(run_out) == limit or more
    )


def _reap_lease(group: Group, request: Request, now: int) -> str:
    """Deal with a lease that ran out. Returns what to count it as."""
    ending = after_loss(group, request, now)
    if not ending:
        run_again(group, request)
        return "requeued"
    _end_running(group, request, Verdict(ending), now)
    return "lost" if ending == "dead" else ending


def after_loss(group: Group, request: Request, now: int) -> str:
    """Return how a request ends whose run came to no end, by its pool's delivery mode; "" if it is to be run again."""
    settings = group.pools[request.pool_id].settings
    if request.cancelled_by:
        return "cancelled"
    if settings.delivery == "at_most_once" or request.chunks:
        return "lost"
    if now >= request.deadline_ms:
        return "expired"
    return "dead" if request.attempt >= settings.max_attempts else ""


def run_again(group: Group, request: Request) -> None:
    """Put a request whose run came to no end back to where it stood. The attempt counts."""
    retries.note_try(group, request, None, "lost")
    give_back(group, request, breaker.Said())


def expire(group: Group, limit: int, now: int) -> tuple[int, bool]:
    """End requests past their deadline. Running ones are their gateway's to stop; after a lease time they end here."""
    due = sorted(
        (request.due_ms, request.id)
        for request in group.requests.values()
        if request.due_ms is not None and request.due_ms <= now
    )[:limit]
    ended = 0
    for _, request_id in due:
        request = group.requests[request_id]
        if request.state in {"queued", "delayed"}:
            end_waiting(group, request, "expired", now)
            ended += 1
        elif now >= request.deadline_ms + group.settings.lease_ms:
            _end_running(group, request, Verdict("expired"), now)
            ended += 1
        else:
            request.due_ms = request.deadline_ms + group.settings.lease_ms
    return ended, len(due) == limit


def end_waiting(group: Group, request: Request, ending: str, now: int) -> None:
    finish(group, request, Verdict(ending), now)
    line.lost_work(group, group.pools[request.pool_id])


def _end_running(group: Group, request: Request, verdict: Verdict, now: int) -> None:
    finish(group, request, verdict, now)
    line.free_slot(group, request, breaker.Said())


def give_back(group: Group, request: Request, said: breaker.Said) -> None:
    """Put a leased request back where it stood in arrival order."""
    pool = group.pools[request.pool_id]
    line.free_slot(group, request, said)
    unclaim(request, "queued")
    flows.give_back(pool, request)
    line.gained_work(group, pool)


def unclaim(request: Request, state: str, retry_ms: int = 0) -> None:
    """Let a request belong to no gateway any more; `retry_ms`: when it waits again."""
    request.state, request.retry_ms, request.gateway, request.fence, request.probe_until_ms = state, retry_ms, "", 0, 0


def lease_rows(group: Group, requests: Iterable[Request]) -> tuple[r.Lease, ...]:
    """Return leases as the server lists them."""
    return tuple(
        r.Lease(
            request_id=request.id,
            pool_id=request.pool_id,
            producer_id=request.producer,
            endpoint_id=request.endpoint,
            fence=request.fence,
            attempt=request.attempt,
            submitted_ms=request.submitted_ms,
            claimed_ms=request.claimed_ms,
            deadline_ms=request.deadline_ms,
            lease_until_ms=group.leases[request.id],
            cost=request.cost,
            body_bytes=request.bytes,
            nonce=request.submission.nonce,
            envelope=request.submission.envelope,
            body=request.submission.body,
            probe_until_ms=request.probe_until_ms,
        )
        for request in requests
    )

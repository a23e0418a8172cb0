"""How a request ends, and who counts as gone: DESIGN section 5."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model import repeats
from tests.model.records import Ended, Group, Request, Told


@dataclass(frozen=True)
class Verdict:
    """An ending and, where it took the place of another (`reply_dropped`), what would have been told."""

    ending: str
    outcome: str = ""


def outage(group: Group, now: int) -> bool:
    """Whether the gateways have been silent for longer than two heartbeats, which nobody has noticed yet."""
    beat_interval = min(group.settings.lease_ms, group.settings.liveness_ms) / 3
    silent = group.last_beat_ms > 0 and now - group.last_beat_ms > 2 * beat_interval
    return silent and now >= group.grace_until_ms


def in_grace(group: Group, now: int) -> bool:
    """Whether an outage is being digested, for one liveness time from when it is noticed, which may be now.

    Meanwhile nobody is taken for gone and no lease for run out.
    """
    if outage(group, now):
        group.grace_until_ms = now + group.settings.liveness_ms
        group.last_beat_ms = now
    return now < group.grace_until_ms


def alive(group: Group, producer: str, now: int) -> bool:
    """Whether replies can reach the producer."""
    _, until = group.alive.get(producer, ("", 0))
    return now < until or in_grace(group, now)


def awaited(group: Group, request: Request, now: int) -> bool:
    """Whether it matters how the request ends: its producer lives, or its reply is kept for whoever asks."""
    return request.submission.detached or alive(group, request.producer, now)


def finish(group: Group, request: Request, verdict: Verdict, now: int) -> None:
    """End the request: tell its producer if it lives, count it, record it. Its lease is the caller's to remove.

    The reply of a detached request is kept to be fetched instead.
    """
    ending, tries = verdict.ending, tuple(request.tries)
    outcome = verdict.outcome or ending
    group.ended.append(Ended(request.id, ending, outcome, request.pool_id, request.gateway, request.attempt, tries))
    told = ending != "reply_dropped" and not request.submission.detached
    heard = told and alive(group, request.producer, now)  # taken for gone, it may be back
    group.frame += heard or repeats.keeps(request)
    frame = Told(group.frame, request.id, outcome if ending == "reply_dropped" else ending, request.attempt, tries)
    if heard:
        group.told.setdefault(request.producer, []).append(frame)
    repeats.ended(group, request, frame)
    pool = group.pools[request.pool_id]
    pool.endings[ending] += 1
    request.state, request.ending, request.due_ms = "ended", ending, None
    request.kept_until_ms = now + group.settings.retention_ms
    if request in pool.entries:  # a tombstone now, which must be told from a damaged entry until its deadline
        request.kept_until_ms += max(0, request.deadline_ms - now)
    if ending == "dead":
        _bury(group, request, now)


def _bury(group: Group, request: Request, now: int) -> None:
    """Keep a dead request for inspection, the latest ones of a bounded number; those before them are forgotten."""
    limits = group.settings
    if limits.dead_kept == 0:
        return
    group.dead[request.id] = now
    request.kept_until_ms = now + limits.dead_ttl_ms
    in_order = sorted(group.dead, key=lambda name: (group.dead[name], name))
    late = sum(died <= now - limits.dead_ttl_ms for died in group.dead.values())
    for name in in_order[: max(late, len(in_order) - limits.dead_kept)]:
        del group.dead[name]
        group.requests.pop(name, None)

"""How a request ends, and who counts as gone: DESIGN section 5."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.records import Ended, Group, Request, Told

UNTOLD = frozenset({"producer_gone", "reply_dropped"})
"""Endings nobody is left to hear of."""


@dataclass(frozen=True)
class Verdict:
    """An ending and, where it took the place of another (`reply_dropped`), what would have been told."""

    ending: str
    outcome: str = ""


def outage(group: Group, now: int) -> bool:
    """Whether the gateways have been silent for longer than two heartbeats, which nobody has noticed yet."""
    beat_interval = group.settings.lease_ms / 3
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


def finish(group: Group, request: Request, verdict: Verdict, now: int) -> None:
    """End the request: tell its producer if it lives, count it, record it. Its lease is the caller's to remove."""
    ending = verdict.ending
    group.ended.append(
        Ended(request.id, ending, verdict.outcome or ending, request.pool_id, request.gateway, request.attempt)
    )
    if ending not in UNTOLD and alive(group, request.producer, now):
        group.frame += 1
        group.told.setdefault(request.producer, []).append(Told(group.frame, request.id, ending, request.attempt))
    pool = group.pools[request.pool_id]
    pool.endings[ending] += 1
    request.state, request.ending, request.due_ms = "ended", ending, None
    request.kept_until_ms = now + group.settings.retention_ms
    if request in pool.entries:  # a tombstone now, which must be told from a damaged entry until its deadline
        request.kept_until_ms += max(0, request.deadline_ms - now)

"""What time and accidents do to a group, done on purpose to the server and to the twin alike.

Time stands still for both: leases, liveness, timeouts, holds and open breakers last an hour, so nothing ends by the
clock while a history runs. Instead what would have passed is set into the past, where the functions look for it. Only
what is bound to lengths that no config sets (the budget's window, some of a chore's times) goes by really.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from tests.model.records import Endpoint, Request
from tests.model.reference import Reference
from tests.model.retries import WINDOW_MS
from tests.property.views import ServerEye

LONG_MS = 3_600_000


class Accidents:
    """A group on the server and its twin, and what befalls both."""

    def __init__(self, eye: ServerEye) -> None:
        self.eye = eye
        self.twin = Reference()
        self._moments = itertools.count()
        self._began = self.server_time()

    def server_time(self) -> int:
        """Return the server's time, ms."""
        seconds, micros = self.eye.client.time()
        return int(seconds) * 1_000 + int(micros) // 1_000

    def lease_runs_out(self, request_id: str) -> None:
        """Let a lease's time be over."""
        past = self._past()
        self.eye.client.zadd(self.eye.key("leases"), {request_id: past}, xx=True)
        self.twin.group.leases[request_id] = past

    def deadline_passes(self, request: Request, *, long_ago: bool) -> None:
        """Let a request's deadline be over; `long_ago`: by more than a lease time."""
        past = self._past() - (2 * LONG_MS if long_ago else 0)
        fields = {"deadline_ms": past} | ({"queue_until": past} if request.queue_until_ms is not None else {})
        self.eye.change(self.eye.key("request", id=request.id), fields)
        self.eye.client.zadd(self.eye.key("deadlines"), {request.id: past}, xx=True)
        request.deadline_ms = request.due_ms = past
        request.queue_until_ms = None if request.queue_until_ms is None else past

    def producer_dies(self, producer: str) -> None:
        """Let a producer's marker expire."""
        self.eye.client.delete(self.eye.key("alive", producer=producer))
        session, _ = self.twin.group.alive.get(producer, ("", 0))
        self.twin.group.alive[producer] = (session, 0)

    def producer_lives(self, producer: str) -> None:
        """Let a producer's heartbeat write its marker."""
        self.eye.client.set(self.eye.key("alive", producer=producer), "session", px=LONG_MS)
        self.twin.group.alive[producer] = ("session", self.server_time() + LONG_MS)

    def body_vanishes(self, request: Request) -> None:
        """Let an inline body be gone."""
        self.eye.client.hdel(self.eye.key("request", id=request.id), "body")
        request.body_lost = True

    def envelope_vanishes(self, request: Request) -> None:
        """Let a stored request be damaged."""
        self.eye.client.hdel(self.eye.key("request", id=request.id), "envelope")
        request.envelope_lost = True

    def outage(self, *, begins: bool) -> None:
        """Let all heartbeats be an hour old, or the grace after an outage be over."""
        group, past = self.twin.group, self.server_time() - LONG_MS
        if begins:
            if group.last_beat_ms == 0:
                return
            group.last_beat_ms, group.grace_until_ms = past, 0
        else:
            group.grace_until_ms = 0
        times = {"last_beat": group.last_beat_ms, "grace_until": group.grace_until_ms}
        self.eye.change(self.eye.key("group"), times)

    def retry_comes_due(self, request: Request) -> None:
        """Let a delayed request's wait be over."""
        past = self._past()
        self.eye.change(self.eye.key("request", id=request.id), {"due_ms": past})
        self._timer(f"retry:{request.id}", past)
        request.retry_ms = past

    def endpoint_time_passes(self, endpoint: Endpoint, what: str) -> None:
        """Let what blocks the endpoint be over by time: `open`, `hold`, `probe`, or its `sample` be too old."""
        past, fields = self._past(), {}
        if what == "open" and endpoint.breaker == "open":
            endpoint.open_until_ms = past
            fields = {"open_until": past}
        elif what == "hold" and endpoint.hold_until_ms:
            endpoint.hold_until_ms = past
            fields = {"hold_until": past}
        elif what == "probe" and endpoint.probe:
            endpoint.probe = replace(endpoint.probe, until_ms=past)
            fields = {"probe": self._part(endpoint, "probe") | {"until_ms": past}}
        elif what == "sample" and endpoint.sample and endpoint.settings:
            endpoint.sample.at_ms = past - endpoint.settings.gate_stale_ms - 1
            fields = {"gate": self._part(endpoint, "gate") | {"at": endpoint.sample.at_ms}}
        if fields and self._timer(f"endpoint:{endpoint.name}", past):
            fields["timer_at"] = past
        if fields:
            self.eye.change(self.eye.key("endpoint", endpoint=endpoint.name), fields)

    def chores_come_due(self) -> None:
        """Let the next times of all chores be over."""
        past = self._past()
        for at, name in enumerate(sorted(self.twin.group.chores)):
            self.twin.group.chores[name] = past + at
            self.eye.client.zadd(self.eye.key("chores"), {name: past + at}, xx=True)
        if self.twin.group.chores:
            self.eye.change(self.eye.key("group"), {"next_chore": past})

    def budget_window_passes(self, windows: int) -> None:
        """Let so many windows of the retry budget go by."""
        group, passed = self.twin.group, windows * WINDOW_MS
        group.window_ms -= passed
        group.firsts = [moment - passed for moment in group.firsts]
        group.retries = [moment - passed for moment in group.retries]
        self.eye.change(self.eye.key("group"), {"budget_start": group.window_ms})

    def _timer(self, member: str, past: int) -> bool:
        """Have a timer, if it is set, fire at the next call. Returns whether it is."""
        is_set = self.eye.client.zadd(self.eye.key("timers"), {member: past}, xx=True, ch=True) == 1
        first = self.eye.client.zrange(self.eye.key("timers"), 0, 0, withscores=True)
        if first:
            self.eye.change(self.eye.key("group"), {"next_timer": int(first[0][1])})
        return is_set

    def _part(self, endpoint: Endpoint, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.eye.record(self.eye.key("endpoint", endpoint=endpoint.name))[name]
        return found

    def _past(self) -> int:
        """Return a time that is over, each later than the last: the order of reaping must not hang on the clock."""
        return self._began - LONG_MS // 2 + 1_000 * next(self._moments)

"""What changes in a group, for those who watch: one look at a time for all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from dispatch.errors import DispatchError
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import LIMITS
from dispatch.ingress.control.group import Group

WATCHERS_MAX = 64
"""Streams of one gateway process at a time."""

_NEWEST = 50
_PAGES_MAX = 10
_TOTALS = ("generation", "pending", "in_flight", "delayed", "dead", "pools", "sleeping_gateways")

EventId = tuple[int, int]
NOTHING: EventId = (0, 0)


@dataclass(frozen=True, slots=True)
class Look:
    """One moment of a group: its totals, and its newest events, the newest first. `problem` "" = it was seen."""

    at: float
    server_ms: int | None = None
    totals: dict[str, Any] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()
    whole: bool = True
    """There are no older events."""
    problem: str = ""

    @property
    def newest(self) -> EventId:
        """The id of the newest event, `NOTHING` if there is none."""
        return event_id(self.events[0]["event_id"]) if self.events else NOTHING


def event_id(text: str) -> EventId:
    """Read the id of an event, by which events are in order.

    Raises:
        ValueError: it is none.
    """
    ms, _, number = text.partition("-")
    return int(ms), int(number)


class Watch:
    """Looks at the group when somebody watches, at most once in `every_s`, however many they are."""

    def __init__(self, group: Group, every_s: float) -> None:
        self.group = group
        self.every_s = every_s
        self.watchers = 0
        self._turn = anyio.Lock()
        self._last = Look(float("-inf"))

    async def look(self) -> Look:
        """Return a moment that is at most `every_s` old. Never raises what the server does."""
        async with self._turn:
            if anyio.current_time() - self._last.at >= self.every_s:
                self._last = await self._look()
            return self._last

    async def since(self, last: EventId, look: Look) -> tuple[list[dict[str, Any]], bool]:
        """Return the events after `last`, the oldest first, and whether it is sure that none is missing.

        None is if the event `last` was met; the stream of events is bounded, and a server can be replaced.

        Raises:
            DispatchError: what the connection says.
        """
        found = [row for row in look.events if event_id(row["event_id"]) > last]
        met = len(found) < len(look.events)
        at_end = look.whole
        pages = 0
        while not (met or at_end or pages == _PAGES_MAX):
            call = fabric_snapshot("events", cursor=found[-1]["event_id"], limit=LIMITS["snapshot_page_max"])
            page = await self.group.run(call)
            newer = [row for row in page["rows"] if event_id(row["event_id"]) > last]
            found += newer
            met, at_end, pages = len(newer) < len(page["rows"]), not page["cursor"], pages + 1
        return found[::-1], met or (at_end and last == NOTHING)

    async def _look(self) -> Look:
        at = anyio.current_time()
        try:
            group, page = await self.group.run_many(
                [fabric_snapshot("group"), fabric_snapshot("events", limit=_NEWEST)]
            )
        except DispatchError as error:
            return Look(at, problem=str(error))
        totals = {name: group.get(name) for name in _TOTALS}
        return Look(at, group["server_ms"], totals, tuple(page["rows"]), whole=not page["cursor"])

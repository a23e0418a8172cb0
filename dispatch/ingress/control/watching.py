"""What changes in a group, for those who watch: one look at a time for all of them together.

The group's channel says when there is something to see; while it is not heard, the group is looked at again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from dispatch.errors import DispatchError
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import LIMITS, key
from dispatch.ingress.control.group import Group

WATCHERS_MAX = 64
"""Streams of one gateway process at a time."""

HEARD_EVERY_S = 5.0
"""How old a look may be while the channel is heard and says that nothing has changed."""

_SILENT_S = 7.0  # a channel on which somebody publishes says something every five seconds
_AGAIN_S = 0.5
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


class Told(msgspec.Struct, frozen=True):
    """What a message on the channel says: which kinds of things have changed, none in a mere repetition."""

    sequence: int
    changed: tuple[str, ...] = ()


class Watch:
    """Looks at the group when somebody watches and the channel says that it has changed, once for all of them.

    Without the channel (nobody publishes, or the server is away): once in `every_s`.
    """

    def __init__(self, group: Group, every_s: float) -> None:
        self.group = group
        self.every_s = every_s
        self.watchers = 0
        self._turn = anyio.Lock()
        self._last = Look(float("-inf"))
        self._listener: asyncio.Task[None] | None = None
        self._heard_sequence: int | None = None
        self._seen = True
        self._news = asyncio.Event()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Count a watcher; the channel is listened to while there is one."""
        self.watchers += 1
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="listener to the group's channel")
        try:
            yield
        finally:
            self.watchers -= 1
            if self.watchers == 0:
                listener, self._listener = self._listener, None
                listener.cancel()

    @property
    def heard(self) -> bool:
        """Whether the channel is heard, so that there is no need to look again and again."""
        return self._heard_sequence is not None

    async def wait(self, seen: Look | None) -> None:
        """Wait until there may be something newer than `seen`, at most `every_s`."""
        if not self._seen or seen is not self._last:
            return
        news = self._news
        with anyio.move_on_after(self.every_s):
            await news.wait()

    async def look(self) -> Look:
        """Return the newest moment there is reason to look at. Never raises what the server does."""
        async with self._turn:
            age = anyio.current_time() - self._last.at
            if not self._seen or age >= (max(HEARD_EVERY_S, self.every_s) if self.heard else self.every_s):
                self._seen = True
                self._last = await self._look()
            return self._last

    def take(self, message: bytes) -> None:
        """Take in a message of the channel."""
        try:
            told = msgspec.json.decode(message, type=Told)
        except msgspec.MsgspecError:  # others may publish there, too
            return
        last, self._heard_sequence = self._heard_sequence, told.sequence
        if told.changed or last is None or told.sequence != last + 1:
            self._wake()

    async def _listen(self) -> None:
        """Hear the channel until cancelled, whatever the server does."""
        channel = key(self.group.name, "snapshot_channel")
        subscriber = self.group.connection.subscriber(channel)
        try:
            while True:
                try:
                    message = await subscriber.next(_SILENT_S)
                except DispatchError:
                    self._lose()
                    await anyio.sleep(_AGAIN_S)
                    continue
                if message is not None:
                    self.take(message)
                else:
                    self._lose()
        finally:
            self._heard_sequence = None
            with anyio.CancelScope(shield=True):
                await subscriber.aclose()

    def _lose(self) -> None:
        if self.heard:
            self._heard_sequence = None
            self._wake()

    def _wake(self) -> None:
        self._seen = False
        self._news.set()
        self._news = asyncio.Event()

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

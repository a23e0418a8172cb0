"""Reading the group's state for metrics: one look for all who ask, at most once a second, bounded in time and size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import anyio
import structlog

from dispatch.errors import DispatchError
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import LIMITS

log = structlog.get_logger(__name__)

SECTIONS = ("group", "pools", "endpoints", "gateways")
FRESH_S = 1.0
WITHIN_S = 2.0
_ROWS = LIMITS["snapshot_page_max"]
_PAGES_MAX = 10
"""Twice as many rows as a group may have pools."""


@dataclass(frozen=True, slots=True)
class Look:
    """One moment of a group. A section that could not be read is missing; `truncated` ones lack rows."""

    at: float
    """By the clock of `time.monotonic`."""
    server_ms: int = 0
    group: dict[str, Any] | None = None
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    truncated: frozenset[str] = frozenset()

    def has(self, section: str) -> bool:
        """Whether the section was read."""
        return self.group is not None if section == "group" else section in self.rows


class GroupReader:
    """Looks at a group through a connection. Belongs to one event loop."""

    def __init__(self, connection: Connection, group: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._group = group
        self._clock = clock
        self._turn = anyio.Lock()
        self._breakers: dict[str, str] = {}
        self.last = Look(float("-inf"))

    async def look(self) -> Look:
        """Return a moment that is at most a second old. Never raises what the server does, and takes at most 2 s."""
        async with self._turn:
            if self._clock() - self.last.at >= FRESH_S:
                self.last = await self._read()
                self._tell_moves(self.last)
            return self.last

    def newest(self, most_s: float) -> tuple[Look, float]:
        """Return the last look and its age in seconds; an empty one when it is older than `most_s`. Asks nobody."""
        age_s = self._clock() - self.last.at
        return (self.last, age_s) if age_s <= most_s else (Look(self.last.at), age_s)

    async def _read(self) -> Look:
        found = _Pages()
        at = self._clock()
        wanted = dict.fromkeys(SECTIONS, "")
        truncated = frozenset[str]()
        with anyio.move_on_after(WITHIN_S):
            try:
                for _ in range(_PAGES_MAX):
                    calls = [fabric_snapshot(name, cursor=cursor, limit=_ROWS) for name, cursor in wanted.items()]
                    pages = await self._connection.run_many(self._group, calls)
                    wanted = found.take(wanted, pages)
                    if not wanted:
                        break
                truncated, wanted = frozenset(wanted), {}
            except DispatchError as error:
                log.debug("metrics_without_group", problem=str(error))
        for name in wanted:
            found.rows.pop(name, None)  # a part of it would pass for the whole
        return Look(at, found.server_ms, found.group, found.rows, truncated)

    def _tell_moves(self, look: Look) -> None:
        """Log breakers that have moved since the last look."""
        for row in look.rows.get("endpoints", ()):
            name, state = row["endpoint_id"], row.get("breaker")
            if state is None:
                continue
            before = self._breakers.get(name, "closed")
            if state != before:
                log.warning("breaker_moved", endpoint=name, before=before, now=state)
            self._breakers[name] = state


class _Pages:
    """Sections as their pages come in."""

    def __init__(self) -> None:
        self.server_ms = 0
        self.group: dict[str, Any] | None = None
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def take(self, wanted: Iterable[str], pages: list[Any]) -> dict[str, str]:
        """Take a page of each section; returns where those go on that have more. One that failed is left out."""
        cursors = {}
        for name, page in zip(wanted, pages, strict=True):
            if isinstance(page, DispatchError):
                self.rows.pop(name, None)
                continue
            self.server_ms = max(self.server_ms, page["server_ms"])
            if name == "group":
                self.group = page
                continue
            self.rows.setdefault(name, []).extend(page["rows"])
            if page["cursor"]:
                cursors[name] = page["cursor"]
        return cursors

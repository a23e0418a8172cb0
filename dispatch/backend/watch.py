"""A bound on waits, at next to no cost for those that end in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watch:
    """Calls `on_due` when a wait is not over at its time; `fired` says that it was.

    A stream waits for every chunk, and a scope with a deadline around each wait costs a quarter of what reading the
    chunk costs. Waits ending in time only move a number; one timer a stream is set again when it finds that it was too
    early. `on_due` may answer with a later time instead of ending the wait.
    """

    __slots__ = ("_armed_for", "_due", "_loop", "_on_due", "_timer", "_waiting", "fired")

    def __init__(self, on_due: Callable[[], float | None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0
        self._due = 0.0
        self._waiting = False
        self.fired = False

    def begin(self, due: float) -> None:
        """Begin a wait that has to end by `due` (event loop time)."""
        self._due = due
        self._waiting = True
        if self._timer is None or due < self._armed_for:
            self._arm()

    def rest(self) -> None:
        """End the wait."""
        self._waiting = False

    def close(self) -> None:
        """Stop watching."""
        self._waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = self._due
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        if self._loop.time() >= self._due:
            later = self._on_due()
            if later is None:
                self.fired = True
                return
            self._due = later
        self._arm()

"""What the live view shows and what keys do to it. Nothing here draws or asks a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dispatch.fabric.view import FabricView, PoolRow
from dispatch.studio.findings import Finding, Situation
from dispatch.studio.trend import PoolTrend, Trend, trend_of
from dispatch.studio.verdict import findings

VIEWS_MAX = 10
"""Looks that rates are made of."""

Sort = Literal["config", "name", "waiting", "oldest", "in flight", "weight"]
SORTS: tuple[Sort, ...] = ("config", "waiting", "oldest", "in flight", "weight", "name")

_ORDERS: dict[str, Callable[[PoolRow], tuple[float, str]]] = {
    "name": lambda row: (0, row.pool_id),
    "waiting": lambda row: (-(row.pending or 0), row.pool_id),
    "oldest": lambda row: (row.head_submitted_ms if row.head_submitted_ms is not None else float("inf"), row.pool_id),
    "in flight": lambda row: (-(row.in_flight or 0), row.pool_id),
    "weight": lambda row: (-(row.quantum or 0), row.pool_id),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """Something that a person has confirmed: pause or resume a pool."""

    action: Literal["pause", "resume"]
    pool_id: str


@dataclass(slots=True)
class Screen:
    """The live view. `problem` "" = the last look succeeded; what was seen last stays."""

    group: str
    compare_clocks: bool = True
    views: list[FabricView] = field(default_factory=list)
    found: list[Finding] = field(default_factory=list)
    trend: Trend | None = None
    problem: str = ""
    sort: Sort = "config"
    selected: int = 0
    asking: Ask | None = None
    said: str = ""
    over: bool = False

    @property
    def view(self) -> FabricView | None:
        """What was seen last."""
        return self.views[-1] if self.views else None

    def take(self, view: FabricView) -> None:
        """Take in a look."""
        self.views = [*self.views, view][-VIEWS_MAX:]
        self.problem = ""
        self.trend = trend_of(self.views)
        self.found = findings(Situation(view=view, trend=self.trend, compare_clocks=self.compare_clocks))

    def pools(self) -> list[PoolRow]:
        """Return the pools in the order that was asked for."""
        rows = list((self.view.pools if self.view else None) or ())
        return rows if self.sort == "config" else sorted(rows, key=_ORDERS[self.sort])

    def trend_of(self, pool: PoolRow) -> PoolTrend | None:
        """Return how a pool moves."""
        return self.trend.of(pool.pool_id) if self.trend else None

    def press(self, key: str) -> Ask | None:
        """Take in a key; returns what has to be done now."""
        self.said = ""
        if self.asking is not None:
            asked, self.asking = self.asking, None
            if key == "y":
                return asked
            self.said = "nothing was changed"
            return None
        if key in {"q", "\x03", "\x04"}:
            self.over = True
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            self.selected = 0
        elif key in {"j", "down"}:
            self.selected = min(self.selected + 1, max(0, len(self.pools()) - 1))
        elif key in {"k", "up"}:
            self.selected = max(self.selected - 1, 0)
        elif key == "p":
            self._ask()
        return None

    def _ask(self) -> None:
        rows = self.pools()
        if self.problem or not rows:
            self.said = "there is no pool to pause now"
            return
        pool = rows[min(self.selected, len(rows) - 1)]
        self.asking = Ask("resume" if pool.paused or pool.draining else "pause", pool.pool_id)

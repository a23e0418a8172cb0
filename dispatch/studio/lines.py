"""The last 15 minutes of a group, in memory: a point each 5 seconds, and what ended lately."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from dispatch.fabric.view import EndingRow, FabricView

POINT_MS = 5_000
POINTS = 180
_WINDOW_MS = POINT_MS * POINTS
_ENDINGS_KEPT = 5_000
_SUCCEEDED = "succeeded"


class Lines:
    """Rings of what waits (by pool and together), runs and ends. A gap is None."""

    def __init__(self) -> None:
        self.pools: dict[str, deque[int | None]] = {}
        self.group: dict[str, deque[float | None]] = {
            name: deque(maxlen=POINTS) for name in ("waiting", "in_flight", "finished")
        }
        self.since_ms: int | None = None
        self._last_ms: int | None = None
        self._ended: deque[tuple[int, int | None, int]] = deque()

    def take(self, view: FabricView) -> bool:
        """Note a view if the next point is due; returns whether it was."""
        now = view.server_ms
        if self._last_ms is not None and 0 <= now - self._last_ms < POINT_MS:
            return False
        missed = 0 if self._last_ms is None else min(POINTS, (now - self._last_ms) // POINT_MS - 1)
        for _ in range(max(0, missed)):
            self._add({}, (None, None, None))
        self.since_ms = self.since_ms or now
        group, ended = view.group, _ended(view)
        finished = self._per_second(now, ended)
        self._last_ms = now
        self._ended.append((now, ended, _succeeded(view)))
        while now - self._ended[0][0] > _WINDOW_MS:
            self._ended.popleft()
        pending = None if group is None else group.pending
        in_flight = None if group is None else group.in_flight
        self._add({row.pool_id: row.pending for row in view.pools or ()}, (pending, in_flight, finished))
        return True

    def not_succeeded(self, view: FabricView) -> tuple[int, int] | None:
        """Return how many ended otherwise than succeeded in the window, and how many ended; None = not known yet."""
        total = _ended(view)
        if total is None or len(self._ended) < 2:
            return None
        _, first_total, first_good = self._ended[0]
        good = _succeeded(view)
        if first_total is None or total < first_total or good < first_good:
            return None
        ended = total - first_total
        return ended - (good - first_good), ended

    def _per_second(self, now: int, ended: int | None) -> float | None:
        """Return how many a second ended since the last point; None = not known."""
        if ended is None or not self._ended:
            return None
        at, before, _ = self._ended[-1]
        if before is None or ended < before or now <= at:
            return None
        return round((ended - before) * 1000 / (now - at), 2)

    def _add(self, pools: dict[str, int | None], group: Sequence[float | None]) -> None:
        for name in [name for name in self.pools if pools and name not in pools]:
            del self.pools[name]
        for name in pools.keys() | self.pools.keys():
            self.pools.setdefault(name, deque(maxlen=POINTS)).append(pools.get(name))
        for line, value in zip(self.group.values(), group, strict=True):
            line.append(value)


class Recent:
    """Requests that ended in the last 15 minutes, as far as the group's stream told of them (a sample under load)."""

    def __init__(self) -> None:
        self._rows: deque[EndingRow] = deque(maxlen=_ENDINGS_KEPT)
        self._newest = (0, 0)

    def take(self, view: FabricView) -> None:
        """Take in the newest endings of a view."""
        fresh = [row for row in view.endings or () if _order(row.record_id) > self._newest]
        for row in reversed(fresh):
            self._rows.append(row)
            self._newest = _order(row.record_id)
        while self._rows and view.server_ms - (self._rows[0].ended_ms or 0) > _WINDOW_MS:
            self._rows.popleft()

    def facts(self) -> dict[str, Any]:
        """Return the mean wait and run of what succeeded, and the most frequent error. None = nothing to say it by."""
        good = [row for row in self._rows if row.ending == _SUCCEEDED]
        errors = Counter(row.error_type or row.ending for row in self._rows if row.ending != _SUCCEEDED)
        error = errors.most_common(1)
        return {
            "wait_ms": _mean([(row.submitted_ms, row.claimed_ms) for row in good]),
            "run_ms": _mean([(row.claimed_ms, row.ended_ms) for row in good]),
            "error": error[0][0] if error else None,
            "sample": len(self._rows),
        }

    def rows(self, pool: str, most: int) -> list[EndingRow]:
        """Return the newest endings of one pool, the newest first."""
        return [row for row in reversed(self._rows) if row.pool == pool][:most]


def _ended(view: FabricView) -> int | None:
    if view.pools is None:
        return None
    return sum(sum(row.endings.values()) for row in view.pools)


def _succeeded(view: FabricView) -> int:
    return sum(row.endings.get(_SUCCEEDED, 0) for row in view.pools or ())


def _order(record_id: str) -> tuple[int, int]:
    ms, _, number = record_id.partition("-")
    return int(ms), int(number or 0)


def _mean(spans: list[tuple[int | None, int | None]]) -> float | None:
    known = [end - start for start, end in spans if start is not None and end is not None]
    return round(sum(known) / len(known), 1) if known else None

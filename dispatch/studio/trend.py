"""How pools move between views of a group: rates from counter differences, and shares of the cost that was served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dispatch.fabric.view import FabricView, PoolRow

WINDOW_MIN_MS = 200
"""Rates over less than this say nothing."""

_HELD_BY = ("lane_capacity", "endpoint_capacity", "endpoint_gated", "endpoint_open", "paused", "global_capacity")


class PoolTrend(msgspec.Struct, frozen=True, kw_only=True):
    """One pool over the window. None = not known (a counter was not read, or began anew).

    `backlogged`: something waited in it in every view. `hindered`: it was held by its cap, its endpoint or a pause at
    some time. `share` of the cost served in the group, and the `fair_share`: pools that were not backlogged keep what
    they used, the rest is parted by weight.
    """

    growth_per_s: float | None = None
    arriving_per_s: float | None = None
    launched_per_s: float | None = None
    rejected_per_s: float | None = None
    cost_served: int | None = None
    backlogged: bool = False
    hindered: bool = False
    share: float | None = None
    fair_share: float | None = None
    skips: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def growing(self) -> bool:
        """Whether more waits at the end than at the beginning."""
        return self.growth_per_s is not None and self.growth_per_s > 0


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """All pools over a window, by name."""

    window_ms: int
    pools: Mapping[str, PoolTrend]

    def of(self, pool_id: str) -> PoolTrend | None:
        """Return how the pool moves, or None when it is not known."""
        return self.pools.get(pool_id)


def trend_of(views: Sequence[FabricView]) -> Trend | None:
    """Compare views of one group, the oldest first. None: too few, too close together, or the pools are not known."""
    known = [view for view in views if view.pools is not None]
    if len(known) < 2:
        return None
    first, last = known[0], known[-1]
    window_ms = last.server_ms - first.server_ms
    if window_ms < WINDOW_MIN_MS:
        return None
    rows = [{row.pool_id: row for row in view.pools or ()} for view in known]
    moved = {name: _moved([each[name] for each in rows if name in each], window_ms) for name in rows[-1]}
    return Trend(window_ms=window_ms, pools=_with_shares(moved, rows[-1]))


def _moved(rows: Sequence[PoolRow], window_ms: int) -> PoolTrend:
    first, last = rows[0], rows[-1]
    if len(rows) < 2 or _went_back(first, last):
        return PoolTrend(backlogged=False)
    skips = {reason: number - first.skips.get(reason, 0) for reason, number in last.skips.items()}
    skips = {reason: number for reason, number in skips.items() if number > 0}
    held = any(reason in skips for reason in _HELD_BY) or any(
        row.paused or row.draining or row.block_reason in _HELD_BY for row in rows
    )
    refused = sum(last.rejected.values()) - sum(first.rejected.values())
    return PoolTrend(
        growth_per_s=_per_s(first.pending, last.pending, window_ms),
        arriving_per_s=_per_s(first.submitted, last.submitted, window_ms),
        launched_per_s=_per_s(first.launched, last.launched, window_ms),
        rejected_per_s=refused * 1_000 / window_ms if refused >= 0 else None,
        cost_served=_difference(first.cost_served, last.cost_served),
        backlogged=all((row.pending or 0) > 0 for row in rows),
        hindered=held,
        skips=skips,
    )


def _went_back(first: PoolRow, last: PoolRow) -> bool:
    """Say whether counters began anew: the pool was removed and made again, or the server lost data."""
    pairs = ((first.submitted, last.submitted), (first.launched, last.launched), (first.cost_served, last.cost_served))
    return any(before is not None and after is not None and after < before for before, after in pairs)


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _per_s(before: int | None, after: int | None, window_ms: int) -> float | None:
    moved = _difference(before, after)
    return None if moved is None else moved * 1_000 / window_ms


def _with_shares(moved: dict[str, PoolTrend], rows: Mapping[str, PoolRow]) -> dict[str, PoolTrend]:
    if any(each.cost_served is None for each in moved.values()):
        return moved
    served = {name: each.cost_served or 0 for name, each in moved.items()}
    total = sum(served.values())
    if total == 0:
        return moved
    asking = {
        name: rows[name].quantum or 1 for name, each in moved.items() if each.backlogged and not rows[name].paused
    }
    left = total - sum(cost for name, cost in served.items() if name not in asking)
    weights = sum(asking.values())
    return {
        name: msgspec.structs.replace(
            each,
            share=served[name] / total,
            fair_share=left * asking[name] / weights / total if name in asking else served[name] / total,
        )
        for name, each in moved.items()
    }

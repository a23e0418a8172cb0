"""What pools were served against their weights, and how fair that was.

Deficit round robin promises shares by weight only to pools that have work waiting all along (DESIGN section 6). So a
step counts a pool as backlogged when something of it waited at the step's begin and at its end, and fairness is said of
those alone: Jain's index (sum x)^2 / (n sum x^2) of x = cost served / weight (Jain, Chiu and Hawe, "A Quantitative
Measure of Fairness", DEC-TR-301, 1984).

A cap, a pause or a slow endpoint keeps a pool below its share as well: the index says that shares differ, not why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dispatch.telemetry.history.conditions import moment
from dispatch.telemetry.history.records import Filter, PoolShare, Shares, ShareStep
from dispatch.telemetry.history.schema import REQUESTS
from dispatch.telemetry.history.store import HistoryStore

_LEFT = "if(execution_ms IS NULL, ended_at, addMilliseconds(submitted_at, ifNull(queue_wait_ms, 0)))"
"""When it waited no more: it was launched, or ended in the queue."""


@dataclass(slots=True)
class _Step:
    """One pool in one step: what was launched, and what waited at its begin and its end."""

    cost: int = 0
    launched: int = 0
    waited_before: int = 0
    waits_after: int = 0


def read_shares(store: HistoryStore, group: str, wanted: Filter, step_s: int, weights: Mapping[str, int]) -> Shares:
    """Ask what was served in the filter's time, in steps; `weights` by pool, as they are now."""
    since_ms, until_ms = wanted.since_ms or 0, wanted.until_ms or 0
    step_ms = step_s * 1000
    values = {"group": group, "since_ms": since_ms, "until_ms": until_ms, "step_ms": step_ms}
    steps = -(-(until_ms - since_ms) // step_ms)
    found: dict[str, list[_Step]] = {}

    def at(pool_id: str, step: int) -> _Step:
        return found.setdefault(pool_id, [_Step() for _ in range(steps)])[step]

    first: dict[str, int] = {}
    for row in store.query(_moves(), values):
        pool_id, step = row["pool_id"], row["step"]
        if step < 0:
            first[pool_id] = row["came"] - row["gone"]
            at(pool_id, 0)
            continue
        one = at(pool_id, step)
        one.cost, one.launched = row["cost"], row["launched"]
        one.waits_after = row["came"] - row["gone"]  # a difference for now
    for pool_id, row_of_steps in found.items():
        waiting = first.get(pool_id, 0)
        for one in row_of_steps:
            one.waited_before = waiting
            waiting += one.waits_after
            one.waits_after = waiting
    made = [
        _step(since_ms + number * step_ms, {pool_id: row[number] for pool_id, row in found.items()}, weights)
        for number in range(steps)
    ]
    whole = {pool_id: _sum(row) for pool_id, row in found.items()}
    return Shares(
        since_ms=since_ms, until_ms=until_ms, step_s=step_s, total=_step(since_ms, whole, weights),
        steps=[step for step in made if step.pools],
    )  # fmt: skip


def _moves() -> str:
    """What came into and left the queues, by pool and step; step -1 is everything before."""
    step = "if(at < {since_ms:Int64}, -1, intDiv(at - {since_ms:Int64}, {step_ms:Int64}))"
    ran = "execution_ms IS NOT NULL"
    came = "(toUnixTimestamp64Milli(submitted_at), 1, 0, 0, 0)"
    left = f"(toUnixTimestamp64Milli({_LEFT}), 0, 1, toUInt8({ran}), if({ran}, cost_units, 0))"
    moves = (
        f"SELECT pool_id, arrayJoin([{came}, {left}]) AS move, move.1 AS at FROM {REQUESTS} FINAL"
        f" WHERE fabric_group_id = {{group:String}} AND ending != 'rejected' AND ended_at >= {moment('since_ms')}"
        f" AND {_LEFT} >= {moment('since_ms')} AND submitted_at < {moment('until_ms')}"
    )
    sums = "sum(move.2) AS came, sum(move.3) AS gone, sum(move.4) AS launched, sum(move.5) AS cost"
    return (
        f"SELECT pool_id, {step} AS step, {sums} FROM ({moves}) WHERE at < {{until_ms:Int64}}"
        " GROUP BY pool_id, step ORDER BY pool_id, step"
    )


def _sum(steps: Sequence[_Step]) -> _Step:
    """All steps as one: backlogged only if it was in each."""
    return _Step(
        sum(one.cost for one in steps),
        sum(one.launched for one in steps),
        min(one.waited_before for one in steps),
        min(one.waits_after for one in steps),
    )


def _step(start_ms: int, pools: Mapping[str, _Step], weights: Mapping[str, int]) -> ShareStep:
    served = sum(one.cost for one in pools.values())
    backlogged = {name for name, one in pools.items() if one.waited_before > 0 and one.waits_after > 0}
    whole = sum(weights.get(name, 0) for name in backlogged)
    rows = [
        PoolShare(
            pool_id=name, weight=weights.get(name), cost_units=one.cost, launched=one.launched,
            share=one.cost / served if served else 0.0, backlogged=name in backlogged,
            fair_share=weights[name] / whole if name in backlogged and name in weights else None,
        )
        for name, one in sorted(pools.items())
        if one.launched or one.waited_before or one.waits_after
    ]  # fmt: skip
    known = all(weights.get(name, 0) > 0 for name in backlogged)
    index = jain(pools[name].cost / weights[name] for name in backlogged) if known else None
    return ShareStep(start_ms=start_ms, jain=index, pools=rows)


def jain(values: Iterable[float]) -> float | None:
    """Return Jain's index of fairness; None for fewer than two values, or when nobody got anything."""
    given = list(values)
    squares = sum(value * value for value in given)
    if len(given) < 2 or not squares:
        return None
    return sum(given) ** 2 / (len(given) * squares)

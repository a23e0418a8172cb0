"""The ideal a fair scheduler is measured against: weighted max-min shares, by progressive filling (waterfilling).

All shares rise together in proportion to their weights. Whenever a limit is full, the members that it holds stop and
the others go on rising. The result is the one allocation in which no member can get more per weight without taking it
from a member that has no more per weight (Bertsekas and Gallager, "Data Networks", section 6.5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Limit:
    """What some members may have together: a pool's own cap, an endpoint's, or the whole group's."""

    members: Collection[str]
    amount: Fraction | int


def waterfill(weights: Mapping[str, int], limits: Collection[Limit]) -> dict[str, Fraction]:
    """Return each member's ideal share, exactly.

    Raises:
        ValueError: a member is under no limit, so its share would be endless.
    """
    shares = dict.fromkeys(weights, Fraction(0))
    rising = set(weights)
    while rising:
        steps = []
        for limit in limits:
            speed = sum(weights[member] for member in rising.intersection(limit.members))
            if speed:
                room = limit.amount - sum(shares[member] for member in limit.members)
                steps.append((Fraction(room) / speed, limit))
        if not rising.issubset({member for _, limit in steps for member in limit.members}):
            raise ValueError(f"some of {sorted(rising)} are under no limit")
        step = min(rise for rise, _ in steps)
        for member in rising:
            shares[member] += step * weights[member]
        rising -= {member for rise, limit in steps if rise == step for member in limit.members}
    return shares


def worst_lead(lead: Iterable[int]) -> int:
    """Return how much a series rises at most from any point to a later one.

    With `lead` one pool's service minus another's: how far the first gets ahead over any window.
    """
    worst, lowest = 0, None
    for value in lead:
        lowest = value if lowest is None else min(lowest, value)
        worst = max(worst, value - lowest)
    return worst

"""Counts of one process, as cheap as a dictionary.

Counted in the event loop, read by another thread at a scrape: a reader copies, which is one step of the interpreter.
OpenTelemetry's own instruments take forty times as long for each value; these are handed to its readers instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from dispatch.telemetry.metrics.catalogue import Family

Labels = tuple[str, ...]
"""Values of a family's labels, in its order; "" = that label does not apply."""


class Buckets:
    """A histogram of one set of labels. A value on a bound counts below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


Value = float | Buckets
Reading = tuple[Family, Mapping[Labels, Value]]
"""One family and what it stands at."""


class Counter:
    """A counter family."""

    __slots__ = ("family", "values")

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[Labels, float] = {}

    def add(self, *labels: str, by: float = 1) -> None:
        """Count `by` under these labels."""
        self.values[labels] = self.values.get(labels, 0) + by

    def read(self) -> Reading:
        """Return what was counted."""
        return self.family, self.values.copy()


class Histogram:
    """A histogram family."""

    __slots__ = ("family", "values")

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[Labels, Buckets] = {}

    def add(self, value: float, *labels: str) -> None:
        """Count `value` under these labels."""
        buckets = self.values.get(labels)
        if buckets is None:
            buckets = self.values[labels] = Buckets(self.family.bounds)
        buckets.add(value)

    def read(self) -> Reading:
        """Return what was counted."""
        return self.family, self.values.copy()


class Capped:
    """Keeps the values of a label that clients name within a bound: the first ones are themselves, the rest `other`.

    What cannot be printed (NUL, escape codes, lone surrogates) is U+FFFD in them, so that a client cannot make the page
    one that a terminal, a tool or an encoder does not take.
    """

    OTHER = "other"

    def __init__(self, most: int = 1000, longest: int = 128) -> None:
        self._most = most
        self._longest = longest
        self._known = set[str]()
        self.folded = 0
        """How often a value was `other`."""

    def __call__(self, value: str) -> str:
        """Return the label for `value`."""
        if not value.isprintable():
            value = "".join(each if each.isprintable() else "\ufffd" for each in value[: self._longest + 1])
        if value in self._known:
            return value
        if len(self._known) >= self._most or len(value) > self._longest:
            self.folded += 1
            return self.OTHER
        self._known.add(value)
        return value

"""Numbers and reasons in words, the same on the page, in the terminal and in the doctor's findings.

A value that is not 0 never reads as 0, and one that is not known reads `unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "unknown"
NARROW = "\u202f"
"""Narrow no-break space: parts thousands."""

_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000


@dataclass(frozen=True, slots=True)
class Reason:
    """A skip reason in words: `tone` is work, hold, broken, person or grey; `look` is what to look at first."""

    icon: str
    tone: str
    why: str
    look: str = ""


FLOWING = Reason("chevrons", "work", "Flowing")
NOT_KNOWN = Reason("dashed", "grey", "Reason unknown (snapshot has none)", "System")

REASONS: dict[str, Reason] = {
    "insufficient_credit": Reason("chevrons", "work", "Its turn is next", "weight, cost"),
    "protected": Reason("bars", "hold", "Leaves room for protected pools", "their min_concurrent"),
    "lane_capacity": Reason("bars", "hold", "Pool is at its cap", "max_concurrent"),
    "global_capacity": Reason("bars", "hold", "Group is at its cap", "total_concurrent_dispatch"),
    "endpoint_capacity": Reason("bars", "hold", "Endpoint is full", "endpoint cap"),
    "endpoint_gated": Reason("hourglass", "hold", "Gate holds", "engine queue, ms per token"),
    "endpoint_open": Reason("octagon", "broken", "Breaker is open", "address, backend health"),
    "paused": Reason("pause", "person", "Paused", "who, why"),
    "draining": Reason("drain", "person", "Draining", "who, why"),
    "malformed_head": Reason("octagon", "broken", "Unreadable request at the head, being removed", "producer version"),
}
"""By the schema's skip reasons, and `draining`."""


def count(number: float | None) -> str:
    """Return a whole number with its thousands apart: `2 601`."""
    return UNKNOWN if number is None else f"{number:,.0f}".replace(",", NARROW)


def duration(ms: float | None) -> str:
    """Return a time span: `136 ms`, `5.8 s`, `48 s`, `2 m 22 s`, `3 h 05 m`, `2 d 9 h`."""
    if ms is None:
        return UNKNOWN
    if ms <= 0:
        return "0 ms"
    if ms < 1:
        return "< 1 ms"
    for bound, told in ((999.5, _ms), (9_950, _tenths), (59_500, _seconds), (_HOUR - 500, _minutes)):
        if ms < bound:
            return told(ms)
    if ms < _DAY - _MINUTE / 2:
        minutes = round(ms / _MINUTE)
        return f"{minutes // 60} h {minutes % 60:02d} m"
    hours = round(ms / _HOUR)
    return f"{hours // 24} d {hours % 24} h"


def rate(per_s: float | None) -> str:
    """Return a rate: `12.3/s`, a small one by the minute: `0.2/min`."""
    if per_s is None:
        return UNKNOWN
    if per_s == 0:
        return "0/s"
    if per_s >= 0.1:
        return f"{per_s:.1f}/s" if per_s < 100 else f"{count(per_s)}/s"
    per_min = per_s * 60
    return f"{per_min:.1f}/min" if per_min >= 0.1 else "< 0.1/min"


def percent(part: float | None, whole: float | None = 1.0) -> str:
    """Return a share: one decimal under 10 %, else whole."""
    if part is None or whole is None:
        return UNKNOWN
    if whole == 0:
        return "\u2013"
    value = 100 * part / whole
    if value == 0 or value >= 9.95:
        return f"{value:.0f} %"
    return f"{value:.1f} %" if value >= 0.1 else "< 0.1 %"


def plural(number: int, one: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{count(number)} {one if number == 1 else many}"


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms"


def _tenths(ms: float) -> str:
    return f"{ms / _SECOND:.1f} s"


def _seconds(ms: float) -> str:
    return f"{ms / _SECOND:.0f} s"


def _minutes(ms: float) -> str:
    seconds = round(ms / _SECOND)
    return f"{seconds // 60} m {seconds % 60:02d} s"

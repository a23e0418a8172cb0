"""How long an endpoint asks to be left alone, from whatever its headers say.

Sources: RFC 9110 section 10.2.3 (`Retry-After`: seconds or a date), and `retry-after-ms`, which hosted backends send
beside it because it is finer. What cannot be read is as good as absent; nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

HOLD_CAP_MS = 60_000
"""No header holds an endpoint longer: one bad value must not take it out of service."""

HOLD_DEFAULT_MS = 1_000
"""Hold of a 429 or 503 that names no readable time."""

HOLD_FLOOR_MS = 100
"""Least hold, also for "0" and dates in the past: who just refused is not asked again in the same instant."""

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?", re.ASCII)
_MAX_DIGITS = 12
_MAX_DATE_LENGTH = 64


def hold_ms(headers: Iterable[tuple[str, str]], *, now: datetime) -> int:
    """Return the hold in ms, between the floor and the cap, from a 429's or 503's headers (names in lower case).

    `retry-after-ms` wins over `retry-after`; of several readable values of one name the longest counts. A date is
    compared with the answer's own `date` where it has one (the endpoint's clock may be wrong, the difference is not),
    else with `now`.
    """
    fields = list(headers)
    millis = [found for name, value in fields if name == "retry-after-ms" and (found := _number(value)) is not None]
    if millis:
        return _bounded(max(millis))
    clock = next((date for name, value in fields if name == "date" and (date := _date(value)) is not None), now)
    waits = [found for name, value in fields if name == "retry-after" and (found := _wait_ms(value, clock)) is not None]
    return _bounded(max(waits)) if waits else HOLD_DEFAULT_MS


def _wait_ms(value: str, clock: datetime) -> float | None:
    seconds = _number(value)
    if seconds is not None:
        return seconds * 1000
    date = _date(value)
    return None if date is None else (date - clock).total_seconds() * 1000


def _number(value: str) -> float | None:
    text = value.strip()
    if _NUMBER.fullmatch(text) is None:
        return None
    # Python refuses to convert thousands of digits; any number this long is beyond the cap.
    return float("inf") if len(text.partition(".")[0]) > _MAX_DIGITS else float(text[:40])


def _date(value: str) -> datetime | None:
    if len(value) > _MAX_DATE_LENGTH:
        return None
    try:
        date = parsedate_to_datetime(value.strip())
        # "-0000" and asctime dates come without a zone; HTTP dates are GMT. Odd zones may leave datetime's range.
        return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _bounded(value: float) -> int:
    return int(min(max(value, HOLD_FLOOR_MS), HOLD_CAP_MS))

"""Retry-After in every legal and illegal form: a bounded hold, never an exception."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dispatch.backend.retry_after import HOLD_CAP_MS, HOLD_DEFAULT_MS, HOLD_FLOOR_MS, hold_ms

NOW = datetime(2026, 7, 7, 12, 0, 0, tzinfo=UTC)


def hold(*values: str, name: str = "retry-after") -> int:
    return hold_ms([(name, value) for value in values], now=NOW)


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        ("2", 2_000),
        ("1.5", 1_500),
        ("1.", 1_000),
        (" 7 ", 7_000),
        ("0", HOLD_FLOOR_MS),
        ("0.0001", HOLD_FLOOR_MS),
        ("60", HOLD_CAP_MS),
        ("61", HOLD_CAP_MS),
        ("999999999", HOLD_CAP_MS),
        ("9" * 5_000, HOLD_CAP_MS),
        ("1." + "9" * 5_000, 2_000),
        ("Tue, 07 Jul 2026 12:00:03 GMT", 3_000),
        ("Tuesday, 07-Jul-26 12:00:03 GMT", 3_000),
        ("Tue Jul  7 12:00:03 2026", 3_000),
        ("Tue, 07 Jul 2026 14:00:03 +0200", 3_000),
        ("Tue, 07 Jul 2026 12:00:03 -0000", 3_000),
        ("Thu, 01 Jan 1970 00:00:00 GMT", HOLD_FLOOR_MS),
        ("Fri, 31 Dec 9999 23:59:59 GMT", HOLD_CAP_MS),
    ],
)
def test_readable_values(value: str, ms: int) -> None:
    assert hold(value) == ms


@pytest.mark.parametrize(
    "value",
    [
        "",
        "soon",
        "-5",
        "+5",
        "1e3",
        "0x10",
        "1_000",
        "1,5",
        "nan",
        "inf",
        "٣",
        "2s",
        "Sat, 01 Jan 10000 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999",
        "Mon, 32 Foo 2026 99:99:99 GMT",
        "Tue, 07 Jul 2026 12:00:03 GMT" + " " * 5_000,
        "\0",
        "\xff",
        "\ud800",
    ],
)
def test_unreadable_values_are_as_none(value: str) -> None:
    assert hold(value) == HOLD_DEFAULT_MS


def test_no_header_at_all() -> None:
    assert hold_ms([], now=NOW) == HOLD_DEFAULT_MS


def test_of_two_headers_the_readable_and_then_the_longer_counts() -> None:
    assert hold("soon", "3") == 3_000
    assert hold("3", "soon") == 3_000
    assert hold("2", "9") == 9_000
    assert hold("soon", "Thu, 01 Jan 2026 00:00:00 GMT") == HOLD_FLOOR_MS


def test_milliseconds_win_where_they_are_readable() -> None:
    assert hold_ms([("retry-after", "2"), ("retry-after-ms", "1500")], now=NOW) == 1_500
    assert hold_ms([("retry-after", "2"), ("retry-after-ms", "-1")], now=NOW) == 2_000
    assert hold("99999999", name="retry-after-ms") == HOLD_CAP_MS


def test_a_date_is_compared_with_the_endpoints_own_clock() -> None:
    wrong_by_a_day = [("date", "Mon, 06 Jul 2026 12:00:00 GMT"), ("retry-after", "Mon, 06 Jul 2026 12:00:04 GMT")]
    assert hold_ms(wrong_by_a_day, now=NOW) == 4_000
    unreadable = [("date", "today"), ("retry-after", "Tue, 07 Jul 2026 12:00:05 GMT")]
    assert hold_ms(unreadable, now=NOW) == 5_000

"""Numbers as the page and the terminal write them."""

from __future__ import annotations

import pytest

from dispatch.fabric.schema import document
from dispatch.studio.words import REASONS, count, duration, percent, rate


@pytest.mark.parametrize(
    ("ms", "told"),
    [
        (None, "unknown"), (0, "0 ms"), (0.3, "< 1 ms"), (136, "136 ms"), (999.7, "1.0 s"), (5_800, "5.8 s"),
        (9_960, "10 s"), (48_000, "48 s"), (59_800, "1 m 00 s"), (142_000, "2 m 22 s"), (3_599_800, "1 h 00 m"),
        (11_100_000, "3 h 05 m"), (86_399_000, "1 d 0 h"), (205_200_000, "2 d 9 h"),
    ],
)  # fmt: skip
def test_duration(ms: float | None, told: str) -> None:
    assert duration(ms) == told


@pytest.mark.parametrize(
    ("per_s", "told"),
    [(None, "unknown"), (0, "0/s"), (12.34, "12.3/s"), (2_601, "2\u202f601/s"), (0.0034, "0.2/min"),
     (0.0001, "< 0.1/min")],
)  # fmt: skip
def test_rate(per_s: float | None, told: str) -> None:
    assert rate(per_s) == told


@pytest.mark.parametrize(
    ("part", "told"),
    [(None, "unknown"), (0, "0 %"), (0.0004, "< 0.1 %"), (0.034, "3.4 %"), (0.0999, "10 %"), (0.27, "27 %")],
)
def test_percent(part: float | None, told: str) -> None:
    assert percent(part) == told


def test_percent_of_nothing_does_not_apply() -> None:
    assert percent(0, 0) == "\u2013"


def test_count() -> None:
    assert (count(None), count(7), count(2_601_000)) == ("unknown", "7", "2\u202f601\u202f000")


def test_every_skip_reason_has_words() -> None:
    assert set(document()["skips"]["reasons"]) <= set(REASONS)

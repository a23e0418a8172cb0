"""Fixtures of the behaviour tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.by_hand import ByHand
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def hand(valkey: ValkeyProcess, group: str) -> Iterator[ByHand]:
    """Producers and gateways by hand, on a group of the test's own with the default pools and 8 slots."""
    made = ByHand(valkey.url, group)
    yield made
    made.close()

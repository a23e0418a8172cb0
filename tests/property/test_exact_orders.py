"""The exact orders and shares of DESIGN section 6, on the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatch.fabric.sync import BlockingConnection
from tests.model.bench import ServerBench
from tests.model.scenarios import CLAIM_SIZES, SCENARIOS, Scenario
from tests.support.groups import unique_group
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def bench(valkey: ValkeyProcess) -> Iterator[ServerBench]:
    with BlockingConnection(valkey.url) as connection:
        yield ServerBench(connection, unique_group())


@pytest.mark.parametrize("size", CLAIM_SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_server_holds_the_exact_orders(bench: ServerBench, scenario: Scenario, size: int) -> None:
    scenario(bench, size)

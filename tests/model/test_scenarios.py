from __future__ import annotations

import pytest

from tests.model.bench import TwinBench
from tests.model.scenarios import CLAIM_SIZES, SCENARIOS, Scenario


@pytest.mark.parametrize("size", CLAIM_SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_twin_holds_the_exact_orders(scenario: Scenario, size: int) -> None:
    scenario(TwinBench(), size)

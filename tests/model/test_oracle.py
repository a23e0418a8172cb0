from __future__ import annotations

import random
from fractions import Fraction

import pytest

from tests.model.oracle import Limit, waterfill, worst_lead


def test_one_limit_is_shared_by_weight() -> None:
    assert waterfill({"a": 4, "b": 2, "c": 1, "d": 1}, [Limit("abcd", 8)]) == {"a": 4, "b": 2, "c": 1, "d": 1}


def test_what_a_capped_member_cannot_use_goes_to_the_others_by_weight() -> None:
    shares = waterfill({"a": 4, "b": 2, "c": 1}, [Limit("abc", 8), Limit("a", 2)])
    assert shares == {"a": 2, "b": 4, "c": 2}


def test_members_behind_a_full_endpoint_share_it_by_weight() -> None:
    shares = waterfill({"a": 4, "b": 1, "c": 1}, [Limit("abc", 8), Limit("ab", 1)])
    assert shares == {"a": Fraction(4, 5), "b": Fraction(1, 5), "c": 7}


def test_an_endpoint_and_a_cap_inside_it() -> None:
    shares = waterfill({"a": 3, "b": 1, "c": 1}, [Limit("abc", 10), Limit("ab", 4), Limit("a", 2)])
    assert shares == {"a": 2, "b": 2, "c": 6}


def test_limits_that_are_not_reached_change_nothing() -> None:
    assert waterfill({"a": 1, "b": 1}, [Limit("ab", 4), Limit("a", 100)]) == {"a": 2, "b": 2}


def test_no_room_is_no_share() -> None:
    assert waterfill({"a": 1, "b": 1}, [Limit("ab", 4), Limit("a", 0)]) == {"a": 0, "b": 4}


def test_member_under_no_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="b"):
        waterfill({"a": 1, "b": 1}, [Limit("a", 4)])


@pytest.mark.parametrize("seed", range(20))
def test_nobody_can_get_more_per_weight_without_taking_it_from_someone_with_no_more(seed: int) -> None:
    """Every member meets a full limit in which nobody has more per weight: the definition of weighted max-min."""
    chance = random.Random(seed)
    weights = {name: chance.randint(1, 9) for name in "abcdef"}
    limits = [Limit("abcdef", chance.randint(1, 20))]
    limits += [Limit(chance.sample("abcdef", chance.randint(1, 4)), chance.randint(0, 9)) for _ in range(4)]
    shares = waterfill(weights, limits)
    full = [limit for limit in limits if sum(shares[member] for member in limit.members) == limit.amount]
    assert all(sum(shares[member] for member in limit.members) <= limit.amount for limit in limits)
    for member, weight in weights.items():
        level = shares[member] / weight
        assert any(
            member in limit.members and all(shares[other] / weights[other] <= level for other in limit.members)
            for limit in full
        )


def test_worst_lead_is_the_greatest_rise_over_any_window() -> None:
    assert worst_lead([0, 3, 1, 2, -5, -4, 1, 0]) == 6
    assert worst_lead([0, -1, -2]) == 0
    assert worst_lead([]) == 0

"""Fairness keys and priorities inside a pool, and costs settled afterwards: DESIGN section 6 on the twin."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import permutations

import pytest
from msgspec.structs import replace

from dispatch.fabric import records as r
from tests.model.bench import TwinBench, document, submission
from tests.model.oracle import worst_lead
from tests.model.reference import Claimant, Reference

M = 16
SEEDS = range(10)


def keys_of(bench: TwinBench) -> list[str]:
    """Return the fairness keys of what runs, in launch order."""
    return [bench.twin.group.requests[lease.request_id].flow for lease in bench.running]


@pytest.mark.parametrize("seed", SEEDS)
def test_two_waiting_keys_differ_by_two_greatest_costs_at_most(seed: int) -> None:
    chance = random.Random(seed)
    bench = TwinBench()
    bench.configure(document({"a": {}}))
    keys = ["k", "l", "m", ""]
    for key in keys:
        bounds = chance.choice(((1, 1), (1, M), (M, M)))
        for _ in range(150):
            bench.submit("a", cost=chance.randint(*bounds), key=key)
    served = dict.fromkeys([key or "*" for key in keys], 0)
    leads: dict[tuple[str, str], list[int]] = {pair: [0] for pair in permutations(served, 2)}
    waiting = dict.fromkeys(served, 150)
    while all(waiting.values()):
        before = len(bench.running)
        bench.claim(chance.randint(1, 8))
        for lease in bench.running[before:]:
            flow = bench.twin.group.requests[lease.request_id].flow
            if not all(waiting.values()):
                break
            served[flow] += lease.cost
            waiting[flow] -= 1
            for (first, second), lead in leads.items():
                lead.append(served[first] - served[second])
    for lead in leads.values():
        assert worst_lead(lead) <= 2 * M


def test_newcomer_among_many_keys_is_served_within_one_round_of_them() -> None:
    bench = TwinBench()
    bench.configure(document({"a": {}}))
    for number in range(50):
        bench.submit("a", 20, cost=M, key=f"k{number}")
    bench.claim(64)
    bench.submit("a", cost=1, key="new")
    bench.claim(51)
    assert "new" in keys_of(bench)[64:]


def test_key_that_leaves_and_returns_gains_nothing() -> None:
    bench = TwinBench()
    bench.configure(document({"a": {}}))
    bench.submit("a", 40, cost=1, key="steady")
    for _ in range(10):
        bench.submit("a", cost=4, key="returns")
        bench.claim(5)
    flows = keys_of(bench)
    assert flows.count("returns") <= 11
    assert flows.count("steady") >= 39


def test_idle_keys_are_forgotten_when_the_pool_has_passed_them() -> None:
    bench = TwinBench()
    bench.configure(document({"a": {}}))
    pool = bench.twin.group.pools["a"]
    bench.submit("a", cost=3, key="k")
    bench.claim(1)
    assert (pool.keyed, pool.idle_tags) == (True, {"k": 3})
    bench.submit("a", 5, cost=1, key="l")
    bench.claim(5)
    bench.submit("a", cost=1)
    bench.claim(1)
    assert pool.idle_tags == {"l": 5, "*": 5}


def test_request_is_overtaken_only_by_a_better_level_within_the_ageing_time() -> None:
    twin = Reference()
    twin.configure(
        document({"a": {"priority_ageing_ms": 1_000}}), expected_generation=0, actor="test", nonce="first"
    )  # fmt: skip
    arrivals = (("usual", 0, None), ("soon better", 999, 0), ("late better", 1_001, 0), ("worse", 1_002, 3))
    for name, at, level in arrivals:
        twin.submit(replace(submission(name.replace(" ", "-"), "a", 1), priority=level), 5_000 + at)
    claim = twin.claim(Claimant("g", "g/group", "n"), 9, 9_000)
    assert [lease.request_id for lease in claim.leases] == ["soon-better", "usual", "late-better", "worse"]


def test_request_given_back_in_a_pool_with_keys_goes_first_and_is_not_charged_twice() -> None:
    bench = TwinBench()
    bench.configure(document({"a": {}}))
    bench.submit("a", 2, cost=4, key="k")
    bench.submit("a", 2, cost=4, key="l")
    bench.claim(1)
    (lease,) = bench.running
    tags = dict(bench.twin.group.pools["a"].tags)
    item = r.Settlement(request_id=lease.request_id, fence=lease.fence, outcome=r.Outcome.RELEASE)
    answer = bench.twin.settle(Claimant("g", "g/group", "n"), 1, [item], TwinBench.NOW)
    assert [again.request_id for again in answer.claim.leases] == [lease.request_id]
    assert bench.twin.group.pools["a"].tags == tags


class TestSettledCost:
    def test_pool_pays_what_its_request_cost_more(self) -> None:
        bench = TwinBench()
        bench.configure(document({"a": {"quantum": 4}, "b": {}}))
        bench.submit("a", 20)
        bench.submit("b", 20)
        assert bench.claim(1) == ["a"]
        bench.settle(bench.running, actual=lambda _: 9)
        pool = bench.twin.group.pools["a"]
        assert (pool.deficit, pool.cost_served) == (4 - 9, 9)
        assert bench.claim(6) == ["b", "b", "a", "a", "a", "b"]

    def test_actual_cost_is_clamped_and_an_empty_pool_keeps_debt_only(self) -> None:
        bench = TwinBench()
        bench.configure(document({"a": {"quantum": 1}}))
        pool = bench.twin.group.pools["a"]
        bench.submit("a", cost=8)
        bench.claim(1)
        bench.settle(bench.running, actual=lambda _: 99)
        assert pool.deficit == 8 - M
        bench.submit("a", cost=8)
        bench.claim(1)
        bench.settle(bench.running, actual=lambda _: 0)
        assert pool.deficit == 0

    @pytest.mark.parametrize("seed", SEEDS)
    def test_bound_with_settlement(self, seed: int) -> None:
        chance = random.Random(seed)
        quanta = {name: chance.choice((1, 2, 3, 8)) for name in "abc"}
        slots = chance.choice((1, 3, 6))
        bench = TwinBench()
        bench.configure(document({name: {"quantum": quantum} for name, quantum in quanta.items()}, total=slots))
        group = bench.twin.group
        served = {pair: [0] for pair in permutations("abc", 2)}
        for name in "abc":
            bench.submit(name, 10, cost=chance.randint(1, M))
        for _ in range(500):
            bench.claim(chance.randint(1, slots))
            for name in "abc":
                for _ in range(10 - len(group.pools[name].live)):
                    bench.submit(name, cost=chance.randint(1, M))
            bench.settle(
                chance.sample(bench.running, chance.randint(0, len(bench.running))),
                actual=lambda _: chance.randint(1, M),
            )
            for (first, second), lead in served.items():
                own, other = group.pools[first].cost_served, group.pools[second].cost_served
                lead.append(own * quanta[second] - other * quanta[first])
        for (first, second), lead in served.items():
            ahead = Fraction(worst_lead(lead), quanta[first] * quanta[second])
            per_pool = Fraction((M - 1) * (1 + 2 * slots))
            assert ahead <= 1 + per_pool / quanta[first] + per_pool / quanta[second]

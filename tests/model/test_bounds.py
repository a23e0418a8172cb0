"""The twin keeps DESIGN's fairness bounds over every window, launches in order under fifo, and never idles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from tests.model.bench import TwinBench, document
from tests.model.oracle import Limit, waterfill, worst_lead

M = 16
LAUNCHES = 600
SEEDS = range(12)


class Crowd:
    """Pools with random work under random claims of several gateways, and every launch on record."""

    def __init__(self, seed: int, pools: dict[str, dict[str, Any]], **group: Any) -> None:
        self.chance = random.Random(seed)
        self.bench = TwinBench()
        self.bench.configure(document(pools, **group))
        self.quanta = {name: pool.get("quantum", 1) for name, pool in pools.items()}
        self.costs = {name: self.chance.choice(((1, 1), (1, 16), (16, 16), (1, 4))) for name in pools}
        self.log: list[tuple[str, int, frozenset[str]]] = []
        """Pool and cost of each launch, and the pools that had work left after it."""

    def run(self, *, always_busy: bool, launches: int = LAUNCHES) -> None:
        """Go on until so many launches were made. `always_busy`: no pool's work ever runs out.

        Some of what waits is cancelled, so that pools have dead heads; those cost neither credit nor burst.
        """
        while len(self.log) < launches:
            for name, bounds in self.costs.items():
                missing = (40 if always_busy else 8) - len(self._group.pools[name].live)
                if always_busy or self.chance.random() < 0.1:
                    for _ in range(missing):
                        self.bench.submit(name, cost=self.chance.randint(*bounds))
            if self.chance.random() < 0.2:
                pool = self._group.pools[self.chance.choice(list(self.costs))]
                for request in pool.live[: self.chance.randint(0, 3) if len(pool.live) > 9 else 0]:
                    self.bench.twin.cancel(request.id, "test", TwinBench.NOW)
            self._claim_some()
            ending = self.chance.sample(self.bench.running, self.chance.randint(0, len(self.bench.running)))
            self.bench.settle(ending)

    def lead(self, first: str, second: str) -> Fraction:
        """Return how far `first` got ahead of `second` in any window in which both had work, in service per quantum."""
        ahead, worst, series = 0, 0, [0]
        for pool, cost, busy in self.log:
            if pool == first:
                ahead += cost * self.quanta[second]
            elif pool == second:
                ahead -= cost * self.quanta[first]
            series.append(ahead)
            if not {first, second} <= busy:
                worst, series = max(worst, worst_lead(series)), [ahead]
        return Fraction(max(worst, worst_lead(series)), self.quanta[first] * self.quanta[second])

    @property
    def _group(self) -> Any:
        return self.bench.twin.group

    def _claim_some(self) -> None:
        before = len(self.bench.running)
        waiting = {name: [request.cost for request in pool.live] for name, pool in self._group.pools.items()}
        want = self.chance.choice((1, 1, 2, 3, 8))
        self.bench.claim(want, gateway=self.chance.choice("gh"))
        made = self.bench.running[before:]
        for lease in made:
            cost = waiting[lease.pool_id].pop(0)
            self.log.append((lease.pool_id, cost, frozenset(name for name, costs in waiting.items() if costs)))
        if len(made) < want:
            assert not self.bench.twin.eligible(TwinBench.NOW)


def quantum(chance: random.Random) -> int:
    return chance.choice((1, 1, 2, 3, 4, 8, 20))


def plain_bound(own: int, other: int) -> Fraction:
    return 1 + (M - 1) * (Fraction(1, own) + Fraction(1, other))


@pytest.mark.parametrize("always_busy", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_uncapped_pools(seed: int, *, always_busy: bool) -> None:
    chance = random.Random(seed)
    pools = {name: {"quantum": quantum(chance)} for name in "abcd"}
    crowd = Crowd(seed, pools, total=chance.choice((1, 4, 1_000)))
    crowd.run(always_busy=always_busy)
    for first in pools:
        for second in set(pools) - {first}:
            assert crowd.lead(first, second) <= plain_bound(crowd.quanta[first], crowd.quanta[second])


@pytest.mark.parametrize("always_busy", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_pools_behind_one_endpoint(seed: int, *, always_busy: bool) -> None:
    chance = random.Random(seed)
    pools = {name: {"quantum": quantum(chance), "endpoint": "slow"} for name in "abc"} | {
        name: {"quantum": quantum(chance)} for name in "xy"
    }
    slow = {"max_concurrent": chance.randint(1, 3)}
    crowd = Crowd(seed, pools, total=chance.choice((3, 6, 1_000)), endpoints={"default": {}, "slow": slow})
    crowd.run(always_busy=always_busy)
    for first in "abc":
        for second in set("abc") - {first}:
            assert crowd.lead(first, second) <= plain_bound(crowd.quanta[first], crowd.quanta[second])
        for free in "xy":
            assert crowd.lead(first, free) <= 1 + plain_bound(crowd.quanta[first], crowd.quanta[free])
    assert crowd.lead("x", "y") <= plain_bound(crowd.quanta["x"], crowd.quanta["y"])


@pytest.mark.parametrize("seed", SEEDS)
def test_capped_pools_ahead_of_free_ones(seed: int) -> None:
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"quantum": quantum(chance)} for name in "abxy"}
    for name in "ab":
        pools[name]["max_concurrent"] = chance.randint(1, 3)
    crowd = Crowd(seed, pools, total=chance.choice((3, 6, 1_000)))
    crowd.run(always_busy=True)
    for capped in "ab":
        for free in "xy":
            assert crowd.lead(capped, free) <= 1 + plain_bound(crowd.quanta[capped], crowd.quanta[free])
    assert crowd.lead("x", "y") <= plain_bound(crowd.quanta["x"], crowd.quanta["y"])


@pytest.mark.parametrize("seed", SEEDS)
def test_burst_limited_pools_ahead_of_free_ones(seed: int) -> None:
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"quantum": quantum(chance)} for name in "abxy"}
    for name in "ab":
        pools[name]["max_burst_per_visit"] = chance.randint(1, 3)
    crowd = Crowd(seed, pools, total=chance.choice((3, 6, 1_000)))
    crowd.run(always_busy=True)
    for bursty in "ab":
        for free in "xy":
            own, other = crowd.quanta[bursty], crowd.quanta[free]
            assert crowd.lead(bursty, free) <= 1 + Fraction(M, own) + Fraction(M - 1, other)


@pytest.mark.parametrize("seed", SEEDS)
def test_free_pools_ahead_of_protected_ones(seed: int) -> None:
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"quantum": quantum(chance)} for name in "abxy"}
    for name in "ab":
        pools[name]["min_concurrent"] = chance.randint(1, 2)
    crowd = Crowd(seed, pools, total=chance.choice((5, 8)))
    crowd.run(always_busy=True)
    for free in "xy":
        for protected in "ab":
            own, other = crowd.quanta[free], crowd.quanta[protected]
            assert crowd.lead(free, protected) <= 1 + Fraction(M - 1, own) + Fraction(2 * M - 1, other)


@pytest.mark.parametrize("always_busy", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_at_once(seed: int, *, always_busy: bool) -> None:
    """Caps, bursts, minima and endpoints of others do not touch what two plain pools owe each other."""
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"quantum": quantum(chance)} for name in "xyabcdefg"}
    for name in "bcd":
        pools[name]["endpoint"] = "slow"
    pools["a"]["max_concurrent"] = chance.randint(1, 3)
    pools["d"]["min_concurrent"] = chance.randint(1, 2)
    pools["e"]["min_concurrent"] = chance.randint(1, 2)
    pools["f"]["max_burst_per_visit"] = chance.randint(1, 3)
    pools["g"] |= {"max_concurrent": 2, "min_concurrent": 1, "max_burst_per_visit": 2}
    slow = {"max_concurrent": chance.randint(1, 4)}
    crowd = Crowd(seed, pools, total=chance.choice((6, 9, 1_000)), endpoints={"default": {}, "slow": slow})
    crowd.run(always_busy=always_busy)
    for first, second in ("xy", "yx", "bc", "cb"):
        assert crowd.lead(first, second) <= plain_bound(crowd.quanta[first], crowd.quanta[second])
    for free in "xy":
        own, other = crowd.quanta[free], crowd.quanta["e"]
        assert crowd.lead(free, "e") <= 1 + Fraction(M - 1, own) + Fraction(2 * M - 1, other)
        assert crowd.lead("a", free) <= 1 + plain_bound(crowd.quanta["a"], own)
        assert crowd.lead("f", free) <= 1 + Fraction(M, crowd.quanta["f"]) + Fraction(M - 1, own)


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    "bound",
    [
        test_uncapped_pools,
        test_pools_behind_one_endpoint,
        test_capped_pools_ahead_of_free_ones,
        test_burst_limited_pools_ahead_of_free_ones,
        test_free_pools_ahead_of_protected_ones,
        test_everything_at_once,
    ],
)
def test_many_more_crowds(bound: Callable[..., None]) -> None:
    for seed in range(1_000, 1_200):
        for busy in (
            ({"always_busy": True}, {"always_busy": False}) if "always_busy" in bound.__annotations__ else ({},)
        ):
            bound(seed, **busy)


@pytest.mark.parametrize("seed", SEEDS)
def test_order_does_not_depend_on_how_many_are_claimed_at_once(seed: int) -> None:
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"quantum": quantum(chance)} for name in "abcdefghijkl"}
    pools["a"] |= {"max_burst_per_visit": 2}
    pools["b"] |= {"max_concurrent": 3}
    pools["c"] |= {"min_concurrent": 2, "endpoint": "slow"}
    pools["d"] |= {"endpoint": "slow"}
    work = [(chance.choice("abcdefghijkl"), chance.choice((1, 3, 16))) for _ in range(120)]
    orders = []
    for size in (1, 2, 3, 7, 64):
        bench = TwinBench()
        bench.configure(document(pools, endpoints={"default": {}, "slow": {"max_concurrent": 5}}))
        for pool, cost in work:
            bench.submit(pool, cost=cost)
        order: list[str] = []
        while made := bench.claim(size):
            order += made
        orders.append(order)
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) > 60


@pytest.mark.parametrize("seed", SEEDS)
def test_fifo_launches_the_oldest_that_may_run(seed: int) -> None:
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"endpoint": chance.choice(("slow", "default"))} for name in "abcd"}
    pools["a"]["max_concurrent"] = 2
    crowd = Crowd(seed, pools, policy="fifo", total=6, endpoints={"default": {}, "slow": {"max_concurrent": 2}})
    bench, twin, now = crowd.bench, crowd.bench.twin, TwinBench.NOW
    for _ in range(400):
        bench.submit(chance.choice("abcd"))
        if chance.random() < 0.3:
            waiting = [request.id for pool in twin.group.pools.values() for request in pool.live]
            twin.cancel(chance.choice(waiting), "test", now)
        heads = [twin.launchable(name, now) for name in twin.eligible(now)]
        oldest = min((head.seq for head in heads if head is not None), default=None)
        made = bench.claim(1)
        assert [twin.group.requests[lease.request_id].seq for lease in bench.running[-1:]] == [oldest] if made else True
        assert bool(made) == (oldest is not None)
        if chance.random() < 0.7:
            bench.settle(chance.sample(bench.running, min(1, len(bench.running))))


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_come_near_the_ideal(seed: int) -> None:
    """Equal costs and equal run times: slots per round are the weighted max-min shares."""
    chance = random.Random(seed)
    pools: dict[str, dict[str, Any]] = {name: {"quantum": chance.randint(1, 6)} for name in "abcde"}
    for name in "ab":
        pools[name]["endpoint"] = "slow"
    cap, total, slow = chance.randint(1, 4), chance.randint(4, 12), chance.randint(1, 3)
    pools["c"]["max_concurrent"] = cap
    crowd = Crowd(seed, pools, total=total, endpoints={"default": {}, "slow": {"max_concurrent": slow}})
    rounds, served = 300, Counter[str]()
    for name in pools:
        crowd.bench.submit(name, 30)
    for _ in range(rounds):
        for name in crowd.bench.claim(64):
            served[name] += 1
            crowd.bench.submit(name)
        crowd.bench.settle(list(crowd.bench.running))
    limits = [Limit("abcde", total), Limit("ab", slow), Limit("c", cap)]
    ideal = waterfill({name: pool["quantum"] for name, pool in pools.items()}, limits)
    for name in pools:
        assert abs(served[name] / rounds - ideal[name]) <= 0.1, (name, served, ideal)

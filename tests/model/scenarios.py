"""Orders and shares that must hold exactly, as DESIGN section 6 states them. Run on the twin and on a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.model.bench import Bench, document
from tests.model.oracle import Limit, waterfill

Scenario = Callable[[Bench, int], None]

CLAIM_SIZES = (1, 2, 3, 7, 64)
ROUNDS = 6


def _launches(bench: Bench, count: int, size: int) -> str:
    """Launch `count` requests by claims of `size`. Returns the first letters of their pools."""
    made: list[str] = []
    while len(made) < count:
        pools = bench.claim(min(size, count - len(made)))
        assert pools, f"nothing was launched after {len(made)}"
        made += pools
    return "".join(pool[0] for pool in made)


def _backlog(bench: Bench, pools: dict[str, dict[str, object]], *, waiting: int = 60) -> None:
    bench.configure(document(pools))
    for pool in pools:
        bench.submit(pool, waiting)


def four_to_one(bench: Bench, size: int) -> None:
    """Weights 4:1 give four, then one."""
    _backlog(bench, {"a": {"quantum": 4}, "b": {"quantum": 1}})
    assert _launches(bench, 5 * ROUNDS, size) == "aaaab" * ROUNDS


def three_to_one(bench: Bench, size: int) -> None:
    """Weights 3:1 give three, then one."""
    _backlog(bench, {"a": {"quantum": 3}, "b": {"quantum": 1}})
    assert _launches(bench, 4 * ROUNDS, size) == "aaab" * ROUNDS


def burst(bench: Bench, size: int) -> None:
    """Quantum 8 with burst 2 against 1 gives two, then one."""
    _backlog(bench, {"a": {"quantum": 8, "max_burst_per_visit": 2}, "b": {"quantum": 1}})
    assert _launches(bench, 3 * ROUNDS, size) == "aab" * ROUNDS


def four_pools(bench: Bench, size: int) -> None:
    """The default config's weights give 4, 2, 1 and 1."""
    _backlog(bench, {"i": {"quantum": 4}, "d": {"quantum": 2}, "b": {}, "default": {}})
    order = _launches(bench, 8 * ROUNDS, size)
    # Both "document-extract" and "default" start with a d.
    assert order == "iiiiddbd" * ROUNDS


def lone_expensive_head(bench: Bench, size: int) -> None:
    """A lone cost-16 head on quantum 1 launches at the first claim, each time."""
    bench.configure(document({"a": {"quantum": 1}}))
    bench.submit("a", 3, cost=16)
    for _ in range(3):
        assert bench.claim(1) == ["a"]
    bench.submit("a", size, cost=16)
    assert bench.claim(size) == ["a"] * size


def expensive_against_cheap(bench: Bench, size: int) -> None:
    """With equal weights, costs 4 and 1 give one and four."""
    bench.configure(document({"a": {"quantum": 1}, "b": {"quantum": 1}}))
    bench.submit("a", 20, cost=4)
    bench.submit("b", 60, cost=1)
    order = _launches(bench, 50, size)
    assert Counter(order) == {"a": 10, "b": 40}
    for at in range(5, 50, 5):
        assert abs(Counter(order[:at])["a"] - at / 5) <= 1


def order_holds_over_settles(bench: Bench, size: int) -> None:
    """One slot, ended and claimed anew by two gateways in turn: the visit goes on, 4 then 1."""
    bench.configure(document({"a": {"quantum": 4}, "b": {"quantum": 1}}, total=1))
    bench.submit("a", 60)
    bench.submit("b", 60)
    made = bench.claim(size)
    for number in range(5 * ROUNDS - 1):
        bench.settle(bench.running[:1])
        made += bench.claim(size, gateway="gh"[number % 2])
    assert "".join(made) == "aaaab" * ROUNDS


def group_cap(bench: Bench, size: int) -> None:
    """No claim goes over the group's cap, and nothing moves while it is reached."""
    bench.configure(document({"a": {"quantum": 4}, "b": {"quantum": 1}}, total=7))
    bench.submit("a", 40)
    bench.submit("b", 40)
    made: list[str] = []
    while pools := bench.claim(size):
        made += pools
    assert len(bench.running) == 7
    assert bench.claim(64, gateway="h") == []
    bench.settle(list(bench.running))
    made += bench.claim(64)
    assert "".join(made) == ("aaaab" * 3)[:14]


def fifo_by_arrival(bench: Bench, size: int) -> None:
    """Policy fifo launches in the arrival order of the whole group; weights say nothing."""
    bench.configure(document({"a": {"quantum": 9}, "b": {}, "c": {}}, policy="fifo"))
    arrivals = "abccbabaacbbcacbabcc"
    for pool in arrivals:
        bench.submit(pool, cost=7)
    assert _launches(bench, len(arrivals), size) == arrivals


def fifo_keeps_caps(bench: Bench, size: int) -> None:
    """A pool at its cap is passed over and takes its old place when it may launch again."""
    bench.configure(document({"a": {"max_concurrent": 1}, "b": {}}, policy="fifo", total=3))
    for pool in "aaabbb":
        bench.submit(pool)
    assert "".join(bench.claim(64)) == "abb"
    first = next(lease for lease in bench.running if lease.pool_id == "a")
    made = bench.settle([first], want=min(size, 1))
    assert made == ["a"]
    assert bench.claim(size) == []


def fifo_endpoint_full(bench: Bench, size: int) -> None:
    """Behind a full endpoint the order of arrival is kept; other endpoints are not held up."""
    pools = {"a": {"endpoint": "slow"}, "b": {"endpoint": "slow"}, "c": {}}
    endpoints = {"default": {}, "slow": {"max_concurrent": 1}}
    bench.configure(document(pools, policy="fifo", endpoints=endpoints))
    for pool in "babaccab":
        bench.submit(pool)
    made = bench.claim(64)
    for _ in range(5):
        slow = [lease for lease in bench.running if lease.endpoint_id == "slow"]
        made += bench.settle(slow, want=size)
    assert "".join(made) == "bccabaab"


def shared_slot_of_an_endpoint(bench: Bench, size: int) -> None:
    """Two pools behind an endpoint with one slot share it by weight, while a free pool runs beside them."""
    pools = {"a": {"quantum": 4, "endpoint": "slow"}, "b": {"quantum": 1, "endpoint": "slow"}, "c": {}}
    endpoints = {"default": {}, "slow": {"max_concurrent": 1}}
    bench.configure(document(pools, total=8, endpoints=endpoints))
    served = _rounds(bench, {"a": 1, "b": 1, "c": 1}, size)
    ideal = waterfill({"a": 4, "b": 1, "c": 1}, [Limit("ab", 1), Limit("abc", 8)])
    slots = sum(served.values())
    assert served["c"] == slots * ideal["c"] / 8
    assert abs(served["a"] - 4 * served["b"]) <= 5, served


def capped_pool_keeps_its_cap_full(bench: Bench, size: int) -> None:
    """A capped pool with a large quantum is never below its cap while it has work and a slot is free."""
    pools = {"a": {"quantum": 100, "max_concurrent": 2}, "b": {"quantum": 1}}
    bench.configure(document(pools, total=8))
    bench.submit("a", 200)
    bench.submit("b", 200)
    while bench.claim(size):
        pass
    for number in range(60):
        assert (bench.in_flight("a"), bench.in_flight("b")) == (2, 6)
        bench.settle([bench.running[number % 8]], want=1)


def protected_minimum(bench: Bench, size: int) -> None:
    """With 2 of 8 protected and endless other work, a request launches as soon as a slot ends; what is idle is lent."""
    pools = {"interactive": {"min_concurrent": 2}, "backfill": {"quantum": 8}}
    bench.configure(document(pools, total=8))
    bench.submit("backfill", 100)
    assert bench.claim(64) == ["backfill"] * 8
    bench.submit("interactive", 4)
    assert bench.claim(size) == []
    assert bench.settle(bench.running[:1], want=1) == ["interactive"]
    assert bench.settle(bench.running[:1], want=1) == ["interactive"]
    # Its minimum is reached: what follows is by weight, and backfill has 8 to 1.
    assert bench.settle(bench.running[:2], want=2) == ["backfill"] * 2
    interactive = [lease for lease in bench.running if lease.pool_id == "interactive"]
    assert bench.settle(interactive[:1], want=1) == ["interactive"]


def protection_in_turn(bench: Bench, size: int) -> None:
    """Two pools below their minimum take freed slots in turn."""
    pools = {"a": {"min_concurrent": 2}, "b": {"min_concurrent": 2}, "c": {"quantum": 9}}
    bench.configure(document(pools, total=6))
    bench.submit("c", 50)
    assert bench.claim(64) == ["c"] * 6
    bench.submit("a", 9)
    bench.submit("b", 9)
    made: list[str] = []
    while len(made) < 4:
        made += bench.settle([lease for lease in bench.running if lease.pool_id == "c"][:size], want=min(size, 4))
    assert made[:4] == ["a", "b", "a", "b"]


def parked_minimum_reserves_nothing(bench: Bench, size: int) -> None:
    """A pool below its minimum that cannot launch keeps no slot empty."""
    pools = {"a": {"min_concurrent": 3, "endpoint": "slow"}, "b": {}}
    endpoints = {"default": {}, "slow": {"max_concurrent": 1}}
    bench.configure(document(pools, total=4, endpoints=endpoints))
    bench.submit("a", 9)
    bench.submit("b", 9)
    made: list[str] = []
    while pools_made := bench.claim(size):
        made += pools_made
    assert Counter(made) == {"a": 1, "b": 3}


def _rounds(bench: Bench, costs: dict[str, int], size: int, rounds: int = 100) -> Counter[str]:
    """Keep all pools in backlog and end everything that runs, `rounds` times. Returns launches by pool."""
    served: Counter[str] = Counter()
    for pool, cost in costs.items():
        bench.submit(pool, 20, cost=cost)
    for _ in range(rounds):
        made: list[str] = []
        while pools := bench.claim(size):
            made += pools
        for pool in made:
            bench.submit(pool, cost=costs[pool])
        served.update(made)
        bench.settle(list(bench.running))
    return served


SCENARIOS: tuple[Scenario, ...] = (
    four_to_one,
    three_to_one,
    burst,
    four_pools,
    lone_expensive_head,
    expensive_against_cheap,
    order_holds_over_settles,
    group_cap,
    fifo_by_arrival,
    fifo_keeps_caps,
    fifo_endpoint_full,
    shared_slot_of_an_endpoint,
    capped_pool_keeps_its_cap_full,
    protected_minimum,
    protection_in_turn,
    parked_minimum_reserves_nothing,
)

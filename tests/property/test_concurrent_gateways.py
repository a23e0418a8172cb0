"""Fairness across replicas: gateways that really claim at once, on the server's own launch sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from dispatch.fabric.functions import fabric_snapshot
from tests.support.broken_library import load_broken
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess

M = 16
WEIGHTS = {"interactive": 4, "document-extract": 2, "backfill": 1, "bulk": 1}
LAUNCHES = 3_000
LONG_LAUNCHES = 20_000

Make = Callable[..., Fleet]


@pytest.fixture
def make(valkey: ValkeyProcess) -> Iterator[Make]:
    """Make fleets on the session's server."""
    yield from fleets(valkey)


def fleets(server: ValkeyProcess) -> Iterator[Make]:
    made: list[Fleet] = []

    def make_one(pools: dict[str, dict[str, Any]], **group: Any) -> Fleet:
        made.append(Fleet(server.url, pools, **group))
        return made[-1]

    yield make_one
    for fleet in made:
        fleet.close()


def weighted(weights: dict[str, int]) -> dict[str, dict[str, Any]]:
    return {name: {"quantum": quantum} for name, quantum in weights.items()}


def keep_busy(fleet: Fleet, launches: int, costs: tuple[int, int], seed: int = 1) -> None:
    """Queue so much that no pool runs out of work within `launches`."""
    chance = random.Random(seed)
    total = sum(fleet.quanta.values())
    for pool, quantum in fleet.quanta.items():
        count = int(launches * quantum / total * 1.6) + 200
        fleet.submit(pool, [chance.randint(*costs) for _ in range(count)])


def plain_bound(fleet: Fleet, first: str, second: str) -> Fraction:
    return 1 + (M - 1) * (Fraction(1, fleet.quanta[first]) + Fraction(1, fleet.quanta[second]))


def worst_excess(fleet: Fleet) -> Fraction:
    """Return by how much any pair breaks the bound of uncapped pools; at most 0 when it holds."""
    pairs = permutations(fleet.quanta, 2)
    return max(fleet.lead(first, second) - plain_bound(fleet, first, second) for first, second in pairs)


@pytest.mark.parametrize("costs", [(1, 1), (1, M), (M, M)], ids=str)
@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_the_bound_holds_over_every_window(make: Make, gateways: int, costs: tuple[int, int]) -> None:
    fleet = make(weighted(WEIGHTS))
    keep_busy(fleet, LAUNCHES // 2, costs)
    fleet.race(LAUNCHES // 2, gateways=gateways, seed=gateways)
    assert fleet.no_gaps()
    assert worst_excess(fleet) <= 0


@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_jains_index_over_sliding_windows(make: Make, gateways: int) -> None:
    fleet = make(weighted(WEIGHTS))
    keep_busy(fleet, LAUNCHES, (1, 4))
    fleet.race(LAUNCHES, gateways=gateways, seed=gateways)
    assert fleet.jain(500) >= 0.99
    assert fleet.jain(len(fleet.launches)) >= 0.999


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("gateways", [1, 2, 8])
def test_twenty_thousand_launches(make: Make, gateways: int) -> None:
    fleet = make(weighted(WEIGHTS))
    keep_busy(fleet, LONG_LAUNCHES, (1, M))
    fleet.race(LONG_LAUNCHES, gateways=gateways, seed=gateways)
    assert fleet.no_gaps()
    assert worst_excess(fleet) <= 0
    assert fleet.jain(500) >= 0.99
    assert fleet.jain(len(fleet.launches)) >= 0.999


def test_pools_behind_one_endpoint_keep_the_bound(make: Make) -> None:
    endpoints = [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1", "max_concurrent": 2}]
    fleet = make(weighted({"a": 4, "b": 1}), endpoints=endpoints)
    keep_busy(fleet, 800, (1, M))
    fleet.race(800, gateways=2, seed=5)
    assert worst_excess(fleet) <= 0


def test_two_keys_of_one_pool_stay_within_two_greatest_costs(make: Make) -> None:
    fleet = make({"shared": {"quantum": 1}})
    chance = random.Random(3)
    owner: dict[str, str] = {}
    for key in ("ana", "bo"):
        costs = [chance.randint(1, M) for _ in range(600)]
        owner |= dict.fromkeys(fleet.submit("shared", costs, fairness_key=key), key)
    ahead, series = 0, [0]
    held = list(fleet.claim(1))
    for _ in range(600):
        for lease in held:
            ahead += lease.cost if owner[lease.request_id] == "ana" else -lease.cost
            series.append(ahead)
        held = list(fleet.settle(held, want=1))
    assert max(series) - min(series) <= 2 * M


def test_protection_gives_the_next_free_slot(make: Make) -> None:
    fleet = make({"interactive": {"quantum": 1, "min_concurrent": 2}, "backfill": {"quantum": 8}}, slots=8)
    fleet.submit("backfill", [1] * 200)
    held = list(fleet.claim(8))
    assert {lease.pool_id for lease in held} == {"backfill"}, "idle protection is lent"
    for _ in range(20):
        fleet.submit("interactive", [1])
        made = fleet.settle([held.pop(0)], want=1)
        assert [lease.pool_id for lease in made] == ["interactive"]
        held += fleet.settle(made, want=1)
    fleet.settle(held)


# ----------------------------------------------------------------------------------------------------------------------
# Each rule, broken on purpose, is noticed.


def broken(
    tmp_path: Path, start_valkey: Callable[..., ValkeyProcess], file: str, rule: tuple[str, str]
) -> ValkeyProcess:
    """Start a server whose library has one line of `file` replaced."""
    server = start_valkey(library=False)
    load_broken(server, tmp_path / "lua", {file: [rule]})
    return server


def test_a_wrong_quantum_is_noticed(tmp_path: Path, start_valkey: Callable[..., ValkeyProcess]) -> None:
    rule = ("    pool.deficit = pool.deficit + quantum\n", "    pool.deficit = pool.deficit + 1\n")
    fleet = Fleet(broken(tmp_path, start_valkey, "lib/drr.lua", rule).url, weighted(WEIGHTS))
    keep_busy(fleet, 1_000, (1, 1))
    fleet.race(1_000, gateways=2, seed=1)
    assert worst_excess(fleet) > 0
    assert fleet.jain(500) < 0.99
    fleet.close()


def hoarder(url: str) -> Fleet:
    """A pool that may launch one request a visit and pays little for each, until its requests become expensive."""
    fleet = Fleet(url, {"hoarder": {"quantum": 8, "max_burst_per_visit": 1}, "steady": {"quantum": 8}})
    fleet.submit("hoarder", [1] * 100 + [M] * 100)
    fleet.submit("steady", [8] * 400)
    fleet.race(350, gateways=1, seed=1)
    return fleet


BURST_BOUND = 1 + Fraction(M, 8) + Fraction(M - 1, 8)


def test_credit_is_clamped(valkey: ValkeyProcess) -> None:
    fleet = hoarder(valkey.url)
    assert fleet.lead("hoarder", "steady") <= BURST_BOUND
    fleet.close()


def test_credit_without_a_clamp_is_noticed(tmp_path: Path, start_valkey: Callable[..., ValkeyProcess]) -> None:
    rule = ("  if pool.deficit > greatest then pool.deficit = greatest end\n", "")
    fleet = hoarder(broken(tmp_path, start_valkey, "lib/drr.lua", rule).url)
    assert fleet.lead("hoarder", "steady") > BURST_BOUND
    fleet.close()


def test_missing_protection_is_noticed(tmp_path: Path, start_valkey: Callable[..., ValkeyProcess]) -> None:
    rule = ("  return minimum > pool.record.in_flight and not fifo(step)\n", "  return minimum < 0 and fifo(step)\n")
    server = broken(tmp_path, start_valkey, "state/rotation.lua", rule)
    fleet = Fleet(server.url, {"interactive": {"quantum": 1, "min_concurrent": 2}, "backfill": {"quantum": 8}}, slots=8)
    fleet.submit("backfill", [1] * 200)
    held = list(fleet.claim(8))
    launched = []
    for _ in range(10):
        fleet.submit("interactive", [1])
        made = fleet.settle([held.pop(0)], want=1)
        launched += [lease.pool_id for lease in made]
        held += made
    assert "backfill" in launched
    fleet.close()


def test_a_full_group_is_the_reason_of_the_pool_at_the_front(make: Make) -> None:
    fleet = make({"kept": {"min_concurrent": 1}, "free": {}}, slots=2)
    fleet.submit("free", [1] * 4)
    held = fleet.claim(3)
    assert reason_of(fleet, "free") == "global_capacity"
    fleet.submit("kept", [1] * 2)
    fleet.claim(1)
    assert reason_of(fleet, "free") == "protected"
    assert [lease.pool_id for lease in fleet.settle(held[:1], want=1)] == ["kept"]


def reason_of(fleet: Fleet, pool: str) -> str:
    """Return why the pool waits; its skip of that reason must have been counted."""
    rows = {row["pool_id"]: row for row in fleet.connection.run(fleet.group, fabric_snapshot("pools"))["rows"]}
    reason = str(rows[pool]["block_reason"])
    assert rows[pool]["skips"][reason] >= 1
    return reason

"""Why each rule of admission is as it is: what holds with the rule does not hold with the obvious variant.

Each case runs on the library as it is, and on a server whose library has the variant instead.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dispatch.fabric.records import Lease
from tests.support.broken_library import Rules, load_broken
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess

M = 16
ROTATION = "state/rotation.lua"
PASSES = "state/passes.lua"
FLOWS = "state/flows.lua"

Holds = Callable[[str], bool]


class Reason(NamedTuple):
    """What a rule achieves, and the variant that does not."""

    holds: Holds
    variant: Rules


def one_slot(weights: dict[str, int], launches: int, costs: tuple[int, int] = (1, 1)) -> Callable[[str], Counter[str]]:
    """Return a run of pools behind an endpoint with a single slot; it answers the launches of each."""

    def run(url: str) -> Counter[str]:
        endpoints = [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1", "max_concurrent": 1}]
        fleet = Fleet(url, {name: {"quantum": quantum} for name, quantum in weights.items()}, endpoints=endpoints)
        chance = random.Random(1)
        for pool in weights:
            fleet.submit(pool, [chance.randint(*costs) for _ in range(launches)])
        held = list(fleet.claim(8))
        while len(fleet.launches) < launches:
            held = list(fleet.settle(held, want=8))
        fleet.close()
        return Counter(pool for _, pool, _ in fleet.launches)

    return run


def equal_pools_share_a_slot(url: str) -> bool:
    served = one_slot({"a": 1, "b": 1}, 200)(url)
    return abs(served["a"] - served["b"]) <= 2


def weights_hold_behind_a_slot(url: str) -> bool:
    served = one_slot({"a": 4, "b": 1}, 200)(url)
    return abs(served["a"] - 4 * served["b"]) <= 8


def a_capped_pool_keeps_its_cap_full(url: str) -> bool:
    """A pool with a cap of 10 and a large quantum, among 40 busy pools that share 64 slots."""
    crowd: dict[str, dict[str, Any]] = {f"p{at}": {"quantum": 4} for at in range(40)}
    fleet = Fleet(url, {"capped": {"quantum": 100, "max_concurrent": 10}} | crowd, slots=64)
    fleet.submit("capped", [1] * 900)
    for pool in crowd:
        fleet.submit(pool, [1] * 120)
    held: deque[Lease] = deque(fleet.claim(64))
    running = []
    for _ in range(1_200):
        held += fleet.settle([held.popleft()], want=1)
        running.append(sum(lease.pool_id == "capped" for lease in held))
    fleet.close()
    return sum(running[200:]) / len(running[200:]) > 8


def expensive_heads_keep_the_bound(url: str) -> bool:
    """Heads that nobody can afford for many rounds: quanta 1 and 3, cost 16 each."""
    fleet = Fleet(url, {"a": {"quantum": 3}, "b": {"quantum": 1}})
    for pool in ("a", "b"):
        fleet.submit(pool, [M] * 400)
    fleet.race(300, gateways=1, seed=1)
    bound = 1 + (M - 1) * (Fraction(1, 3) + 1)
    within = max(fleet.lead("a", "b"), fleet.lead("b", "a")) <= bound
    fleet.close()
    return within


def rounds_of_others_are_no_credit(url: str) -> bool:
    """A pool that is held at its cap while others walk many rounds returns without the credit of those rounds."""
    fleet = Fleet(url, {"held": {"quantum": 4, "max_concurrent": 1}, "dear": {"quantum": 1}, "cheap": {"quantum": 4}})
    fleet.submit("held", [1] * 200)
    [first] = [lease for lease in fleet.claim(3) if lease.pool_id == "held"][:1]
    fleet.submit("dear", [M] * 60)
    others = list(fleet.claim(7))
    while len(fleet.launches) < 60:
        others = [*fleet.settle(others, want=4)]
    fleet.settle([first, *others])
    fleet.submit("cheap", [1] * 200)
    before = len(fleet.launches)
    for _ in range(80):
        fleet.settle(fleet.claim(1))
    burst = 0
    for _, pool, _ in fleet.sequence()[before:]:
        if pool == "cheap":
            break
        burst += 1
    fleet.close()
    return burst <= M


def a_key_that_comes_and_goes_gains_nothing(url: str) -> bool:
    """One caller sends expensive requests one by one, another has cheap ones waiting all the time."""
    fleet = Fleet(url, {"shared": {}})
    cheap = set(fleet.submit("shared", [1] * 400, fairness_key="steady"))
    fleet.submit("shared", [M], fairness_key="visitor")
    for _ in range(200):
        made = fleet.claim(1)
        fleet.settle(made)
        if made[0].request_id not in cheap:
            fleet.submit("shared", [M], fairness_key="visitor")
    visits = sum(cost == M for _, _, cost in fleet.launches)
    fleet.close()
    return visits < 25


def an_expensive_key_is_served(url: str) -> bool:
    """A key whose requests cost 16 beside one whose requests cost 1: as much cost for each."""
    fleet = Fleet(url, {"shared": {}})
    fleet.submit("shared", [M] * 60, fairness_key="dear")
    fleet.submit("shared", [1] * 900, fairness_key="cheap")
    for _ in range(340):
        fleet.settle(fleet.claim(1))
    dear = sum(cost == M for _, _, cost in fleet.launches)
    fleet.close()
    return dear >= 15


def idle_protection_is_lent(url: str) -> bool:
    """A protected pool without work reserves nothing: all slots are used by the other."""
    fleet = Fleet(url, {"kept": {"min_concurrent": 2}, "free": {}}, slots=8)
    fleet.submit("free", [1] * 20)
    used = len(fleet.claim(8))
    fleet.close()
    return used == 8


NEW_TURN = (
    '  record.place, record.parked, record.mark = "line", nil, step.group.round\n'
    "  record.reason, record.reason_since = nil, nil\n"
)
TO_THE_TAIL = (NEW_TURN, NEW_TURN + "  record.turn, record.open = take_turn(step), false\n")

CHEAPEST_HEAD = """
  local best
  for _, name in ipairs(server.call("ZRANGE", live_key(step, pool), 0, -1)) do
    local head = first_of(step, pool, name)
    if head and (not best or head.cost < best.cost) then best = head end
  end
  return flow and best
"""

REASONS = {
    "of the pools that wait for an endpoint one returns, at its turn": Reason(
        weights_hold_behind_a_slot, {ROTATION: [TO_THE_TAIL]}
    ),
    "a parked pool keeps its turn": Reason(a_capped_pool_keeps_its_cap_full, {ROTATION: [TO_THE_TAIL]}),
    "virtual rounds are one less than the visits needed": Reason(
        expensive_heads_keep_the_bound,
        {PASSES: [("group.round + group.pass_visits - 1", "group.round + group.pass_visits + 7")]},
    ),
    "who was away is not credited": Reason(
        rounds_of_others_are_no_credit, {ROTATION: [(NEW_TURN, NEW_TURN.replace("step.group.round", "record.mark"))]}
    ),
    "an idle key keeps its tag": Reason(
        a_key_that_comes_and_goes_gains_nothing,
        {FLOWS: [("  if tag > record.virtual_time then\n", "  if false then\n")]},
    ),
    "the lowest tag goes, whatever its head costs": Reason(
        an_expensive_key_is_served, {FLOWS: [("  return flow and first_of(step, pool, flow)\n", CHEAPEST_HEAD)]}
    ),
    "idle protection reserves nothing": Reason(
        idle_protection_is_lent,
        {
            "state/admission.lua": [
                (
                    "    if step.group.in_flight >= step.config.total_concurrent_dispatch then\n",
                    "    if step.group.in_flight >= step.config.total_concurrent_dispatch - 2 then\n",
                )
            ]
        },
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_rule_holds(valkey: ValkeyProcess, reason: str) -> None:
    assert REASONS[reason].holds(valkey.url)


@pytest.mark.parametrize("reason", REASONS)
def test_the_variant_does_not(tmp_path: Path, start_valkey: Callable[..., ValkeyProcess], reason: str) -> None:
    server = start_valkey(library=False)
    load_broken(server, tmp_path / "lua", REASONS[reason].variant)
    assert not REASONS[reason].holds(server.url)


def test_equal_pools_behind_a_full_endpoint_both_go(valkey: ValkeyProcess) -> None:
    assert equal_pools_share_a_slot(valkey.url)


def test_a_newcomer_among_many_keys_waits_less_than_with_nested_rounds(valkey: ValkeyProcess) -> None:
    """Fifty keys with cheap requests wait; a new one with an expensive request comes."""
    keys = 50
    fleet = Fleet(valkey.url, {"shared": {}})
    for key in range(keys):
        fleet.submit("shared", [1] * 8, fairness_key=f"k{key}")
    for _ in range(keys + 7):
        fleet.settle(fleet.claim(1))
    fleet.submit("shared", [M], fairness_key="new")
    waited = 0
    while (made := fleet.claim(1))[0].cost != M:
        fleet.settle(made)
        waited += 1
    fleet.close()
    assert waited <= keys
    assert nested_wait(keys) > 10 * keys


def nested_wait(keys: int) -> int:
    """Return how many launches the newcomer waits under round robin with a deficit for each key, quantum 1."""
    launches, deficit = 0, 0
    while deficit < M:  # each round launches one request of every other key and adds one to the newcomer's deficit
        launches += keys
        deficit += 1
    return launches

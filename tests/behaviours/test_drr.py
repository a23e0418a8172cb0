"""Deficit round robin: the exact orders, protected slots, and heads that cannot be run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import Lease
from dispatch.fabric.schema import key
from tests.behaviours.scene import assert_settled, change, reads_while
from tests.support.by_hand import ByHand
from tests.support.fleet import Fleet
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

SIZES = (1, 3, 64)


@pytest.fixture
def fleet_of(valkey: ValkeyProcess) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(pools: dict[str, dict[str, Any]], **more: Any) -> Fleet:
        fleets.append(Fleet(valkey.url, pools, **{"slots": 1000} | more))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def launched(fleet: Fleet, count: int, size: int) -> str:
    """Claim `count` by claims of `size`, by three gateways in turn; returns the pools in order."""
    order = ""
    for number in range(count):
        if len(order) < count:
            part = fleet.claim(min(size, count - len(order)), gateway=f"g{number % 3}")
            order += "".join(lease.pool_id for lease in part)
    return order


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("pools", "order"),
    [
        ({"a": {"quantum": 4}, "b": {"quantum": 1}}, "aaaab"),
        ({"a": {"quantum": 3}, "b": {"quantum": 1}}, "aaab"),
        ({"a": {"quantum": 8, "max_burst_per_visit": 2}, "b": {"quantum": 1}}, "aab"),
    ],
    ids=["4 to 1", "3 to 1", "8 with bursts of 2 to 1"],
)
def test_weights_give_their_exact_order(
    fleet_of: Callable[..., Fleet], pools: dict[str, Any], order: str, size: int
) -> None:
    fleet = fleet_of(pools)
    for pool in pools:
        fleet.submit(pool, [1] * 40)
    assert launched(fleet, 6 * len(order), size) == order * 6


@pytest.mark.parametrize("size", SIZES)
def test_a_lone_head_that_costs_16_launches_at_the_first_claim(fleet_of: Callable[..., Fleet], size: int) -> None:
    fleet = fleet_of({"a": {"quantum": 1}})
    for _ in range(3):
        fleet.submit("a", [16])
        assert len(fleet.claim(size)) == 1


def test_protection_holds_against_a_noisy_pool(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"quiet": {"min_concurrent": 2}, "noisy": {"quantum": 1000}}, slots=8)
    fleet.submit("noisy", [1] * 500)
    held = list(fleet.claim(64))
    assert len(held) == 8
    for _ in range(20):  # each time something comes, it gets the very next slot
        [mine] = fleet.submit("quiet", [16])
        [lease] = fleet.settle([held.pop(0)], want=1)
        assert lease.request_id == mine
        held += fleet.settle([lease], want=1)
    assert len(held) == 8


def test_idle_protection_is_lent_and_comes_back_as_work_ends(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"quiet": {"min_concurrent": 3}, "noisy": {}}, slots=4)
    fleet.submit("noisy", [1] * 50)
    held = list(fleet.claim(64))
    assert [lease.pool_id for lease in held] == ["noisy"] * 4  # nothing stands empty
    fleet.submit("quiet", [1] * 3)
    assert fleet.claim(64) == ()  # nothing is taken away from who has it
    back = [lease.pool_id for number in range(3) for lease in fleet.settle([held[number]], want=1)]
    assert back == ["quiet"] * 3


@pytest.mark.parametrize(
    ("minima", "fits"), [((4, 4), True), ((4, 5), False), ((9, 0), False)], ids=["equal", "sum", "alone"]
)
def test_minima_that_do_not_fit_into_the_cap_together_are_refused(
    valkey: ValkeyProcess, minima: tuple[int, int], fits: bool
) -> None:
    group = unique_group()
    configure(valkey.url, group)
    hand = ByHand(valkey.url, group)
    pools = [{"pool_id": f"p{at}", "min_concurrent": minimum} for at, minimum in enumerate(minima)]
    pools.append({"pool_id": "off", "min_concurrent": 8, "enabled": False})  # disabled ones reserve nothing
    document = default_document() | {"total_concurrent_dispatch": 8, "pools": pools}
    answer = hand.run(f.group_check(json.dumps(document).encode(), expected_generation=1))
    assert answer.status == ("VALID" if fits else "INVALID")
    if not fits:
        told = str(answer.problems)
        assert "min_concurrent" in told
        assert f"{sum(minima)}" in told
        assert "8" in told
    hand.close()


def damage(url: str, group: str, request_id: str, how: str) -> None:
    """Make a waiting request unreadable in one of several ways."""
    with eye(url) as client:
        name = key(group, "request", id=request_id)
        match how:
            case "gone":
                client.delete(name)
            case "no record":
                client.hdel(name, "record")
            case "record":
                client.hset(name, "record", b"\xc1\xff\x00")
            case "no envelope":
                client.hdel(name, "envelope")
            case "body":
                client.hset(name, "body", b"x")


DAMAGES = ("gone", "no record", "record", "no envelope", "body")


def test_malformed_heads_are_dropped_without_wedging_their_pool_or_taking_its_turn(hand: ByHand) -> None:
    hand.submit("interactive", 10)
    hand.submit("backfill", 3)
    for request_id, how in zip(("r1", "r2", "r3", "r4", "r6"), DAMAGES, strict=True):
        damage(hand.url, hand.group, request_id, how)
    leases = hand.claim(8)
    assert [lease.request_id for lease in leases] == ["r5", "r7", "r8", "r9", "r11", "r10", "r12", "r13"]
    row = hand.pool("interactive")
    assert row["endings"] == {"malformed": 5}
    assert row["skips"]["malformed_head"] == 5
    hand.settle(leases)
    assert_settled(hand.url, hand.group)


def test_selection_never_touches_a_body_that_has_its_own_key(valkey: ValkeyProcess, hand: ByHand) -> None:
    with eye(valkey.url) as client:
        for number in range(1, 6):
            client.set(key(hand.group, "request_body", id=f"r{number}", nonce=f"n{number}"), b"x" * 5000, ex=60)
    hand.submit("backfill", 5, size=5000, body=b"")
    reads = reads_while(hand, lambda: hand.claim(8))
    assert reads
    assert not [read for read in reads if "body:llm:" in read]
    change(hand.url, hand.group, "total_concurrent_dispatch=5")
    full = reads_while(hand, lambda: hand.claim(8))  # nothing is looked at in any pool
    assert not [read for read in full if "hash:llm:request" in read]


def test_selection_never_reads_the_small_bodies_of_what_it_passes_over(hand: ByHand) -> None:
    change(hand.url, hand.group, "total_concurrent_dispatch=3", "pools.backfill.max_concurrent=1")
    hand.submit("backfill", 5)
    hand.submit("document-extract", 5, estimated_cost_units=16)
    hand.submit("default", 5)
    leases: list[Lease] = []
    reads = reads_while(hand, lambda: leases.extend(hand.claim(8)))
    assert len(leases) == 3
    whole = [read for read in reads if re.search(r" body\b", read) and not read.startswith("HSTRLEN")]
    read = {name for line in whole for name in re.findall(r"hash:llm:request:(r\d+)", line)}
    assert read <= {lease.request_id for lease in leases}

"""What is charged is what was popped, credit outlives whatever happens meanwhile, and what comes back is first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import Lease, Outcome, Settlement
from tests.behaviours.scene import assert_settled, at_once, change
from tests.support.by_hand import ByHand
from tests.support.fleet import Fleet
from tests.support.groups import configure, unique_group
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def fleet_of(valkey: ValkeyProcess) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(pools: dict[str, dict[str, Any]], **more: Any) -> Fleet:
        fleets.append(Fleet(valkey.url, pools, **more))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def pool_row(fleet: Fleet, pool: str) -> dict[str, Any]:
    [row] = fleet.connection.run(fleet.group, f.fabric_snapshot("pools", subject=pool))["rows"]
    return dict(row)


def names(leases: tuple[Lease, ...] | list[Lease]) -> str:
    return "".join(lease.pool_id for lease in leases)


def test_the_cost_charged_is_the_cost_of_the_request_popped(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"a": {"quantum": 16}, "b": {"quantum": 16}}, slots=1000)
    cheap, dear = fleet.submit("a", [1, 16])
    fleet.connection.run(fleet.group, f.request_cancel(cheap, actor="test"))  # the head changes under whoever peeked
    [lease] = fleet.claim(1)
    row = pool_row(fleet, "a")
    assert (lease.request_id, lease.cost, row["cost_served"]) == (dear, 16, 16)


def test_costs_add_up_however_many_gateways_claim_at_once(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"a": {"quantum": 3}, "b": {}}, slots=6)
    for pool in "ab":
        fleet.submit(pool, [1, 16, 3, 7] * 40)
    fleet.race(200, gateways=3, seed=2)
    assert fleet.no_gaps()
    charged = {pool: pool_row(fleet, pool)["cost_served"] for pool in "ab"}
    popped: Counter[str] = Counter()
    for _, pool, cost in fleet.launches:
        popped[pool] += cost
    assert charged == popped


def test_a_pool_that_waits_for_a_full_endpoint_keeps_its_credit(fleet_of: Callable[..., Fleet]) -> None:
    pools = {"a": {"quantum": 4, "endpoint": "small"}, "b": {"endpoint": "small"}, "c": {}}
    endpoints = [
        {"endpoint_id": "small", "url": "http://127.0.0.1:9/v1", "max_concurrent": 1},
        {"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"},
    ]
    fleet = fleet_of(pools, slots=1000, endpoints=endpoints, default_endpoint="default")
    fleet.submit("a", [1] * 40)
    fleet.submit("b", [1] * 40)
    fleet.submit("c", [1] * 400)
    order = ""
    held = [lease for lease in fleet.claim(3) if lease.pool_id != "c"]
    order += names(held)
    while len(order) < 25:
        before = pool_row(fleet, "a")["deficit"]
        for _ in range(5):  # passes on which both wait for their endpoint
            assert set(names(fleet.claim(1))) == {"c"}
        assert pool_row(fleet, "a")["deficit"] == before
        [lease] = fleet.settle(held, want=1)
        while lease.pool_id == "c":
            [lease] = fleet.claim(1)
        held, order = [lease], order + lease.pool_id
    assert order == "aaaab" * 5


def test_another_gateway_goes_on_in_the_middle_of_a_visit_with_its_credit(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"a": {"quantum": 4}, "b": {}}, slots=1000)
    for pool in "ab":
        fleet.submit(pool, [1] * 30)
    order = names(fleet.claim(2, gateway="one"))  # is never heard of again
    order += names(fleet.claim(4, gateway="two"))
    order += names(fleet.claim(9, gateway="three"))
    assert order == "aaaab" * 3


def test_a_config_that_is_applied_in_the_middle_of_a_visit_takes_no_credit(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"a": {"quantum": 4}, "b": {}}, slots=1000)
    for pool in "ab":
        fleet.submit(pool, [1] * 30)
    order = ""
    for number in range(10):
        order += names(fleet.claim(3))
        change(fleet.url, fleet.group, f"max_queued={1000 + number}", f"pools.a.max_queue_depth={100 + number}")
    assert order == "aaaab" * 6


@pytest.fixture
def order_group(valkey: ValkeyProcess) -> Iterator[ByHand]:
    group = unique_group()
    document = {
        "total_concurrent_dispatch": 100,
        "lease_ms": 800,
        "liveness_ms": 800,
        "pools": [{"pool_id": "default", "delivery": "at_least_once", "max_attempts": 5}],
        "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
    }
    configure(valkey.url, group, document)
    hand = ByHand(valkey.url, group)
    yield hand
    hand.close()


def test_what_is_given_back_goes_to_the_head_in_its_old_order(order_group: ByHand) -> None:
    hand = order_group
    hand.submit(count=6)
    first, second, third = hand.claim(3)
    hand.settle([third, first], outcome=Outcome.RELEASE)
    hand.settle([second], outcome=Outcome.RELEASE)
    again = hand.claim(6)
    assert [lease.request_id for lease in again] == ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert {lease.attempt for lease in again} == {1}


def test_what_a_dead_gateway_held_goes_to_the_head_with_the_next_attempt(order_group: ByHand) -> None:
    hand = order_group
    hand.submit(count=4)
    taken: set[str] = {lease.request_id for lease in hand.claim(2, "dead")}
    back = 0
    while back < 2:
        hand.beat(gateway="alive")  # without it all would be an outage, in which nobody is judged
        back += hand.run(f.lease_reap(limit=10)).requeued
    again = hand.claim(4)
    assert [(lease.request_id, lease.attempt) for lease in again] == [("r1", 2), ("r2", 2), ("r3", 1), ("r4", 1)]
    assert taken == {"r1", "r2"}


def test_what_is_tried_again_goes_to_the_head_when_it_is_due(order_group: ByHand) -> None:
    hand = order_group
    change(hand.url, hand.group, "pools.default.retry_base_ms=1", "pools.default.retry_cap_ms=1")
    hand.submit(count=2)
    [first, second] = hand.claim(2)
    items = [
        Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=Outcome.FAILED,
            error_type="endpoint_unreachable", retryable=True,
        )
        for lease in (second, first)
    ]  # fmt: skip
    settled = hand.run(f.lease_settle("g", "g/1", nonce="n", want=0, items=items))
    assert settled.answers == ("RETRY", "RETRY")
    hand.submit(count=2)
    while hand.pool("default").get("delayed"):
        hand.beat()
        hand.run(f.lease_reap(limit=10))
    again = hand.claim(4)
    assert [(lease.request_id, lease.attempt) for lease in again] == [("r1", 2), ("r2", 2), ("r3", 1), ("r4", 1)]


def test_old_heads_do_not_stall_their_pool_after_a_config_change(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"a": {"quantum": 1}, "b": {"quantum": 1}}, slots=1000)
    fleet.submit("a", [16] * 3)
    fleet.submit("b", [1] * 3)
    change(fleet.url, fleet.group, "cost_max=4", "pools.a.max_queue_depth=1", "pools.a.default_timeout_ms=5")
    leases = fleet.claim(6)
    assert Counter(names(leases)) == {"a": 3, "b": 3}
    assert pool_row(fleet, "a")["cost_served"] == 12  # by the bounds in force, and peeked as it is popped
    assert fleet.settle(leases) == ()
    assert_settled(fleet.url, fleet.group)


@pytest.mark.parametrize(
    "changes",
    [
        ["max_payload_bytes=1", "max_queued=1", "pools.a.max_queue_bytes=1"],
        ["pools.a.endpoint=new", "endpoints.new.url=http://127.0.0.1:9/v1", "default_endpoint=new"],
        ["pools.a.quantum=1", "pools.a.max_burst_per_visit=1", "pools.a.max_concurrent=100"],
        ["pools.a.min_concurrent=3", "total_concurrent_dispatch=500"],
        ["policy=fifo"],
        ["cost_max=1000000", "pools.a.priority_ageing_ms=0"],
        ["pools.a.delivery=at_least_once", "pools.a.max_attempts=9", "pools.a.on_open=reject"],
        ["pools.a.enabled=false"],
    ],
    ids=lambda changes: changes[0],
)
def test_whatever_is_configured_while_they_wait_old_heads_launch(
    fleet_of: Callable[..., Fleet], changes: list[str]
) -> None:
    fleet = fleet_of({"a": {"quantum": 9}, "b": {}}, slots=1000, default_endpoint="default")
    ids = fleet.submit("a", [16, 1, 7]) + fleet.submit("b", [2])
    change(fleet.url, fleet.group, *changes)
    leases = fleet.claim(6)
    assert {lease.request_id for lease in leases} == set(ids)
    fleet.settle(leases)
    assert_settled(fleet.url, fleet.group)


def test_two_gateways_never_get_the_same_request(fleet_of: Callable[..., Fleet]) -> None:
    fleet = fleet_of({"a": {}}, slots=1000)
    fleet.submit("a", [1] * 64)
    url, group = fleet.url, fleet.group

    def claim(gateway: str) -> list[str]:
        hand = ByHand(url, group)
        leases = hand.claim(16, gateway)
        hand.close()
        return [lease.request_id for lease in leases]

    found = at_once([lambda name=f"g{number}": claim(name) for number in range(4)])
    assert len({name for part in found for name in part}) == 64

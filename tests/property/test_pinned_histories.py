"""Histories that once told server and twin apart, and those too rare to leave to chance: one fault each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dispatch.fabric import functions as f
from dispatch.fabric import records as r
from dispatch.fabric.schema import LIMITS
from tests.model.bench import document, submission
from tests.property.history import History
from tests.property.steps import launched, settle, submit, with_pool


def test_raised_group_cap_wakes_a_sleeping_gateway(history: History) -> None:
    history.configure(document({"a": {}}, total=1))
    submit(history, "a", 1, 1)
    history.claim("g0", 2)
    history.configure({**history.document, "total_concurrent_dispatch": 2})
    history.agree()


def test_slot_of_a_reaped_cancelled_request_wakes_a_sleeping_gateway(history: History) -> None:
    history.configure(document({"a": {}}, total=1))
    first, _ = submit(history, "a", 1, 1)
    history.claim("g0", 2)
    history.cancel(first)
    history.lease_runs_out(first)
    history.reap(10)
    history.agree()


def test_heartbeat_that_ends_a_running_request_wakes_a_sleeping_gateway(history: History) -> None:
    history.configure(document({"a": {}}, total=1))
    first, _ = submit(history, "a", 1, 1)
    history.claim("g0", 2)
    history.deadline_passes(history.twin.group.requests[first], long_ago=True)
    history.renew("g1", forgotten=0, outstanding=False)
    history.agree()


def test_cancelled_holder_that_empties_its_pool_wakes_a_sleeping_gateway(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}, "c": {}}
    history.configure(document(pools, total=2, endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "a", 1)
    submit(history, "c", 1)
    history.claim("g0", 2)
    waiting = submit(history, "a", 1) + submit(history, "b", 1)
    settle(history, pool="c")
    history.claim("g1", 1)
    settle(history, pool="a")
    history.claim("g1", 1)
    for request_id in waiting:
        history.cancel(request_id)
        history.agree()


def test_release_of_a_request_that_was_asked_to_stop_ends_it(history: History) -> None:
    history.configure(document({"a": {}}))
    (only,) = submit(history, "a", 1)
    history.claim("g0", 1)
    history.cancel(only)
    settle(history, r.Outcome.RELEASE)
    assert history.twin.group.requests[only].ending == "cancelled"


def test_removed_pool_does_not_block_protected_slots_of_others(history: History) -> None:
    history.configure(document({"a": {"min_concurrent": 1}, "b": {"min_concurrent": 1}, "c": {"quantum": 9}}, total=2))
    submit(history, "c", *[1] * 9)
    history.claim("g0", 2)
    (gone,) = submit(history, "a", 1)
    history.cancel(gone)
    history.configure({**history.document, "pools": [p for p in history.document["pools"] if p["pool_id"] != "a"]})
    submit(history, "b", 1)
    settle(history, want=1)
    assert launched(history) == ["b"]


def test_moving_the_holder_away_lets_the_next_pool_use_the_endpoint(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}}
    history.configure(document(pools, endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "a", 1, 1)
    submit(history, "b", 1)
    history.claim("g0", 3)
    assert launched(history) == ["a"]
    settle(history)  # b comes back alone
    history.configure(with_pool(history.document, "b", endpoint="default"))
    history.agree()
    history.claim("g0", 3)
    assert sorted(launched(history)) == ["a", "b"]


def test_fifo_holder_whose_head_was_cancelled_does_not_overtake(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}}
    history.configure(document(pools, policy="fifo", endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    _, second = submit(history, "a", 1, 1)
    submit(history, "b", 1, 1)
    submit(history, "a", 1)
    history.claim("g0", 5)
    settle(history)  # a is the holder: its second request is the oldest
    history.cancel(second)
    history.claim("g0", 5)
    assert launched(history) == ["b"]


def test_fifo_request_given_back_does_not_wait_behind_a_younger_holder(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}, "c": {}}
    history.configure(document(pools, policy="fifo", total=2, endpoints={"default": {}, "e": {"max_concurrent": 2}}))
    (oldest,) = submit(history, "a", 1)
    submit(history, "b", 1, 1)
    submit(history, "a", 1)
    history.claim("g0", 5)
    history.configure({**history.document, "total_concurrent_dispatch": 5})
    history.claim("g0", 5)  # both pools wait for the endpoint
    settle(history, pool="b")  # b comes back as the holder and has not launched yet
    lease = next(lease for lease in history.known["g0"].values() if lease.request_id == oldest)
    release = r.Settlement(request_id=oldest, fence=lease.fence, outcome=r.Outcome.RELEASE)
    history.settle("g0", [release], 1)
    history.agree()
    assert launched(history) == ["a"]


def test_requests_cancelled_while_nobody_claims_leave_no_entries(history: History) -> None:
    history.configure(document({"a": {}}))
    for request_id in submit(history, "a", 1, 1, 1):
        history.cancel(request_id)
    history.agree()
    assert history.eye.client.exists(history.eye.key("requests", pool="a")) == 0


def test_vanished_bodies_count_among_the_dead_heads_of_one_call(history: History) -> None:
    history.configure(document({"a": {}}))
    for request_id in submit(history, "a", *[1] * (LIMITS["dead_heads_max"] + 5)):
        history.body_vanishes(history.twin.group.requests[request_id])
    history.claim("g0", 1)
    assert len(history.twin.group.ended) == LIMITS["dead_heads_max"]
    history.claim("g0", 1)


def test_credit_beyond_one_greatest_request_is_not_kept(history: History) -> None:
    history.configure(document({"a": {"quantum": 50, "max_burst_per_visit": 1}}))
    submit(history, "a", 1, 1, 1)
    history.claim("g0", 2)
    history.agree()
    assert history.twin.group.pools["a"].deficit == 16


@pytest.mark.parametrize("quantum", [1, 50])
def test_reconfiguring_a_pool_in_its_visit_keeps_its_credit(history: History, quantum: int) -> None:
    history.configure(document({"a": {"quantum": quantum}, "b": {}}))
    submit(history, "a", *[5] * 20)
    submit(history, "b", *[5] * 9)
    history.claim("g0", 3)
    history.configure(with_pool(history.document, "a", display_name="A"))
    history.agree()
    history.claim("g0", 8)
    history.claim("g0", 8)


def test_virtual_rounds_due_to_a_pool_survive_its_reconfiguration(history: History) -> None:
    history.configure(document({"a": {}, "b": {}}))
    submit(history, "a", 3)
    submit(history, "b", 3)
    history.claim("g0", 1)
    history.configure(with_pool(history.document, "b", display_name="B"))
    history.agree()


def test_virtual_rounds_due_to_a_pool_survive_parking_from_the_kept_list(history: History) -> None:
    pools = {"a": {}, "b": {"min_concurrent": 1, "endpoint": "e"}, "c": {"endpoint": "e"}}
    history.configure(document(pools, total=3, endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "b", 1)
    history.claim("g0", 1)
    submit(history, "a", 9)
    submit(history, "b", 16)
    submit(history, "c", 16)
    history.claim("g0", 1)  # nobody can pay: rounds are added, a launches, b has not collected them
    settle(history, pool="b", want=0)  # b is below its minimum: kept
    history.agree()
    history.claim("g0", 3)
    history.agree()


def test_room_on_an_endpoint_restarts_the_pass(history: History) -> None:
    names = [f"p{number}" for number in range(11)]
    pools: dict[str, dict[str, Any]] = {name: {} for name in names}
    pools["p0"]["endpoint"] = "e"
    history.configure(document(pools, endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "p0", 1)
    history.claim("g0", 1)
    submit(history, "p0", *[2] * 8)
    for name in names[1:]:
        submit(history, name, 16)
    history.claim("g0", 1)  # eight barren visits: p0 cannot launch and does not count among those the pass is for
    settle(history)
    history.agree()
    for _ in range(4):
        history.claim("g0", 1)
        history.agree()


def test_room_under_a_pools_own_cap_restarts_the_pass(history: History) -> None:
    names = [f"p{number}" for number in range(11)]
    pools: dict[str, dict[str, Any]] = {name: {} for name in names}
    pools["p0"]["max_concurrent"] = 1
    history.configure(document(pools))
    submit(history, "p0", 1)
    history.claim("g0", 1)
    submit(history, "p0", *[2] * 8)
    for name in names[1:]:
        submit(history, name, 16)
    history.claim("g0", 1)
    settle(history)
    history.agree()
    for _ in range(4):
        history.claim("g0", 1)
        history.agree()


def test_own_old_lease_elsewhere_brings_a_pool_below_its_minimum_back(history: History) -> None:
    pools = {"a": {"min_concurrent": 1}, "b": {"endpoint": "e"}, "c": {"endpoint": "e"}}
    history.configure(document(pools, endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "a", 1, 1)
    submit(history, "b", 1)
    submit(history, "c", 1)
    history.claim("g0", 1)
    history.configure(with_pool(history.document, "a", endpoint="e"))
    history.claim("g0", 9)
    history.agree()
    settle(history, pool="b")
    settle(history, pool="a")
    history.agree()
    history.claim("g0", 1)


def test_queue_that_was_deleted_wedges_nothing(history: History) -> None:
    """The twin knows no such damage: only the server is asked. It answers, goes on, and the rest ends by deadline."""
    history.configure(document({"a": {"min_concurrent": 1}}))
    submit(history, "a", 1, 1, 1)
    history.eye.client.delete(history.eye.key("requests", pool="a"))
    claims = [history.connection.run(history.name, f.lease_claim("g", "g/x", nonce=n, want=9)) for n in ("1", "2")]
    assert [lease.request_id for claim in claims for lease in claim.leases] == ["r0"]
    history.connection.run(history.name, f.request_submit(submission("r3", "a", 1)))
    later = history.connection.run(history.name, f.lease_claim("g", "g/x", nonce="3", want=9))
    assert [lease.request_id for lease in later.leases] == ["r3"]
    for request_id in ("r1", "r2"):
        history.deadline_passes(history.twin.group.requests[request_id], long_ago=False)
    assert history.connection.run(history.name, f.lease_reap(limit=10)).expired == 2
    totals = history.connection.run(history.name, f.fabric_snapshot("group"))
    assert (totals["pending"], totals["in_flight"]) == (0, 2)


def test_waiting_request_that_was_deleted_ends_malformed(history: History) -> None:
    history.configure(document({"a": {}}))
    first, second = submit(history, "a", 1, 1)
    history.eye.client.delete(history.eye.key("request", id=first))
    claim = history.connection.run(history.name, f.lease_claim("g", "g/x", nonce="1", want=9))
    assert ([lease.request_id for lease in claim.leases], claim.ended) == ([second], 1)
    totals = history.connection.run(history.name, f.fabric_snapshot("group"))
    assert (totals["pending"], totals["in_flight"]) == (0, 1)


def test_fifo_pool_whose_better_level_was_cancelled_is_ranked_by_what_is_left(history: History) -> None:
    history.configure(document({"a": {}, "b": {}}, policy="fifo"))
    oldest, better = (replace(submission(name, "a", 1, "u"), priority=level) for name, level in (("o", 2), ("p", 0)))
    history.submit(oldest)
    submit(history, "b", 1, 1)
    history.submit(better)
    history.claim("g0", 1)
    assert launched(history) == ["b"]  # the head of a is the youngest
    history.cancel("p")
    history.agree()
    history.claim("g0", 1)
    assert launched(history) == ["b", "a"]


def test_fifo_parked_pool_whose_better_level_was_cancelled_is_ranked_by_what_is_left(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}}
    history.configure(document(pools, policy="fifo", endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "b", 1)
    history.claim("g0", 1)
    history.submit(replace(submission("o", "a", 1, "u"), priority=2))
    submit(history, "b", 1)
    history.submit(replace(submission("p", "a", 1, "u"), priority=0))
    history.claim("g0", 1)  # both are parked: a at the youngest
    history.cancel("p")
    settle(history)
    history.claim("g0", 1)
    assert launched(history) == ["a"]


def test_fifo_parked_pool_that_gets_a_younger_head_does_not_overtake(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}}
    history.configure(document(pools, policy="fifo", endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "a", 1, 1)
    submit(history, "b", 1)
    history.claim("g0", 2)  # both are parked: a in front
    history.submit(replace(submission("young", "a", 1, "u"), priority=0))
    settle(history)
    history.claim("g0", 1)
    assert launched(history) == ["b"]


def test_fifo_holder_that_gets_a_younger_head_does_not_overtake(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e"}}
    history.configure(document(pools, policy="fifo", endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    submit(history, "a", 1, 1)
    submit(history, "b", 1)
    history.claim("g0", 2)
    settle(history)  # a comes back alone
    history.submit(replace(submission("young", "a", 1, "u"), priority=0))
    history.claim("g0", 1)
    assert launched(history) == ["b"]

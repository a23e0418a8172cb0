"""What the snapshot says of endpoints, retries, delayed and dead requests, and events; null is what is not known."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import ChoreReport, Chunks, Lease, Outcome, Repair, Settlement, Verdict
from tests.support.by_hand import ByHand
from tests.support.dying import dies
from tests.support.groups import configure, default_document, unique_group
from tests.support.valkey import ValkeyProcess

HOUR_MS = 3_600_000
POOLS = [
    {"pool_id": "default", "max_attempts": 3, "retry_base_ms": HOUR_MS, "retry_cap_ms": HOUR_MS,
     "default_timeout_ms": 24 * HOUR_MS, "max_timeout_ms": 24 * HOUR_MS, "endpoint": "well"},
    {"pool_id": "gated", "endpoint": "gated"},
    {"pool_id": "again", "endpoint": "well", "delivery": "at_least_once", "max_attempts": 1},
]  # fmt: skip
ENDPOINTS = [
    {"endpoint_id": "well", "url": "http://w/v1", "breaker_failures": 2, "open_ms": HOUR_MS, "close_after": 2},
    {"endpoint_id": "gated", "url": "http://g/v1", "gate": "vllm", "gate_target": 4, "gate_stale_ms": 500,
     "gate_fail": "closed"},
]  # fmt: skip


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    group = unique_group()
    configure(valkey.url, group, default_document() | {"pools": POOLS, "endpoints": ENDPOINTS, "hold_max_ms": HOUR_MS})
    hand = ByHand(valkey.url, group)
    yield hand
    hand.close()


def endpoint(hand: ByHand, name: str = "well") -> dict[str, Any]:
    [row] = [row for row in hand.section("endpoints")["rows"] if row["endpoint_id"] == name]
    return dict(row)


def settle(hand: ByHand, lease: Lease, **fields: Any) -> None:
    known = {"outcome": Outcome.FAILED, "error_type": "endpoint_disconnected"} | fields
    item = Settlement(request_id=lease.request_id, fence=lease.fence, **known)
    hand.run(f.lease_settle("g", "g/1", nonce=uuid.uuid4().hex, want=0, items=[item]))


def run(hand: ByHand, pool: str = "default", **fields: Any) -> Lease:
    """Submit, claim and settle one request; returns its lease."""
    hand.submit(pool)
    [lease] = hand.claim(1)
    settle(hand, lease, **fields)
    return lease


def test_a_breaker_is_shown_through_all_its_states(hand: ByHand) -> None:
    row = endpoint(hand)
    assert (row["breaker"], row["failures_in_a_row"], row["failures"]) == ("closed", 0, 0)
    absent = {"breaker_since_ms", "open_until_ms", "probe", "hold_until_ms", "block_reason", "last_error_type", "gate"}
    assert not absent & set(row)
    run(hand, verdict=Verdict.FAILURE)
    row = endpoint(hand)
    assert (row["breaker"], row["failures_in_a_row"], row["last_error_type"]) == ("closed", 1, "endpoint_disconnected")
    run(hand, verdict=Verdict.FAILURE)
    row = endpoint(hand)
    assert (row["breaker"], row["block_reason"], row["good_probes"]) == ("open", "endpoint_open", 0)
    assert row["open_until_ms"] == row["blocked_until_ms"] == row["breaker_since_ms"] + HOUR_MS
    hand.change_record("endpoint", {"open_until": 1_000}, endpoint="well")
    row = endpoint(hand)
    assert (row["breaker"], row["breaker_since_ms"]) == ("half_open", 1_000)
    assert "block_reason" not in row
    [request_id] = hand.submit("default")
    [lease] = hand.claim(1)
    row = endpoint(hand)
    assert (row["probe"]["request_id"], row["probe"]["gateway_id"]) == (request_id, "g")
    assert row["probe"]["until_ms"] == lease.probe_until_ms > row["probe"]["since_ms"]
    [request] = hand.section("request", subject=request_id)["rows"]
    assert request["probe_until_ms"] == lease.probe_until_ms
    settle(hand, lease, outcome=Outcome.SUCCEEDED, verdict=Verdict.GOOD)
    assert (endpoint(hand)["good_probes"], endpoint(hand)["breaker"]) == (1, "half_open")
    run(hand, outcome=Outcome.SUCCEEDED, verdict=Verdict.GOOD)
    assert (endpoint(hand)["breaker"], endpoint(hand)["failures_in_a_row"]) == ("closed", 0)
    moves = [row for row in hand.section("events")["rows"] if row["kind"] == "breaker"]
    assert [(move["endpoint"], move["from"], move["to"]) for move in moves] == [
        ("well", "half_open", "closed"), ("well", "open", "half_open"), ("well", "closed", "open"),
    ]  # fmt: skip
    assert all(isinstance(move["at_ms"], int) for move in moves)


def test_a_probe_that_is_no_request_names_its_gateway_alone(hand: ByHand) -> None:
    for _ in range(2):
        run(hand, verdict=Verdict.FAILURE)
    hand.change_record("endpoint", {"open_until": 1_000}, endpoint="well")
    deadline = time.monotonic() + 10
    while hand.run(f.endpoint_report("watcher")).kind != "PROBE":
        hand.run(f.fabric_repair(Repair("chores", "well"), actor="t"))  # its chore is due in an hour
        assert time.monotonic() < deadline
    probe = endpoint(hand)["probe"]
    assert (probe["gateway_id"], "request_id" in probe) == ("watcher", False)


def test_a_hold_is_shown_until_it_is_over(hand: ByHand) -> None:
    run(hand, verdict=Verdict.BACKPRESSURE, hold_ms=60_000)
    row = endpoint(hand)
    assert (row["breaker"], row["block_reason"]) == ("closed", "endpoint_gated")
    assert row["hold_until_ms"] == row["blocked_until_ms"]
    hand.change_record("endpoint", {"hold_until": 1_000}, endpoint="well")
    assert not {"hold_until_ms", "block_reason"} & set(endpoint(hand))


def test_a_gate_without_a_sample_is_unknown_and_not_zero(hand: ByHand) -> None:
    gate = endpoint(hand, "gated")["gate"]
    unknown = {"waiting", "token_ms", "sampled_ms", "age_ms", "launched_since", "gateway_id"}
    assert {name: gate[name] for name in unknown} == dict.fromkeys(unknown)
    assert (gate["engine"], gate["target"], gate["fail"], gate["stale"]) == ("vllm", 4, "closed", True)


def test_a_gates_sample_is_shown_with_its_age_and_as_stale_when_it_is(hand: ByHand) -> None:
    chore = hand.run(f.endpoint_report("watcher"))
    hand.run(
        f.endpoint_report("watcher", ChoreReport(kind="sample", endpoint_id="gated", token=chore.token, waiting=3.0))
    )
    page = hand.section("endpoints")
    [row] = [row for row in page["rows"] if row["endpoint_id"] == "gated"]
    gate = row["gate"]
    assert (gate["waiting"], gate["token_ms"], gate["launched_since"], gate["gateway_id"]) == (3, None, 0, "watcher")
    assert gate["age_ms"] == page["server_ms"] - gate["sampled_ms"]
    assert gate["stale"] == (gate["age_ms"] > 500)
    deadline = time.monotonic() + 10
    while not (gate := endpoint(hand, "gated")["gate"])["stale"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gate["age_ms"] > 500
    assert gate["waiting"] == 3


def test_delayed_and_dead_requests_and_the_budget_are_shown(hand: ByHand) -> None:
    [request_id] = hand.submit("default")
    [lease] = hand.claim(1)
    settle(hand, lease, retryable=True, status=503, verdict=Verdict.NEUTRAL)
    [row] = hand.section("request", subject=request_id)["rows"]
    assert (row["state"], row["attempt"]) == ("delayed", 1)
    assert not {"gateway_id", "claimed_ms", "endpoint_id"} & set(row)
    [first] = row["tries"]
    assert (first["attempt"], first["status"], first["error_type"]) == (1, 503, "endpoint_disconnected")
    assert (first["gateway_id"], first["endpoint_id"]) == ("g", "well")
    assert first["claimed_ms"] <= first["ended_ms"] <= row["due_ms"]
    dies(hand)
    group = hand.section("group")
    assert (group["delayed"], group["dead"], group["pending"]) == (1, 1, 0)
    assert group["next_due_ms"] == row["due_ms"]
    assert group["next_chore_ms"] <= group["server_ms"]
    budget = group["retry_budget"]
    assert budget["first_attempts_10s"] <= 2
    assert budget["retries_10s"] <= 1
    assert budget["allowed_10s"] == 30  # three a second, whatever the share
    pool = hand.pool("default")
    assert (pool["delayed"], pool["pending"], pool["max_attempts"]) == (1, 0, 3)


def test_a_try_that_brought_no_status_says_null(hand: ByHand) -> None:
    [request_id] = hand.submit("default")
    [lease] = hand.claim(1)
    settle(hand, lease, retryable=True)
    [row] = hand.section("request", subject=request_id)["rows"]
    assert row["tries"][0]["status"] is None


def test_a_stream_says_when_its_first_chunk_went_out(hand: ByHand) -> None:
    [request_id] = hand.submit("default")
    [lease] = hand.claim(1)
    [row] = hand.section("leases")["rows"]
    assert not {"chunks", "first_chunk_ms"} & set(row)
    hand.run(f.reply_append("g", [Chunks(request_id=request_id, fence=lease.fence, number=0, count=2, payload=b"x")]))
    [row] = hand.section("leases")["rows"]
    assert row["chunks"] == 2
    assert row["claimed_ms"] <= row["first_chunk_ms"] <= hand.section("group")["server_ms"]
    settle(hand, lease, outcome=Outcome.SUCCEEDED)
    [ended] = hand.section("endings")["rows"]
    assert (ended["chunks"], ended["first_chunk_ms"]) == (2, row["first_chunk_ms"])


def test_events_come_newest_first_in_pages(hand: ByHand) -> None:
    for number in range(7):
        hand.run(f.pool_pause("default", "pause" if number % 2 == 0 else "resume", actor="anna", reason=str(number)))
    page = hand.section("events", limit=3)
    seen = list(page["rows"])
    while page["cursor"]:
        page = hand.section("events", limit=3, cursor=page["cursor"])
        seen += page["rows"]
    assert [row.get("reason") for row in seen[:7]] == list("6543210")
    assert seen[0]["kind"] == "pause"
    assert seen[0]["actor"] == "anna"
    assert seen[-1]["kind"] == "config"
    assert len({row["event_id"] for row in seen}) == len(seen) == 8

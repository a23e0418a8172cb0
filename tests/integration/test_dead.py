"""Requests whose attempts are spent: what is kept of them, for how long, and what can be done with them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.audit import differences
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.dying import LARGE, LARGE_NONCE, dead, dies, group_where_requests_die
from tests.support.leftovers import keys_without_expiry
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    hand = group_where_requests_die(valkey)
    yield hand
    hand.close()


def run_out(hand: ByHand) -> Any:
    """Claim and settle one request; returns its lease."""
    [lease] = hand.claim(1)
    hand.settle([lease])
    return lease


# ---- what is kept


def test_a_request_whose_leases_ran_out_is_kept_with_all_it_said(valkey: ValkeyProcess) -> None:
    hand = group_where_requests_die(valkey, lease_ms=300)
    hand.beat(gateway="warden")
    [request_id] = hand.submit("again", size=100, envelope=b'{"metadata":{"a":1}}')
    for _ in range(2):
        deadline = time.monotonic() + 20
        while not hand.claim(1, gateway="doomed"):
            assert time.monotonic() < deadline
        while hand.section("leases")["rows"]:
            assert time.monotonic() < deadline
            hand.beat(gateway="warden")
            hand.run(f.lease_reap(limit=10))
            time.sleep(0.05)
    [row] = hand.section("dead")["rows"]
    assert (row["request_id"], row["pool_id"], row["attempt"], row["last_error_type"]) == (
        request_id,
        "again",
        2,
        "lost",
    )
    assert [(one["attempt"], one["error_type"], one["gateway_id"]) for one in row["tries"]] == [
        (1, "lost", "doomed"), (2, "lost", "doomed"),
    ]  # fmt: skip
    assert "x" * 10 not in json.dumps(row)
    assert "metadata" not in json.dumps(row)
    said = hand.run(f.dead_content(request_id))
    assert (said.envelope, said.body) == (b'{"metadata":{"a":1}}', b"x" * 100)
    assert hand.section("group")["dead"] == 1
    assert differences(hand.connection, hand.group) == []
    hand.close()


def test_nothing_that_is_kept_stays_without_an_expiry(hand: ByHand) -> None:
    dies(hand)
    dies(hand, size=LARGE)
    assert keys_without_expiry(hand.url, hand.group) == []


def test_at_most_once_and_other_endings_are_not_kept(hand: ByHand) -> None:
    hand.submit("default")
    hand.settle(hand.claim(1), outcome=Outcome.LOST)
    hand.submit("again")
    hand.settle(hand.claim(1), outcome=Outcome.FAILED)
    hand.submit("again")
    run_out(hand)
    assert dead(hand) == []


def test_the_oldest_make_room_with_all_that_is_kept_of_them(valkey: ValkeyProcess) -> None:
    hand = group_where_requests_die(valkey, dead_kept=2)
    first = dies(hand, size=LARGE)
    others = [dies(hand), dies(hand)]
    assert dead(hand) == others[::-1]
    with eye(hand.url) as client:
        deadline = time.monotonic() + 10
        while client.exists(key(hand.group, "request", id=first)):
            assert time.monotonic() < deadline
        assert client.exists(key(hand.group, "request_body", id=first, nonce=LARGE_NONCE)) == 0
    hand.close()


def test_none_are_kept_where_none_are_wanted(valkey: ValkeyProcess) -> None:
    hand = group_where_requests_die(valkey, dead_kept=0)
    request_id = dies(hand, envelope=b'{"secret":1}')
    assert dead(hand) == []
    with eye(hand.url) as client:
        kept = client.hgetall(key(hand.group, "request", id=request_id))
        assert (kept[b"envelope"], kept[b"body"]) == (b"", b"")
    assert keys_without_expiry(hand.url, hand.group) == []
    hand.close()


def test_what_is_too_old_is_gone_and_counted_no_more(valkey: ValkeyProcess) -> None:
    hand = group_where_requests_die(valkey, dead_ttl_ms=1000)
    old = dies(hand)
    deadline = time.monotonic() + 20
    while dead(hand):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert hand.section("group")["dead"] == 0
    new = dies(hand)
    with eye(hand.url) as client:
        assert client.zrange(key(hand.group, "dead"), 0, -1) == [new.encode()]
        assert client.exists(key(hand.group, "request", id=old)) == 0
    hand.close()


def test_an_id_that_was_used_again_is_not_taken_for_the_dead_one(hand: ByHand) -> None:
    request_id = dies(hand)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "request", id=request_id))
    hand.submit("default", request_id=request_id)
    assert dead(hand) == []
    assert hand.run(f.dead_change("drop", request_id, actor="t")).status == "UNKNOWN"
    assert run_out(hand).request_id == request_id


def test_pages_of_the_list_miss_nobody_when_it_grows_and_shrinks(hand: ByHand) -> None:
    ids = [dies(hand, "once-more") for _ in range(12)]
    page = hand.section("dead", limit=5)
    seen = [row["request_id"] for row in page["rows"]]
    dies(hand, "once-more")
    hand.run(f.dead_change("drop", seen[-1], actor="t"))
    while page["cursor"]:
        page = hand.section("dead", limit=5, cursor=page["cursor"])
        seen += [row["request_id"] for row in page["rows"]]
    assert set(ids) <= set(seen)
    only = hand.section("dead", subject="again")["rows"]
    assert only == []


# ---- retry and drop


@pytest.mark.parametrize("size", [0, 40, LARGE])
def test_a_retry_is_a_new_request_with_the_same_call(hand: ByHand, size: int) -> None:
    old = dies(
        hand, size=size, estimated_cost_units=7, fairness_key="ann", priority=0, envelope=b'{"a":1}', model="big",
        timeout_ms=900_000,
    )  # fmt: skip
    answer = hand.run(f.dead_change("retry", old, actor="t", new_id="anew"))
    assert (answer.status, answer.new_id) == ("RETRIED", "anew")
    assert dead(hand) == []
    [row] = hand.section("request", subject="anew")["rows"]
    assert (row["state"], row["attempt"], row["cost"], row["priority"]) == ("queued", 0, 7, 0)
    assert (row["fairness_key"], row["model"], row["detached"], row["body_bytes"]) == ("ann", "big", True, size)
    assert row["deadline_ms"] - row["submitted_ms"] == 60_000  # the pool's own
    [lease] = hand.claim(1)
    assert (lease.request_id, lease.attempt, lease.envelope) == ("anew", 1, b'{"a":1}')
    where = key(hand.group, "request_body", id="anew", nonce=lease.nonce)
    body = hand.connection.get(where) if size == LARGE else lease.body
    assert body == (b"y" if size == LARGE else b"x") * size
    hand.settle([lease])
    assert [each["ending"] for each in hand.section("endings", limit=1)["rows"]] == ["succeeded"]
    assert differences(hand.connection, hand.group) == []


def test_a_retry_needs_no_living_producer_and_its_reply_is_kept(hand: ByHand) -> None:
    old = dies(hand)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "alive", producer="p"))
        hand.run(f.dead_change("retry", old, actor="t", new_id="anew"))
        run_out(hand)
        assert client.exists(key(hand.group, "result", id="anew")) == 1


def test_a_retry_wakes_a_sleeping_gateway(hand: ByHand) -> None:
    old = dies(hand)
    assert hand.claim(1) == []
    before = hand.tokens()
    hand.run(f.dead_change("retry", old, actor="t", new_id="anew"))
    assert hand.tokens() == before + 1


def test_a_retry_that_spends_its_attempts_is_kept_again(hand: ByHand) -> None:
    old = dies(hand)
    hand.run(f.dead_change("retry", old, actor="t", new_id="anew"))
    while leases := hand.claim(1):
        hand.settle(leases, outcome=Outcome.LOST)
    assert dead(hand) == ["anew"]


@pytest.mark.parametrize("action", ["retry", "drop"])
def test_a_second_time_there_is_nothing_to_do(hand: ByHand, action: str) -> None:
    old = dies(hand, size=LARGE)
    first = hand.run(f.dead_change(action, old, actor="t", new_id="one"))
    assert first.status in {"RETRIED", "DROPPED"}
    assert hand.run(f.dead_change(action, old, actor="t", new_id="two")).status == "UNKNOWN"
    assert hand.run(f.dead_content(old)) is None


def test_a_drop_leaves_nothing(hand: ByHand) -> None:
    old = dies(hand, size=LARGE)
    assert hand.run(f.dead_change("drop", old, actor="t")).status == "DROPPED"
    with eye(hand.url) as client:
        deadline = time.monotonic() + 10
        while client.exists(
            key(hand.group, "request", id=old), key(hand.group, "request_body", id=old, nonce=LARGE_NONCE)
        ):
            assert time.monotonic() < deadline
    assert differences(hand.connection, hand.group) == []

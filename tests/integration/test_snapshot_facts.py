"""Facts of the snapshot that an operator's verdicts rest on: heads, probes, readers of the endings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome, Settlement, Verdict
from dispatch.fabric.schema import key
from dispatch.fabric.streams import HISTORY
from dispatch.fabric.view import read_view_blocking
from tests.support.by_hand import ByHand
from tests.support.producing import eye, wide_group
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    made = ByHand(valkey.url, wide_group(valkey.url))
    yield made
    made.connection.close()


def head_ms(hand: ByHand, pool: str) -> int | None:
    """Return since when the pool's head waits, as the list of all pools says."""
    rows = {row["pool_id"]: row for row in hand.section("pools")["rows"]}
    found: int | None = rows[pool].get("head_submitted_ms")
    return found


def test_every_pool_with_work_says_since_when_its_head_waits(hand: ByHand) -> None:
    first, second = hand.submit("backfill", 2)
    assert head_ms(hand, "default") is None
    assert head_ms(hand, "backfill") == hand.section("request", subject=first)["rows"][0]["submitted_ms"]
    hand.claim(1)  # the record of the pool knows no head any more
    assert head_ms(hand, "backfill") == hand.section("request", subject=second)["rows"][0]["submitted_ms"]


def test_an_open_breaker_says_when_it_is_asked(valkey: ValkeyProcess) -> None:
    endpoints = [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1", "breaker_failures": 1, "open_ms": 60_000}]
    hand = ByHand(valkey.url, wide_group(valkey.url, endpoints=endpoints))
    hand.submit()
    [lease] = hand.claim(1)
    hand.run(
        f.lease_settle(
            "g", "g/1", nonce="n", want=0,
            items=[Settlement(request_id=lease.request_id, fence=lease.fence, outcome=Outcome.FAILED,
                                  verdict=Verdict.FAILURE, error_type="endpoint_unreachable")],
        )
    )  # fmt: skip
    view = read_view_blocking(hand.connection.run_many, hand.group)
    endpoint = view.endpoint("default")
    assert endpoint is not None
    assert (endpoint.breaker, endpoint.failures_in_a_row, endpoint.last_error_type) == (
        "open", 1, "endpoint_unreachable",
    )  # fmt: skip
    assert endpoint.next_probe_ms == endpoint.open_until_ms
    assert endpoint.breaker_since_ms is not None
    hand.connection.close()


def test_readers_of_the_endings_are_shown_with_what_they_have_not_taken(hand: ByHand) -> None:
    assert hand.section("group")["readers"] == []
    hand.submit(count=3)
    hand.settle(hand.claim(3))
    assert hand.section("group")["readers"] == []
    stream = key(hand.group, "endings")
    with eye(hand.url) as client:
        client.xgroup_create(stream, HISTORY, "0")
        [row] = hand.section("group")["readers"]
        assert (row["name"], row["lag"], row["taken"]) == (HISTORY, 3, 0)
        assert "last_ms" not in row
        client.xreadgroup(HISTORY, "consumer", {stream: ">"}, count=2)
        [row] = hand.section("group")["readers"]
        assert (row["lag"], row["taken"], row["consumers"]) == (1, 2, 1)
        first, second, _ = (int(entry[0].split(b"-")[0]) for entry in client.xrange(stream))
        assert (row["oldest_taken_ms"], row["last_ms"]) == (first, second)


def test_a_view_of_a_real_group_has_every_section(hand: ByHand) -> None:
    hand.submit(count=4)
    leases = hand.claim(3)
    hand.settle(leases[:1])
    hand.beat(leases[1:])
    hand.run(f.pool_pause("backfill", "pause", actor="me", reason="why"))
    view = read_view_blocking(hand.connection.run_many, hand.group)
    assert (view.unknown, view.truncated) == ({}, frozenset())
    assert view.group is not None
    assert (view.group.pending, view.group.in_flight, view.group.readers) == (1, 2, ())
    assert {row.request_id for row in view.running or ()} == {lease.request_id for lease in leases[1:]}
    assert all(row.producer_id == "p" and row.model == "m" and row.attempt == 1 for row in view.running or ())
    assert [row.ending for row in view.endings or ()] == ["succeeded"]
    assert [row.gateway_id for row in view.gateways or ()] == ["g"]
    backfill = view.pool("backfill")
    assert backfill is not None
    assert backfill.paused is not None
    assert (backfill.paused.by, backfill.paused.reason) == ("me", "why")
    assert [(event.kind, event.facts["actor"]) for event in view.events or ()][:1] == [("pause", "me")]

"""What the page's rows are made of: why a pool waits, lines of 15 minutes, patches, and what is never shown."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.fabric.view import (
    EndingRow,
    EndpointRow,
    EventRow,
    FabricView,
    GateRow,
    GatewayRow,
    GroupRow,
    Note,
    PoolRow,
)
from dispatch.studio.board import Memory, note_gone, tables_of
from dispatch.studio.lines import POINT_MS, Lines, Recent
from dispatch.studio.patches import patch_between
from dispatch.studio.redacting import address_of, without_secrets
from dispatch.studio.strip import APPEARS_MS, STAYS_MS, Strip
from dispatch.studio.why import why_of

NOW = 1_800_000_000_000
LIVE = GatewayRow(gateway_id="g", slots=8, in_flight=1, beat_ms=NOW, draining=False)


def view(at: int = NOW, **facts: Any) -> FabricView:
    usual: dict[str, Any] = {
        "name": "g", "server_ms": at, "read_ms": at, "pools": (), "endpoints": (), "gateways": (LIVE,),
        "group": GroupRow(server_ms=at, total_concurrent_dispatch=16, in_flight=16, lease_ms=3_600_000),
    }  # fmt: skip
    return FabricView(**usual | facts)


def pool(**facts: Any) -> PoolRow:
    usual: dict[str, Any] = {"pool_id": "p", "quantum": 1, "enabled": True, "pending": 3, "in_flight": 1}
    return PoolRow(**usual | facts)


GATE = GateRow(target=3, waiting=5.0, token_limit_ms=150, token_ms=20.0, stale=False, fail="open")
OPEN = EndpointRow(endpoint_id="e", breaker="open", last_error_type="endpoint_unreachable", open_until_ms=NOW + 8_000)


@pytest.mark.parametrize(
    ("row", "endpoint", "text", "more"),
    [
        ({}, None, "Flowing", "served as it arrives"),
        ({"pending": 0}, None, "Flowing", "nothing waits"),
        ({"pending": 0, "in_flight": 0}, None, "Idle", "nothing waits"),
        ({"pending": 0, "delayed": 2}, None, "Flowing", "2 requests wait for the next attempt"),
        ({"pending": None}, None, "Reason unknown", "the snapshot has none"),
        ({"enabled": False}, None, "Disabled in the config", "new requests are refused"),
        ({"paused": Note(by="m.okafor", reason="demo")}, None, "Paused by m.okafor", "\u201cdemo\u201d"),
        ({"draining": Note()}, None, "Draining", "no reason was given"),
        ({"block_reason": "lane_capacity", "in_flight": 4, "max_concurrent": 4}, None,
         "Pool is at its cap", "4 of 4 slots in use"),
        ({"block_reason": "global_capacity"}, None, "Group is at its cap", "16 of 16 slots in use"),
        ({"block_reason": "insufficient_credit", "head_cost": 9, "deficit": 6}, None,
         "Its turn is next", "head costs 9, credit 6"),
        ({"block_reason": "endpoint_open"}, OPEN, "Breaker of e is open", "endpoint_unreachable"),
        ({"block_reason": "endpoint_gated"}, EndpointRow(endpoint_id="e", gate=GATE),
         "Gate of e holds", "5 queued in the engine, target 3"),
        ({"block_reason": "endpoint_gated"}, EndpointRow(endpoint_id="e", hold_until_ms=NOW + 5),
         "e asked to wait", "it said Retry-After"),
        ({"block_reason": "endpoint_capacity", "endpoint_id": "x"}, None, "x is full", ""),
        ({"block_reason": "something_new"}, None, "Reason unknown (something_new)", ""),
    ],
)  # fmt: skip
def test_each_reason_is_told(row: dict[str, Any], endpoint: EndpointRow | None, text: str, more: str) -> None:
    why = why_of(pool(**row), endpoint, view())
    assert (why.text, why.more) == (text, more)


def test_nobody_who_takes_is_a_reason() -> None:
    assert why_of(pool(), None, view(gateways=())).text == "No gateway is live"
    assert why_of(pool(), None, view(gateways=None)).text == "Flowing"  # not known: nothing is concluded
    full = GatewayRow(gateway_id="g", slots=8, in_flight=8, beat_ms=NOW, draining=False)
    assert why_of(pool(), None, view(gateways=(full,))).text == "Gateways are full"


def test_what_is_unknown_stays_unknown_in_the_rows() -> None:
    nothing = FabricView(name="g", server_ms=NOW, read_ms=NOW)
    totals = tables_of(nothing, Memory())["one"]["totals"]
    for name in ("waiting", "in_flight", "gateways", "arriving", "finished", "not_ok", "wait_ms", "oldest_ms"):
        assert totals[name] is None, name
    row = tables_of(view(pools=(PoolRow(pool_id="p"),)), Memory())["pools"]["p"]
    for name in ("waiting", "weight", "share", "fair", "arriving", "in_flight"):
        assert row[name] is None, name


def test_a_gateway_that_left_is_gone_for_ten_minutes() -> None:
    memory = Memory()
    note_gone(view(), view(NOW + 1_000, gateways=()), memory)
    assert tables_of(view(NOW + 1_000, gateways=()), memory)["gateways"]["g"]["state"] == "gone"
    assert tables_of(view(NOW + 700_000, gateways=()), memory)["gateways"] == {}
    note_gone(view(), view(NOW, gateways=()), memory)
    assert tables_of(view(), memory)["gateways"]["g"]["state"] == "live"


def test_a_line_has_a_point_each_five_seconds_and_gaps_where_nothing_was_read() -> None:
    lines = Lines()
    for at in (0, 1_000, POINT_MS, 4 * POINT_MS):
        lines.take(view(NOW + at, pools=(pool(pending=at),)))
    assert list(lines.pools["p"]) == [0, POINT_MS, None, None, 4 * POINT_MS]


def test_what_did_not_succeed_is_counted_by_the_counters() -> None:
    lines = Lines()
    counts = [{"succeeded": 10, "failed": 1}, {"succeeded": 25, "failed": 4, "expired": 2}]
    views = [view(NOW + at * POINT_MS, pools=(pool(endings=each),)) for at, each in enumerate(counts)]
    lines.take(views[0])
    assert lines.not_succeeded(views[0]) is None
    lines.take(views[1])
    assert lines.not_succeeded(views[1]) == (5, 20)
    assert lines.group["finished"][-1] == 4.0
    began_anew = view(NOW + 3 * POINT_MS, pools=(pool(endings={"succeeded": 1}),))
    assert lines.not_succeeded(began_anew) is None


def test_means_are_of_what_succeeded_and_each_ending_counts_once() -> None:
    recent = Recent()
    rows = tuple(
        EndingRow(record_id=f"{NOW}-{at}", ending=ending, submitted_ms=NOW - 5_000, claimed_ms=NOW - run, ended_ms=NOW,
                  error_type="endpoint_failed" if ending == "failed" else None)
        for at, (ending, run) in enumerate([("failed", 1), ("succeeded", 3_000), ("succeeded", 1_000)])
    )  # fmt: skip
    recent.take(view(endings=rows[::-1]))
    recent.take(view(endings=rows[::-1]))
    assert recent.facts() == {"wait_ms": 3_000, "run_ms": 2_000, "error": "endpoint_failed", "sample": 3}


def test_a_patch_says_what_changed_and_no_more() -> None:
    old = {"pools": {"a": {"x": 1, "y": 2}, "b": {"x": 1}}}
    new = {"pools": {"a": {"x": 1, "y": 3}, "c": {"x": 5}}}
    assert patch_between(old, new) == {"set": {"pools": {"a": {"y": 3}, "c": {"x": 5}}}, "del": {"pools": ["b"]}}
    assert patch_between(new, new) == {}
    assert patch_between({"t": {"a": {"x": 1}}}, {"t": {"a": {}}}) == {"set": {"t": {"a": {"x": None}}}}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@host:8000/v1?key=secret", "host:8000"),
        ("https://[::1]:99/v1", "[::1]:99"),
        ("valkey://host", "host"),
        ("http://host:port/", "an unreadable address"),
        (None, None),
    ],
)
def test_an_address_is_shown_without_what_is_secret(url: str | None, shown: str | None) -> None:
    assert address_of(url) == shown


def test_texts_lose_what_is_secret_in_their_urls() -> None:
    told = without_secrets("url http://u:secret@h/v1?k=secret, then https://x/y")
    assert "secret" not in told
    assert told.startswith("url http://h/v1")
    assert told.endswith("https://x/y")


def test_findings_neither_flash_nor_vanish_at_once() -> None:
    strip, memory = Strip(), Memory()
    silent = {"gateways": (), "pools": (pool(),), "group": GroupRow(server_ms=NOW, pending=3)}
    assert strip.rows(view(NOW, **silent), memory) == {}
    [row] = strip.rows(view(NOW + APPEARS_MS, **silent), memory).values()
    assert row["rule"] == "no_gateway"
    assert not row["cleared"]
    well = {"pools": (pool(pending=0),)}
    [row] = strip.rows(view(NOW + APPEARS_MS + 1_000, **well), memory).values()
    assert row["cleared"]
    assert strip.rows(view(NOW + APPEARS_MS + STAYS_MS + 1_001, **well), memory) == {}


def test_a_breaker_that_moves_again_and_again_hides_no_person() -> None:
    moves = [("open", "half_open"), ("half_open", "open")] * 40
    rows = [
        EventRow(event_id=f"{NOW - at}-0", kind="breaker", at_ms=NOW - at, facts={"endpoint": "e", "to": to})
        for at, (_, to) in enumerate(moves)
    ]
    rows.append(EventRow(event_id="5-0", kind="pause", at_ms=5, facts={"pool": "p", "actor": "m.okafor"}))
    [breaker, pause] = tables_of(view(events=tuple(rows)), Memory())["events"].values()
    assert (breaker["times"], breaker["at_ms"], breaker["first_ms"]) == (80, NOW, NOW - 79)
    assert pause["facts"]["actor"] == "m.okafor"

"""Each rule of the attention strip on a view made for it: the sentence, and that it is silent when it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dispatch.fabric.view import FabricView, GateRow, Note, ReaderRow
from dispatch.studio.findings import HistoryFacts
from dispatch.studio.verdict import attention, pool_names
from tests.unit.studio.scenes import (
    NOW,
    ended,
    endpoint,
    found,
    gateway,
    group,
    later,
    pool,
    running,
    the_one,
    view,
)


def test_a_quiet_group_wants_nothing() -> None:
    assert found(view()) == []
    assert found(view(), later(view(), 10_000)) == []


def gate(**facts: Any) -> GateRow:
    usual = {"engine": "vllm", "target": 3, "token_limit_ms": 150, "fail": "open", "sampled_ms": NOW - 100,
             "stale": False, "launched_since": 0}  # fmt: skip
    return GateRow(**usual | facts)


WAITING = pool(pending=7, block_since_ms=NOW - 372_000, block_reason="endpoint_open")

ONE_VIEW: dict[str, tuple[Callable[[], FabricView], str, str, str]] = {
    "breaker open": (
        lambda: view(pools=(WAITING,), endpoints=(endpoint(breaker="open", failures_in_a_row=5),)),
        "broken", "endpoint:vllm",
        "vision stands still: the breaker of vllm is open after 5 failed calls in a row.",
    ),
    "breaker open, several pools": (
        lambda: view(pools=(pool("a", pending=1), pool("b", pending=3), pool("c", pending=2)),
                     endpoints=(endpoint(breaker="open", failures_in_a_row=1),)),
        "broken", "endpoint:vllm",
        "b and 2 more pools stand still: the breaker of vllm is open after 1 failed call in a row.",
    ),
    "breaker open, nothing waits": (
        lambda: view(endpoints=(endpoint(breaker="open", failures_in_a_row=5),)),
        "broken", "endpoint:vllm",
        "The breaker of vllm is open after 5 failed calls in a row; nothing waits for it.",
    ),
    "breaker half open": (
        lambda: view(pools=(WAITING,), endpoints=(endpoint(breaker="half_open", good_probes=1),)),
        "broken", "endpoint:vllm", "vision stands still: the breaker of vllm is half open, 1 of 3 good probes.",
    ),
    "no gateway": (
        lambda: view(group=group(pending=7), pools=(pool(pending=7),), gateways=()),
        "broken", "group", "No gateway is live: 7 requests wait, nothing is dispatched.",
    ),
    "the only gateway's heartbeat is old": (
        lambda: view(group=group(pending=1), pools=(pool(pending=1),), gateways=(gateway(beat_ms=NOW - 30_000),)),
        "broken", "group", "No gateway is live: 1 request waits, nothing is dispatched.",
    ),
    "gateway silent": (
        lambda: view(running=(running("r1", 60_000),), gateways=(gateway(beat_ms=NOW - 24_000), gateway("gw-b"))),
        "broken", "gateway:gw-a", ("gw-a has not been heard of for 24 s and holds 1 request; leases end in 11 s, then "
        "they are lost or run again."),
    ),
    "gateway gone": (
        lambda: view(running=(running("r1", 60_000, lease_until_ms=NOW - 1), running("r2", 5)), gateways=()),
        "broken", "gateway:gw-a", ("gw-a is gone and holds 2 requests; their leases are over, and no gateway has taken "
        "them back."),
    ),
    "endpoint fails": (
        lambda: view(endpoints=(endpoint(failures_in_a_row=2, last_error_type="endpoint_unreachable",
                                         last_error_ms=NOW - 12_000),)),
        "broken", "endpoint:vllm",
        "vllm cannot be reached: 2 failed calls in a row, the last 12 s ago; its breaker opens at 5.",
    ),
    "gate holds": (
        lambda: view(pools=(pool(pending=4),),
                     endpoints=(endpoint(block_reason="endpoint_gated", gate=gate(waiting=2, launched_since=2)),)),
        "held", "endpoint:vllm", ("vision is slowed: the gate of vllm holds at 4 queued, target 3. The backend is the "
        "bottleneck."),
    ),
    "gate holds by token time": (
        lambda: view(pools=(pool(pending=4),),
                     endpoints=(endpoint(block_reason="endpoint_gated", gate=gate(waiting=0, token_ms=210.4)),)),
        "held", "endpoint:vllm", ("vision is slowed: the gate of vllm holds at 210 ms per token, limit 150 ms. The "
        "backend is the bottleneck."),
    ),
    "Retry-After": (
        lambda: view(pools=(pool(pending=4),),
                     endpoints=(endpoint(block_reason="endpoint_gated", hold_until_ms=NOW + 12_000),)),
        "held", "endpoint:vllm", ("vision is slowed: vllm asked to wait (429 or 503), 12 s are left. The backend is "
        "the bottleneck."),
    ),
    "sample stale": (
        lambda: view(endpoints=(endpoint(gate=gate(stale=True, sampled_ms=NOW - 34_000, fail="closed")),)),
        "held", "endpoint:vllm", "Engine metrics of vllm are 34 s old; fail mode closed applies.",
    ),
    "never a sample": (
        lambda: view(endpoints=(endpoint(gate=gate(stale=True, sampled_ms=None)),)),
        "held", "endpoint:vllm", "vllm has given no engine metrics yet; fail mode open applies.",
    ),
    "group capped": (
        lambda: view(group=group(in_flight=8, pending=3), pools=(pool("a", pending=1), pool("b", pending=2))),
        "capped", "group", "All 8 slots of the group are in use; 2 pools wait.",
    ),
    "gateways full": (
        lambda: view(group=group(in_flight=4, pending=3, total_concurrent_dispatch=16), pools=(pool(pending=3),),
                     gateways=(gateway(slots=4, in_flight=4), gateway("gw-b", slots=9, draining=True))),
        "capped", "group", "Gateways are full (4 of 4); 12 group slots cannot be used.",
    ),
    "refuses soon": (
        lambda: view(pools=(pool(pending=81),)), "capped", "pool:vision", "vision refuses soon: 81 of 100 waiting.",
    ),
    "refuses soon by bytes": (
        lambda: view(pools=(pool(pending=1, pending_bytes=999),)),
        "capped", "pool:vision", "vision refuses soon: 999 of 1\u202f000 bytes.",
    ),
    "long runs": (
        lambda: view(running=(running("r1", 724_000), running("r2", 601_000), running("r3", 599_000))),
        "held", "group", "2 requests run unusually long, the longest 12 m 04 s on gw-a.",
    ),
    "longer than the pool's usual": (
        lambda: view(running=(running("r1", 7_000), running("r2", 2_900)), endings=tuple(ended(n) for n in range(20))),
        "held", "group", "1 request runs unusually long, the longest 7.0 s on gw-a; 95 % of vision take at most 1.0 s.",
    ),
    "lost": (
        lambda: view(endings=(ended(2, "lost"), ended(1, "lost"))),
        "broken", "group", ("2 requests ended as lost in 5 m 00 s: gw-a died or lost touch while it held them, and the "
        "pool is at_most_once."),
    ),
    "producer gone": (
        lambda: view(endings=(ended(1, "producer_gone"), ended(0, "producer_gone", ended_ms=NOW - 300_001))),
        "broken", "group",
        "1 request ended as producer_gone in 5 m 00 s: app stopped refreshing its liveness key before they ran.",
    ),
    "more than was read": (
        lambda: view(endings=(ended(1, "dead"),), truncated=frozenset({"endings"})),
        "broken", "group",
        "At least 1 request ended as dead in 5 m 00 s: their attempts are spent, the last on gw-a.",
    ),
    "paused": (
        lambda: view(pools=(pool(pending=9, paused=Note(by="m.okafor", at_ms=NOW - 60_000, reason="moving")),)),
        "person", "pool:vision", 'vision is paused by m.okafor "moving"; 9 requests wait in it.',
    ),
    "draining": (
        lambda: view(pools=(pool(pending=1, draining=Note(by="ci", at_ms=NOW)),)),
        "person", "pool:vision", "vision is being drained by ci; 1 request waits in it.",
    ),
    "versions": (
        lambda: view(gateways=(gateway(), gateway("gw-b", version="1.1"), gateway("gw-c", version="1.1"))),
        "person", "group", "Gateways run 2 versions: 1.0 on gw-a; 1.1 on gw-b, gw-c.",
    ),
    "clock": (
        lambda: view(read_ms=NOW + 3_200), "person", "group", "The clock here is 3.2 s ahead of Valkey's.",
    ),
    "not read": (
        lambda: view(endpoints=None, unknown={"endpoints": "the key may not read it"}),
        "unknown", "group", "The section endpoints could not be read: the key may not read it.",
    ),
    "history behind": (
        lambda: view(group=group(readers=(ReaderRow(name="history", lag=3, last_ms=NOW - 90_000),)),
                     endings=(ended(1, ended_ms=NOW - 40_000),)),
        "broken", "group", "History is 3 endings behind; the last it took ended 1 m 30 s ago.",
    ),
    "history has not written": (
        lambda: view(group=group(readers=(
            ReaderRow(name="history", lag=0, last_ms=NOW, taken=4, oldest_taken_ms=NOW - 30_000),))),
        "broken", "group", "4 endings were taken and not written, the oldest ended 30 s ago.",
    ),
    "history off": (
        lambda: view(group=group(readers=()), endings=(ended(1),)),
        "note", "group", ("Nothing takes the endings of this group to a history: history is off, or no gateway that "
        "writes it has run in this group."),
    ),
    "one answer of an endpoint": (
        lambda: view(endings=(ended(1, "failed", status=503), ended(2), ended(3, "failed", status=400))),
        "note", "endpoint:vllm", ("vllm answered 1 request with status 503; no other provider was asked, since "
        "fallback, provider limits and budgets belong to the endpoint, not to dispatch."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_VIEW)
def test_rule(name: str) -> None:
    make, kind, subject, sentence = ONE_VIEW[name]
    finding = the_one(make())
    assert (finding.kind, finding.subject, finding.sentence) == (kind, subject, sentence)
    assert finding.look_first
    assert finding.act is not None
    assert "secret" not in repr(finding)


SILENT: dict[str, Callable[[], FabricView]] = {
    "gateways are not known": lambda: view(group=group(pending=7), pools=(pool(pending=7),), gateways=None),
    "gate holds and nothing waits": lambda: view(endpoints=(endpoint(block_reason="endpoint_gated", gate=gate()),)),
    "group capped and only a paused pool waits": lambda: view(
        group=group(in_flight=8), pools=(pool(pending=0, paused=Note(by="x")),)
    ),
    "gateways full and pools at their caps": lambda: view(
        group=group(in_flight=8, pending=3, total_concurrent_dispatch=16), gateways=(gateway(in_flight=8),),
        pools=(pool(pending=3, block_reason="lane_capacity"),),
    ),
    "a drained gateway's own old version": lambda: view(
        gateways=(gateway(), gateway("gw-b", version="0.9", beat_ms=NOW - 40_000))
    ),
    "a heartbeat that is one late": lambda: view(
        running=(running("r1", 1_000),), gateways=(gateway(beat_ms=NOW - 15_000),)
    ),
    "an old failure": lambda: view(endpoints=(endpoint(failures_in_a_row=2, last_error_ms=NOW - 300_001),)),
    "a pool without a bound of depth": lambda: view(pools=(pool(pending=5, max_queue_depth=None),)),
    "too few runs to know the usual": lambda: view(running=(running("r1", 7_000),), endings=(ended(1),)),
    "history reads what ends just now": lambda: view(
        group=group(readers=(ReaderRow(name="history", lag=3, last_ms=NOW - 90_000),)), endings=(ended(1),)
    ),
    "nothing has ended": lambda: view(group=group(readers=())),
    "readers are not known": lambda: view(group=group(readers=None), endings=(ended(1),)),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_rule_is_silent(name: str) -> None:
    assert found(SILENT[name]()) == []


def test_nothing_is_concluded_from_what_is_not_known() -> None:
    blank = FabricView(name="prod", server_ms=NOW, read_ms=NOW)
    assert found(blank) == []


def moving(**facts: Any) -> tuple[FabricView, FabricView]:
    """A pool in which 5 more wait after 10 s, its head for 8 s."""
    before = view(pools=(pool(pending=3, submitted=10, launched=10),))
    grown = {"pending": 8, "submitted": 25, "launched": 20, "head_submitted_ms": NOW + 2_000}
    return before, later(before, 10_000, pools=(pool(**grown | facts),))


def test_pool_grows_at_its_cap() -> None:
    finding = the_one(*moving(in_flight=4, max_concurrent=4, block_reason="lane_capacity"))
    assert (finding.rule, finding.kind) == ("pool_capped", "capped")
    assert finding.sentence == "vision grows by 0.5/s at its cap of 4, while vllm has 16 slots free."


def test_pool_grows_for_another_reason() -> None:
    finding = the_one(*moving(block_reason="endpoint_capacity"))
    assert finding.sentence == "vision grows by 0.5/s, 8 wait: endpoint is full."
    assert the_one(*moving()).sentence.endswith("it arrives faster than it leaves.")


def test_pool_that_flows_does_not_grow() -> None:
    assert found(*moving(head_submitted_ms=NOW + 9_500)) == []
    assert found(*moving(pending=3)) == []


def test_pool_refuses() -> None:
    before = view(pools=(pool(pending=100, rejected={"pool_full": 10}),))
    after = later(before, 10_000, pools=(pool(pending=100, rejected={"pool_full": 40}),))
    assert the_one(before, after).sentence == "vision refuses: 3.0/s rejected, 100 of 100 waiting."


def shared(costs: dict[str, int], **facts: Any) -> tuple[FabricView, FabricView]:
    usual = {"pending": 50, "quantum": 4}
    before = view(pools=tuple(pool(name, **usual | facts) for name in costs))
    return before, later(
        before, 10_000, pools=tuple(pool(name, cost_served=cost, **usual | facts) for name, cost in costs.items())
    )


def test_sharing_is_off() -> None:
    finding = the_one(*shared({"a": 100, "b": 900}))
    assert (finding.subject, finding.sentence) == ("pool:a", "Sharing is off for a: 10 % of 50 %.")


def test_sharing_is_within_the_bound() -> None:
    assert found(*shared({"a": 480, "b": 520})) == []


def test_sharing_of_a_held_pool_says_nothing() -> None:
    assert all(
        each.rule != "sharing_off" for each in found(*shared({"a": 100, "b": 900}, block_reason="lane_capacity"))
    )


def test_only_the_first_that_fits_a_pool_speaks() -> None:
    before, after = moving(block_reason="endpoint_open", pending=90)
    broken = later(after, 0, endpoints=(endpoint(breaker="open", failures_in_a_row=5),))
    finding = the_one(before, broken)
    assert finding.rule == "breaker_open"
    assert finding.covers == ("pool:vision",)
    assert list(pool_names([finding])) == ["vision"]


def test_order_is_broken_held_capped_person_then_the_longest() -> None:
    mixed = view(
        group=group(in_flight=8),
        pools=(
            pool("a", pending=1, endpoint_id="x"),
            pool("b", pending=1, endpoint_id="y"),
            pool("c", pending=1, paused=Note(by="me", at_ms=NOW)),
        ),
        endpoints=(
            endpoint("y", breaker="open", breaker_since_ms=NOW - 5),
            endpoint("x", breaker="open", breaker_since_ms=NOW - 10),
        ),
        running=(running("r1", 700_000),),
    )
    rows = found(mixed)
    assert [row.kind for row in rows] == ["broken", "broken", "held", "capped", "person"]
    assert [row.subject for row in rows[:2]] == ["endpoint:x", "endpoint:y"]
    assert attention(rows, 2) == (rows[:2], 3)


def test_history_facts_say_what_is_usual_and_what_is_missing() -> None:
    runs = view(running=(running("r1", 7_000),))
    facts = HistoryFacts(run_p95_ms={"vision": 2_000.0})
    assert the_one(runs, history=facts).rule == "running_long"
    assert found(runs, history=HistoryFacts(run_p95_ms={"vision": 3_000.0})) == []
    assert the_one(view(), history=HistoryFacts(missing=2)).sentence == "2 endings have no row in the history."
    away = the_one(view(), history=HistoryFacts(problem="connection refused"))
    assert away.sentence == "History does not answer: connection refused."


def test_an_audit_that_found_something() -> None:
    assert the_one(view(), differences=2).sentence == "2 counters are not true."
    assert found(view(), differences=0) == []


def test_clocks_are_not_compared_over_a_gateway() -> None:
    assert found(view(read_ms=NOW + 3_200), compare_clocks=False) == []

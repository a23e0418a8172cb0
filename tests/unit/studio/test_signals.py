"""The seed's table: each symptom is tied to the findings that may cause it, and not known is not "no"."""

from __future__ import annotations

from dispatch.fabric.view import FabricView
from dispatch.studio.findings import SIGNALS, Situation
from dispatch.studio.verdict import SignalState, findings, signals
from tests.unit.studio.scenes import NOW, ended, endpoint, pool, running, view


def states(moment: FabricView) -> dict[str, SignalState]:
    situation = Situation(view=moment)
    return {each.signal.slug: each for each in signals(situation, findings(situation))}


def test_the_table_has_the_six_symptoms() -> None:
    assert [each.symptom for each in SIGNALS] == [
        "Pending count grows",
        "In-flight count sticks",
        "Requests disappear without completion",
        "Backend connection errors",
        "Provider fallback did not happen",
        "Completed item missing from history",
    ]


def test_nothing_is_seen_in_a_quiet_group() -> None:
    assert [each.seen for each in states(view()).values()] == [False] * 6


def test_what_was_not_read_is_not_known() -> None:
    blank = FabricView(name="prod", server_ms=NOW, read_ms=NOW)
    assert [each.seen for each in states(blank).values()] == [None] * 6


def test_a_symptom_names_its_likeliest_cause_and_where_to_look() -> None:
    broken = states(view(pools=(pool(pending=3),), endpoints=(endpoint(breaker="open", last_error_type="x"),)))
    errors = broken["backend-errors"]
    assert errors.seen
    assert errors.causes[0].rule == "breaker_open"
    assert errors.look_first == (
        "last error x; the address http://vllm.prod:8000/v1 and that it listens; the gateway's log has the full error"
    )
    assert broken["pending-grows"].seen
    assert broken["requests-vanish"].seen is False
    assert broken["requests-vanish"].look_first == SIGNALS[2].look_first


def test_each_symptom_of_requests() -> None:
    assert states(view(running=(running("r", 700_000),)))["in-flight-sticks"].seen
    assert states(view(endings=(ended(1, "lost"),)))["requests-vanish"].seen
    assert states(view(endings=(ended(1, "failed", status=429),)))["fallback-missing"].seen

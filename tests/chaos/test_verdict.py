"""The checks of the chaos harness can fail: each field reports the fault it is for, and nothing else does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from tests.chaos import findings
from tests.chaos.evidence import Call, Ended, Evidence, Execution, Order, Record, Stalled, Trouble
from tests.chaos.verdict import Verdict, judge
from tests.chaos.world import GROUP
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document
from tests.support.valkey import ValkeyProcess

SEVEN = (
    "ended_twice", "never_ended", "leaked_slots", "audit_differences", "late_callers", "lost_at_least_once",
    "missing_records",
)  # fmt: skip


def evidence() -> Evidence:
    """Three calls to which nothing was done: at most once, at least once, and one that was retried."""
    found = Evidence(delivery={"once": "at_most_once", "again": "at_least_once"}, default_timeout_s=10.0)
    for number, (pool, ending, attempts) in enumerate(
        (("once", "succeeded", 1), ("again", "succeeded", 1), ("once", "failed", 2))
    ):
        tag, began = f"c{number}", 1000.0 + number
        ended = Ended(call=tag, at=began + 1.1, how="reply", ending=ending, request_id=f"r{number}", attempt=attempts)
        found.calls.append(Call(Order(tag=tag, at_s=float(number), pool=pool, timeout_ms=3000), "p0", began, ended))
        found.records.append(
            Record(
                request_id=f"r{number}", tag=tag, ending=ending, outcome=ending, pool=pool, attempt=attempts,
                submitted=began + 0.1, ended=began + 1.0, tries=attempts - 1,
            )
        )  # fmt: skip
        found.states[f"r{number}"] = ("ended", ending)
        found.executions += [Execution(tag=tag, at=began + 0.5, backend="b0", how="ok")] * attempts
        found.counted[ending] += 1
    found.submitted = 3
    return found


def change_record(found: Evidence, number: int, **changes: object) -> None:
    """Change a record, and what the caller and the pool's counters say along with it."""
    record = found.records[number]
    found.records[number] = msgspec.structs.replace(record, **changes)
    ending = found.records[number].ending
    found.counted = Counter(one.ending for one in found.records)
    found.states[record.request_id] = ("ended", ending)
    ended = found.calls[number].ended
    assert ended is not None
    found.calls[number].ended = msgspec.structs.replace(ended, ending=ending)


def outcome(found: Evidence, number: int, **changes: object) -> None:
    """Change what a caller was told."""
    ended = found.calls[number].ended
    assert ended is not None
    found.calls[number].ended = msgspec.structs.replace(ended, **changes)


def a_second_record(found: Evidence) -> None:
    found.records.append(found.records[0])
    found.counted["succeeded"] += 1


def a_second_request(found: Evidence) -> None:
    found.records.append(msgspec.structs.replace(found.records[0], request_id="other"))
    found.states["other"] = ("ended", "succeeded")
    found.counted["succeeded"] += 1
    found.submitted += 1


def told_otherwise(found: Evidence) -> None:
    outcome(found, 0, ending="lost")


def refused_and_queued(found: Evidence) -> None:
    outcome(found, 0, how="refused", ending="")


def a_request_that_runs_still(found: Evidence) -> None:
    found.states["r9"] = ("leased", "")
    found.submitted += 1


def a_request_that_vanished(found: Evidence) -> None:
    found.submitted += 1


def a_caller_without_an_outcome(found: Evidence) -> None:
    found.calls[0].ended = None


def a_slot_that_is_taken(found: Evidence) -> None:
    found.leftovers["in_flight"] = 1


def a_counter_that_is_wrong(found: Evidence) -> None:
    found.audit.append("pool once: in_flight is stored as 1, counted 0")


def a_caller_that_waited_too_long(found: Evidence) -> None:
    outcome(found, 0, at=1000.0 + 0.1 + 3.0 + 2.0 + 0.4)


def a_caller_that_was_told_too_late_where_nothing_was_queued(found: Evidence) -> None:
    """The deadline is the caller's own then."""
    order = Order(tag="c9", at_s=0.0, pool="once")
    found.calls.append(Call(order, "p1", 1000.0, Ended(call="c9", at=1012.4, how="gave_up")))


def a_lost_request_of_an_at_least_once_pool(found: Evidence) -> None:
    change_record(found, 1, ending="lost")


def a_dropped_reply_of_a_living_producer(found: Evidence) -> None:
    change_record(found, 1, ending="reply_dropped")


def a_reply_without_a_record(found: Evidence) -> None:
    del found.records[0], found.states["r0"]
    found.submitted -= 1
    found.executions = found.executions[1:]
    found.counted["succeeded"] -= 1


def an_ended_request_without_a_record(found: Evidence) -> None:
    found.states["r9"] = ("ended", "expired")


def an_ending_that_was_counted_and_not_recorded(found: Evidence) -> None:
    found.counted["expired"] += 1


def a_record_without_an_envelope(found: Evidence) -> None:
    found.records[0] = msgspec.structs.replace(found.records[0], tag="")
    found.executions = found.executions[1:]


def an_execution_too_many(found: Evidence) -> None:
    found.executions.append(found.executions[-1])


def an_execution_of_what_was_never_queued(found: Evidence) -> None:
    found.executions.append(Execution(tag="c9", at=1.0, backend="b0", how="ok"))


def an_attempt_that_is_not_told(found: Evidence) -> None:
    found.records[2] = msgspec.structs.replace(found.records[2], tries=0)


def an_attempt_that_never_was(found: Evidence) -> None:
    found.records[0] = msgspec.structs.replace(found.records[0], tries=2)


def two_attempts_in_calm(found: Evidence) -> None:
    found.records[0] = msgspec.structs.replace(found.records[0], attempt=2, tries=1)
    found.executions.append(found.executions[0])


def success_without_an_execution(found: Evidence) -> None:
    found.executions = found.executions[1:]


def a_caller_that_was_never_told(found: Evidence) -> None:
    found.records[0] = msgspec.structs.replace(found.records[0], submitted=1000.1, ended=1000.2)
    outcome(found, 0, how="gave_up", ending="", at=1004.0)


def somebody_elses_answer(found: Evidence) -> None:
    outcome(found, 0, right=False)


def an_error_no_caller_should_see(found: Evidence) -> None:
    outcome(found, 0, how="fault", ending="", detail="KeyError: 'x'")


def a_process_that_crashed(found: Evidence) -> None:
    found.crashes.append("g0 ended by itself")


DOCTORED: list[tuple[str, Callable[[Evidence], None]]] = [
    ("ended_twice", a_second_record),
    ("ended_twice", a_second_request),
    ("ended_twice", told_otherwise),
    ("ended_twice", refused_and_queued),
    ("never_ended", a_request_that_runs_still),
    ("never_ended", a_request_that_vanished),
    ("never_ended", a_caller_without_an_outcome),
    ("leaked_slots", a_slot_that_is_taken),
    ("audit_differences", a_counter_that_is_wrong),
    ("late_callers", a_caller_that_waited_too_long),
    ("late_callers", a_caller_that_was_told_too_late_where_nothing_was_queued),
    ("lost_at_least_once", a_lost_request_of_an_at_least_once_pool),
    ("lost_at_least_once", a_dropped_reply_of_a_living_producer),
    ("missing_records", a_reply_without_a_record),
    ("missing_records", an_ended_request_without_a_record),
    ("missing_records", an_ending_that_was_counted_and_not_recorded),
    ("missing_records", a_record_without_an_envelope),
    ("excess_executions", an_execution_too_many),
    ("excess_executions", an_execution_of_what_was_never_queued),
    ("untold_attempts", an_attempt_that_is_not_told),
    ("untold_attempts", an_attempt_that_never_was),
    ("not_once_in_calm", two_attempts_in_calm),
    ("not_once_in_calm", success_without_an_execution),
    ("untold_callers", a_caller_that_was_never_told),
    ("wrong_replies", somebody_elses_answer),
    ("crashes", an_error_no_caller_should_see),
    ("crashes", a_process_that_crashed),
]


def broken(verdict: Verdict) -> set[str]:
    return {name for name, count in verdict.counts().items() if count}


def test_a_run_without_faults_is_clean() -> None:
    verdict = judge(evidence())
    assert broken(verdict) == set()
    assert verdict.clean
    assert verdict.calm == 3


@pytest.mark.parametrize(("field", "doctor"), DOCTORED, ids=lambda value: getattr(value, "__name__", None))
def test_a_doctored_run_is_reported_by_the_field_for_it(field: str, doctor: Callable[[Evidence], None]) -> None:
    found = evidence()
    doctor(found)
    verdict = judge(found)
    assert broken(verdict) == {field}
    assert not verdict.clean


def test_every_field_can_fail() -> None:
    assert {field for field, _ in DOCTORED} == set(Verdict().counts())
    assert set(SEVEN) <= set(Verdict().counts())


# ---- what is excused, and how far


@pytest.mark.parametrize("kind", ["stop", "cut", "freeze", "refuse"])
def test_a_caller_that_was_stopped_or_cut_off_meanwhile_may_be_late(kind: str) -> None:
    found = evidence()
    a_caller_that_waited_too_long(found)
    found.troubles.append(Trouble(kind=kind, target="p0", since=1001.0, until=1002.0))
    assert broken(judge(found)) == set()
    found.troubles = [Trouble(kind=kind, target="p1", since=1001.0, until=1002.0)]
    assert broken(judge(found)) == {"late_callers"}


def test_what_is_done_to_the_server_makes_no_caller_late() -> None:
    found = evidence()
    a_caller_that_waited_too_long(found)
    found.troubles.append(Trouble(kind="stop", target="valkey", since=1000.0, until=1004.0))
    assert broken(judge(found)) == {"late_callers"}


def test_a_stall_of_the_callers_process_counts_for_as_long_as_it_lasted_and_one_last_look() -> None:
    found = evidence()
    a_caller_that_waited_too_long(found)
    outcome(found, 0, at=1000.1 + 3.0 + 2.0 + 0.3 + 1.2)
    found.stalls["p0"] = [Stalled(1001.0, 1001.15)]
    assert broken(judge(found)) == {"late_callers"}
    found.stalls["p0"] = [Stalled(1001.0, 1001.25)]
    assert broken(judge(found)) == set()
    found.stalls["p0"] = [Stalled(999.0, 999.9)]  # before the call
    assert broken(judge(found)) == {"late_callers"}


def test_the_reply_of_a_producer_that_was_cut_off_may_be_dropped_but_its_request_not_lost() -> None:
    found = evidence()
    found.troubles.append(Trouble(kind="freeze", target="p0", since=1001.0, until=1004.0))
    a_dropped_reply_of_a_living_producer(found)
    assert broken(judge(found)) == set()
    a_lost_request_of_an_at_least_once_pool(found)
    assert broken(judge(found)) == {"lost_at_least_once"}


def test_a_stream_of_which_a_part_was_seen_may_be_lost() -> None:
    found = evidence()
    change_record(found, 1, ending="lost", chunks=2)
    assert broken(judge(found)) == set()
    change_record(found, 1, ending="lost", chunks=0)
    assert broken(judge(found)) == {"lost_at_least_once"}


def test_a_repeated_call_may_be_a_new_request_only_if_the_first_one_was_never_run() -> None:
    found = evidence()
    a_second_request(found)
    found.calls[0].order = msgspec.structs.replace(found.calls[0].order, repeat=True)
    assert broken(judge(found)) == {"ended_twice"}
    found.records[-1] = msgspec.structs.replace(found.records[-1], attempt=0)
    assert broken(judge(found)) == set()


def test_a_drain_may_give_an_at_least_once_request_back_without_counting_an_attempt() -> None:
    found = evidence()
    found.executions += [found.executions[0], found.executions[1]]
    assert len(judge(found).excess_executions) == 2
    found.troubles.append(Trouble(kind="drain", target="g0", since=1001.5, until=1002.0))
    [sentence] = judge(found).excess_executions
    assert sentence.startswith("call c0 ")
    found.executions.append(found.executions[1])
    assert len(judge(found).excess_executions) == 2


def test_nothing_is_calm_shortly_after_a_fault() -> None:
    found = evidence()
    two_attempts_in_calm(found)
    found.troubles.append(Trouble(kind="kill", target="g0", since=990.0, until=996.5))
    verdict = judge(found)
    assert verdict.clean
    assert verdict.calm == 1


def test_a_call_that_died_with_its_process_needs_no_outcome() -> None:
    found = evidence()
    a_caller_without_an_outcome(found)
    found.calls[0].died_at = 1000.5
    assert judge(found).clean
    found.calls[0] = replace(found.calls[0], died_at=1009.0)
    assert broken(judge(found)) == {"late_callers"}


# ---- the same from a real server


def test_a_request_that_was_left_and_a_counter_that_was_changed_are_found_on_the_server(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    url = start_valkey().url
    configure(url, GROUP, default_document() | {"lease_ms": 60_000})
    hand = ByHand(url, GROUP)
    hand.submit(count=2, liveness_ms=60_000)
    [lease] = hand.claim(1)
    found = Evidence(delivery={"default": "at_most_once"}, default_timeout_s=10.0)
    findings.read_group(url, found)
    assert broken(judge(found)) == {"never_ended", "leaked_slots"}
    assert sorted(state for state, _ in found.states.values()) == ["leased", "queued"]
    assert f"{{{GROUP}}}:set:llm:gateway:g:leases" in found.leftovers

    hand.settle([lease])
    hand.settle(hand.claim(1))
    found = Evidence(delivery={"default": "at_most_once"}, default_timeout_s=10.0)
    findings.read_group(url, found)
    found.records = [
        msgspec.structs.replace(record, tag=record.request_id) for record in found.records
    ]  # by hand: none
    assert judge(found).clean
    assert found.counted == {"succeeded": 2}

    hand.change_record("pool", {"in_flight": 3}, pool="default")
    found = Evidence(delivery={"default": "at_most_once"}, default_timeout_s=10.0, records=found.records)
    findings.read_group(url, found)
    assert broken(judge(found)) >= {"leaked_slots", "audit_differences"}
    hand.close()

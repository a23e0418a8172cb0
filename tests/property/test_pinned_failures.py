"""Histories of the failure model that once told server and twin apart, and those too rare to leave to chance."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dispatch.fabric import records as r
from tests.model.bench import document, submission
from tests.property.accidents import LONG_MS
from tests.property.history import History
from tests.property.steps import launched, settle, submit, with_pool

ILL: dict[str, Any] = {"breaker_failures": 1, "open_ms": LONG_MS, "close_after": 1, "probe_timeout_ms": LONG_MS}
UNREACHABLE: dict[str, Any] = {"error_type": "endpoint_unreachable", "retryable": True, "verdict": r.Verdict.FAILURE}
RETRIED: dict[str, Any] = {"max_attempts": 3, "retry_base_ms": LONG_MS // 4, "retry_cap_ms": LONG_MS // 4}


def fail(history: History, **said: Any) -> None:
    """Let everything g0 holds fail."""
    items = [
        r.Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=r.Outcome.FAILED, **UNREACHABLE | said
        )
        for lease in history.known["g0"].values()
    ]  # fmt: skip
    history.settle("g0", items, 0)


def endpoint(history: History, name: str = "e") -> Any:
    return history.twin.group.endpoint(name)


def report(history: History, chore: r.Chore, **said: Any) -> r.Chore:
    return history.report(
        "g0", r.ChoreReport(kind=chore.kind.lower(), endpoint_id=chore.endpoint_id, token=chore.token, **said)
    )  # fmt: skip


def test_sample_taken_before_a_gate_was_removed_changes_nothing(history: History) -> None:
    history.configure(document({"a": {"endpoint": "e"}}, endpoints={"e": {"gate": "vllm"}}))
    chore = history.report("g0")
    assert chore.kind == "SAMPLE"
    history.configure(document({"a": {"endpoint": "e"}}, endpoints={"e": {}}))
    report(history, chore, waiting=9.0)
    history.agree()
    history.audit()


def test_open_endpoint_brings_its_pools_back_by_time_one_as_the_probe(history: History) -> None:
    history.configure(document({"a": {"endpoint": "e"}, "b": {"endpoint": "e"}}, endpoints={"e": ILL}))
    submit(history, "a", 1, 1)
    submit(history, "b", 1, 1)
    history.claim("g0", 1)
    fail(history, retryable=False)
    history.claim("g0", 9)
    history.agree()
    assert launched(history) == []
    history.endpoint_time_passes(endpoint(history), "open")
    history.claim("g0", 9)
    history.agree()
    assert len(launched(history)) == 1
    settle(history, want=9)
    history.agree()


@pytest.mark.parametrize("ended_by", ["cancelled", "released", "lost", "reaped", "deadline", "its time"])
def test_probe_that_ends_without_a_verdict_makes_way_for_the_next(history: History, ended_by: str) -> None:
    history.configure(document({"a": {"endpoint": "e"}}, endpoints={"e": ILL}))
    submit(history, "a", 1, 1, 1)
    history.claim("g0", 1)
    fail(history, retryable=False)
    history.endpoint_time_passes(endpoint(history), "open")
    history.claim("g0", 9)
    (probe,) = history.known["g0"]
    if ended_by == "reaped":
        history.lease_runs_out(probe)
        history.reap(9)
    elif ended_by == "deadline":
        history.deadline_passes(history.twin.group.requests[probe], long_ago=True)
        history.reap(9)
    elif ended_by == "its time":
        history.endpoint_time_passes(endpoint(history), "probe")
    else:
        outcomes = {"cancelled": r.Outcome.CANCELLED, "released": r.Outcome.RELEASE, "lost": r.Outcome.LOST}
        settle(history, outcomes[ended_by])
    history.agree()
    history.claim("g1", 9)
    history.agree()
    assert endpoint(history).probe.gateway == "g1"


def test_retry_comes_back_to_its_place_and_before_the_holder_of_a_younger_one_under_fifo(history: History) -> None:
    pools = {"a": RETRIED | {"endpoint": "e"}, "b": {"endpoint": "e"}}
    history.configure(document(pools, policy="fifo", endpoints={"default": {}, "e": {"max_concurrent": 1}}))
    (first,) = submit(history, "a", 1)
    submit(history, "b", 1, 1)
    history.claim("g0", 1)
    fail(history, verdict=r.Verdict.NEUTRAL)
    history.claim("g0", 1)
    assert launched(history) == ["b"]
    history.retry_comes_due(history.twin.group.requests[first])
    history.claim("g0", 1)
    settle(history, want=1)
    history.agree()
    assert launched(history) == ["a"]


def test_delayed_request_that_is_cancelled_or_expires_leaves_nothing(history: History) -> None:
    history.configure(document({"a": RETRIED}))
    cancelled, expired = submit(history, "a", 1, 1)
    history.claim("g0", 2)
    fail(history)
    assert len(history.twin.group.delayed()) == 2
    history.cancel(cancelled)
    history.agree()
    history.deadline_passes(history.twin.group.requests[expired], long_ago=False)
    history.reap(9)
    history.agree()
    history.audit()
    assert history.eye.timers == {}


def test_pool_with_delayed_requests_is_placed_anew_and_not_removed(history: History) -> None:
    history.configure(document({"a": RETRIED, "b": {}}))
    (first,) = submit(history, "a", 1)
    history.claim("g0", 1)
    fail(history)
    history.configure({**history.document, "pools": [p for p in history.document["pools"] if p["pool_id"] != "a"]})
    history.configure(with_pool(history.document, "a", quantum=7))
    history.retry_comes_due(history.twin.group.requests[first])
    history.claim("g0", 1)
    history.agree()
    assert launched(history) == ["a"]


def test_failure_of_the_last_probe_of_an_endpoint_that_was_left_out_changes_nothing(history: History) -> None:
    both = {"e": ILL, "f": {}}
    history.configure(document({"a": {"endpoint": "e"}}, endpoints=both))
    submit(history, "a", 1, 1)
    history.claim("g0", 1)
    fail(history, retryable=False)
    history.endpoint_time_passes(endpoint(history), "open")
    history.claim("g0", 1)
    history.configure(document({"a": {"endpoint": "f"}}, endpoints={"f": {}}))
    fail(history, retryable=False)
    history.agree()
    history.configure(document({"a": {"endpoint": "e"}}, endpoints=both))
    history.agree()
    history.audit()


def test_gate_that_never_had_a_sample_lets_one_trial_through_at_a_time(history: History) -> None:
    gate = {"gate": "vllm", "gate_fail": "closed", "gate_poll_ms": LONG_MS, "gate_stale_ms": LONG_MS}
    history.configure(document({"a": {"endpoint": "e"}}, endpoints={"e": gate}))
    submit(history, "a", 1, 1, 1, 1)
    history.claim("g0", 9)
    assert len(launched(history)) == 1
    settle(history, want=9)
    history.agree()
    assert len(launched(history)) == 1
    report(history, history.report("g0"), waiting=1.0, token_ms=20.0)
    history.claim("g0", 9)
    history.agree()
    assert len(launched(history)) == 3


def test_hold_is_over_by_time_for_all_who_wait(history: History) -> None:
    pools = {"a": {"endpoint": "e"}, "b": {"endpoint": "e", "min_concurrent": 1}, "c": {"endpoint": "e"}}
    history.configure(document(pools, total=5, hold_max_ms=LONG_MS, endpoints={"default": {}, "e": {}}))
    for pool in pools:
        submit(history, pool, 1, 1)
    history.claim("g0", 1)
    fail(history, verdict=r.Verdict.BACKPRESSURE, hold_ms=LONG_MS)
    history.claim("g0", 9)
    history.agree()
    assert launched(history) == []
    history.endpoint_time_passes(endpoint(history), "hold")
    history.claim("g0", 9)
    history.agree()
    assert len(launched(history)) == 5


def test_watcher_asks_an_endpoint_nobody_waits_for(history: History) -> None:
    history.configure(document({"a": {"endpoint": "e"}}, endpoints={"e": ILL}))
    submit(history, "a", 1)
    history.claim("g0", 1)
    fail(history, retryable=False)
    history.endpoint_time_passes(endpoint(history), "open")
    history.chores_come_due()
    chore = history.report("g0")
    assert chore.kind == "PROBE"
    submit(history, "a", 1)
    history.claim("g0", 1)
    history.agree()
    assert launched(history) == []
    report(history, chore, verdict=r.Verdict.GOOD)
    history.agree()
    history.claim("g0", 1)
    assert launched(history) == ["a"]


def test_keyed_request_that_was_retried_and_dropped_keeps_its_reply(history: History) -> None:
    history.configure(document({"a": RETRIED}))
    keyed = replace(submission("k", "a", 1, "u"), idempotency="h", fingerprint="f")
    history.submit(keyed)
    history.claim("g0", 1)
    fail(history)
    history.producer_dies("u")
    history.retry_comes_due(history.twin.group.requests["k"])
    history.claim("g0", 1)
    history.agree()
    assert history.twin.group.requests["k"].ending == "producer_gone"
    history.producer_lives("u")
    history.submit(replace(keyed, request_id="again", nonce="again"))
    history.agree()


def test_retry_that_comes_due_before_any_sleeper_looks_wakes_one(history: History) -> None:
    history.configure(document({"a": RETRIED | {"retry_base_ms": 1, "retry_cap_ms": 1}}))
    submit(history, "a", 1)
    history.claim("g0", 1)
    history.claim("g1", 1)  # finds nothing and sleeps
    history.agree()
    fail(history, verdict=r.Verdict.NEUTRAL, hold_ms=3_000)
    history.agree()
    assert history.eye.tokens == 1


def test_endpoint_that_comes_back_before_any_sleeper_looks_wakes_one(history: History) -> None:
    history.configure(
        document({"a": {"endpoint": "e"}}, endpoints={"e": ILL | {"open_ms": 3_000, "max_concurrent": 1}})
    )
    submit(history, "a", 1, 1)
    history.claim("g0", 1)
    history.claim("g1", 1)
    fail(history, retryable=False)
    history.agree()
    assert history.eye.tokens == 1


def test_retries_of_the_last_window_count_in_the_next_as_far_as_it_reaches_back(history: History) -> None:
    history.configure(document({"a": RETRIED}, retry_budget_percent=0, retry_budget_min_per_s=1))
    for windows in (0, 1, 1, 2):
        history.budget_window_passes(windows)
        submit(history, "a", *[1] * 12)
        history.claim("g0", 12)
        fail(history, verdict=r.Verdict.NEUTRAL)
        history.agree()


def test_stream_that_began_is_neither_retried_nor_run_again(history: History) -> None:
    history.configure(document({"a": RETRIED | {"delivery": "at_least_once"}}))
    failed, lost, released = submit(history, "a", 1, 1, 1)
    history.claim("g0", 3)
    for lease in list(history.known["g0"].values()):
        history.append("g0", lease, 0, 2)
        history.append("g0", lease, 1, 2)
        history.append("g1", lease, 2, 1)
    history.lease_runs_out(lost)
    history.reap(9)
    given_back = history.known["g0"][released]
    history.settle(
        "g0", [r.Settlement(request_id=released, fence=given_back.fence, outcome=r.Outcome.RELEASE)], 0
    )  # fmt: skip
    fail(history)
    history.agree()
    endings = {request.id: request.ending for request in history.twin.group.requests.values()}
    assert endings == {failed: "failed", lost: "lost", released: "lost"}


def test_endpoint_that_is_free_again_has_the_pool_that_it_held_up_asked(history: History) -> None:
    dear = {f"x{at}": {} for at in range(10)}
    history.configure(document({"a": {"endpoint": "e", "quantum": 8}, **dear}, endpoints={"default": {}, "e": {}}))
    _, second, _ = submit(history, "a", 1, 1, 9)
    history.claim("g0", 1)
    history.cancel(second)  # the visit is open, with a head that it cannot pay
    fail(history, verdict=r.Verdict.BACKPRESSURE, hold_ms=LONG_MS)
    for pool in dear:
        submit(history, pool, 16)
    history.claim("g0", 1)
    history.agree()
    assert history.twin.group.pass_held == {"e"}
    history.endpoint_time_passes(endpoint(history), "hold")
    history.claim("g0", 1)
    history.agree()
    assert launched(history) == ["a"]
    assert history.twin.group.round == 0, "rounds that the others needed before a, which could launch, was asked"

"""Why each rule of the failure model is as it is: what holds with the rule does not hold with the obvious variant.

Each case runs on the twin as it is, and on one that has the variant instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from dispatch.fabric import records as r
from dispatch.fabric.records import Verdict
from tests.model import breaker, flows, line, retries, timers
from tests.model.records import Endpoint, Group, Pool, Request
from tests.model.reference import Reference
from tests.model.steps import NOW, SECOND, claim, configured, fail, ids, settle, submit

M = 16
OPEN_MS, PROBE_MS = 30 * SECOND, 60 * SECOND
LATER = NOW + OPEN_MS
BREAKER = {"breaker_failures": 3, "open_ms": OPEN_MS, "close_after": 1, "probe_timeout_ms": PROBE_MS}


class Reason(NamedTuple):
    """What a rule achieves, and by what the variant replaces it: module, name, function."""

    holds: Callable[[], bool]
    variant: tuple[Any, str, Callable[..., Any]]


def opened(waiting: int = 9, **endpoint: Any) -> Reference:
    """Return a group whose endpoint has just opened; so many requests wait."""
    twin = configured(endpoints={"default": BREAKER | {"breaker_failures": 1} | endpoint})
    submit(twin, "first")
    fail(twin, *claim(twin).leases, retryable=False)
    for number in range(waiting):
        submit(twin, f"r{number}")
    assert claim(twin, 9).leases == ()
    return twin


# -- a hold is no failure ---------------------------------------------------------------------------------------------


def overloaded_endpoint_is_used_again_when_it_said() -> bool:
    twin = configured(endpoints={"default": BREAKER})
    for number in range(9):
        submit(twin, f"r{number}")
    for lease in claim(twin, 5).leases:
        settle(twin, lease, outcome=r.Outcome.FAILED, verdict=Verdict.BACKPRESSURE, hold_ms=SECOND)
    return len(claim(twin, 9, now=NOW + SECOND).leases) == 4


_judge = breaker._judge


def hold_counts_as_failure(group: Group, endpoint: Endpoint, verdict: Verdict) -> None:
    _judge(group, endpoint, Verdict.FAILURE if verdict == Verdict.BACKPRESSURE else verdict)


# -- a probe has its own time -----------------------------------------------------------------------------------------


def probe_that_never_reports_is_followed_by_another() -> bool:
    twin = opened()
    (probe,) = claim(twin, 9, now=LATER).leases
    late = LATER + PROBE_MS
    twin.group.leases[probe.request_id] = late + SECOND  # its gateway lives and renews
    return len(claim(twin, 9, now=late, nonce="again").leases) == 1


def probe_lasts_until_it_reports(endpoint: Endpoint, _now: int) -> bool:
    return endpoint.probe is not None


# -- one probe at a time ----------------------------------------------------------------------------------------------


def endpoint_that_may_be_ill_gets_one_request_at_a_time() -> bool:
    return len(claim(opened(), 9, now=LATER).leases) == 1


def half_open_lets_all_through(_endpoint: Endpoint, _now: int) -> bool:
    return False


# -- while it is not closed only the probe is judged ------------------------------------------------------------------


def request_that_ran_before_does_not_close_what_is_broken() -> bool:
    twin = configured(endpoints={"default": BREAKER | {"breaker_failures": 1}})
    for number in range(4):
        submit(twin, f"r{number}")
    slow, ill = claim(twin, 2).leases
    fail(twin, ill, retryable=False)
    claim(twin, 1, now=LATER)
    twin.group.leases[slow.request_id] = LATER + SECOND
    settle(twin, slow, now=LATER, verdict=Verdict.GOOD)  # it had its answer before all that
    return twin.group.endpoints["default"].breaker != "closed"


_note = breaker.note


def everybody_is_judged(group: Group, endpoint: Endpoint, by: tuple[str, int], said: breaker.Said) -> None:
    was_judged = endpoint.breaker == "closed" or (
        endpoint.probe is not None and (endpoint.probe.request_id, endpoint.probe.token) == by
    )
    _note(group, endpoint, by, said)
    if not was_judged:
        _judge(group, endpoint, said.verdict)


# -- a gate lets one trial through ------------------------------------------------------------------------------------


def gate_without_samples_does_not_stop_everything() -> bool:
    twin = configured(endpoints={"default": {"gate": "vllm", "gate_fail": "closed"}})
    submit(twin, "r")
    return ids(claim(twin)) == ["r"]


_gated = breaker.gated


def gate_knows_no_trial(endpoint: Endpoint, in_flight: int, now: int) -> bool:
    return _gated(endpoint, max(1, in_flight), now)


# -- a retry goes back to its place -----------------------------------------------------------------------------------


def retried_request_is_launched_before_those_that_came_later() -> bool:
    pool = {"max_attempts": 2, "retry_base_ms": 1, "retry_cap_ms": 1}
    twin = configured({"a": pool}, endpoints={"default": {"max_concurrent": 1}})
    for number in range(5):
        submit(twin, f"r{number}")
    fail(twin, *claim(twin).leases, verdict=Verdict.NEUTRAL)
    return ids(claim(twin, 1, now=NOW + 1)) == ["r0"]


def retry_goes_to_the_tail(group: Group, request: Request) -> None:
    pool = group.pools[request.pool_id]
    request.state, request.retry_ms = "queued", 0
    group.seq += 1
    request.seq = group.seq
    flows.append(pool, request)
    line.gained_work(group, pool)


# -- retries have a budget --------------------------------------------------------------------------------------------


def load_on_a_failing_endpoint_grows_by_a_share_only() -> bool:
    """Let 20 requests a second come for a minute, while every attempt fails."""
    pool = {"max_attempts": 5, "retry_base_ms": SECOND, "retry_cap_ms": SECOND}
    endpoints = {"default": {"breaker_failures": 99_999}}
    twin = configured({"a": pool}, endpoints=endpoints, retry_budget_percent=20, retry_budget_min_per_s=1)
    attempts = 0
    for second in range(60):
        now = NOW + second * SECOND
        for number in range(20):
            submit(twin, f"r{second}-{number}", now=now)
        while made := claim(twin, 64, now=now, nonce=f"{now}-{attempts}").leases:
            attempts += len(made)
            fail(twin, *made, now=now)
    return attempts <= 1.25 * 60 * 20


def budget_is_endless(_group: Group) -> bool:
    return True


# -- what waits on an open endpoint is credited nothing ---------------------------------------------------------------


def launch_in_turn(twin: Reference, count: int, now: int) -> list[str]:
    """Launch and end so many requests, one after the other. Returns their pools."""
    order: list[str] = []
    for _ in range(count):
        while not (made := claim(twin, 1, now=now, nonce=f"{now}-{twin.group.turn}-{twin.group.round}")).leases:
            assert made.again
        order += [lease.pool_id for lease in made.leases]
        settle(twin, *made.leases, now=now, verdict=Verdict.GOOD)
    return order


def pool_that_waited_on_an_open_endpoint_makes_no_burst() -> bool:
    """While it waits, rounds go by in which nobody can pay: the heads of the free pools are expensive."""
    pools: dict[str, dict[str, Any]] = {"ill": {"endpoint": "e"}, "b": {}, "c": {}}
    twin = configured(pools, endpoints={"default": {}, "e": BREAKER | {"breaker_failures": 1}}, total=1)
    for number in range(200):
        submit(twin, f"i{number}", "ill")
        submit(twin, f"b{number}", "b", estimated_cost_units=M)
        submit(twin, f"c{number}", "c", estimated_cost_units=M)
    fail(twin, *claim(twin).leases, retryable=False)
    assert set(launch_in_turn(twin, 60, NOW)) == {"b", "c"}
    order = launch_in_turn(twin, 150, LATER)
    burst = order[order.index("ill") :]
    return next((at for at, pool in enumerate(burst) if pool != "ill"), len(burst)) <= 2 * M


_come_back = line.come_back


def rounds_are_credited_to_those_who_wait(group: Group, pool: Pool) -> None:
    mark = pool.mark
    _come_back(group, pool)
    pool.mark = mark


REASONS = (
    Reason(overloaded_endpoint_is_used_again_when_it_said, (breaker, "_judge", hold_counts_as_failure)),
    Reason(probe_that_never_reports_is_followed_by_another, (breaker, "probing", probe_lasts_until_it_reports)),
    Reason(endpoint_that_may_be_ill_gets_one_request_at_a_time, (breaker, "probing", half_open_lets_all_through)),
    Reason(request_that_ran_before_does_not_close_what_is_broken, (breaker, "note", everybody_is_judged)),
    Reason(gate_without_samples_does_not_stop_everything, (breaker, "gated", gate_knows_no_trial)),
    Reason(retried_request_is_launched_before_those_that_came_later, (timers, "_wait_again", retry_goes_to_the_tail)),
    Reason(load_on_a_failing_endpoint_grows_by_a_share_only, (retries, "_spend", budget_is_endless)),
    Reason(
        pool_that_waited_on_an_open_endpoint_makes_no_burst,
        (line, "come_back", rounds_are_credited_to_those_who_wait),
    ),
)


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.holds.__name__)
def test_rule_achieves_what_it_is_for(reason: Reason) -> None:
    assert reason.holds()


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.variant[2].__name__)
def test_obvious_variant_does_not(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*reason.variant)
    assert not reason.holds()

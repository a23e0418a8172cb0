"""An endpoint's breaker and hold on the twin: DESIGN sections 6 and 6b.9, one promise a test."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.fabric import records as r
from tests.model.reference import Reference
from tests.model.steps import LEASE_MS, NOW, SECOND, claim, configured, endings, fail, ids, reconfigured, settle, submit

OPEN_MS = 30 * SECOND
PROBE_MS = 60 * SECOND
LATER = NOW + OPEN_MS
"""When an endpoint that opened at first is half open."""
BREAKER = {"breaker_failures": 2, "open_ms": OPEN_MS, "close_after": 2, "probe_timeout_ms": PROBE_MS}


def broken(**settings: Any) -> Reference:
    """Return a group whose endpoint has just opened; eight requests wait for it."""
    twin = configured({"a": {}}, endpoints={"default": BREAKER | settings}, lease_ms=10 * LEASE_MS)
    for number in range(10):
        submit(twin, f"r{number}")
    fail(twin, *claim(twin, 2).leases)
    assert twin.group.endpoints["default"].breaker == "open"
    return twin


def state(twin: Reference) -> str:
    return twin.group.endpoints["default"].breaker


class TestBreaker:
    def test_opens_after_so_many_failures_in_a_row_of_whatever_pool_and_gateway(self) -> None:
        pools: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
        twin = configured(pools, endpoints={"default": {"breaker_failures": 2}})
        submit(twin, "r1", "a")
        submit(twin, "r2", "b")
        first, second = *claim(twin, gateway="g").leases, *claim(twin, gateway="h").leases
        fail(twin, first)
        assert state(twin) == "closed"
        fail(twin, second, gateway="h")
        assert state(twin) == "open"

    def test_good_attempt_ends_the_row_and_others_do_not_touch_it(self) -> None:
        twin = configured(endpoints={"default": {"breaker_failures": 2}})
        for number in range(6):
            submit(twin, f"r{number}")
        leases = claim(twin, 6).leases
        fail(twin, leases[0])
        settle(twin, leases[1], verdict=r.Verdict.GOOD)
        fail(twin, leases[2])
        settle(twin, leases[3], verdict=r.Verdict.NEUTRAL)
        settle(twin, leases[4], outcome=r.Outcome.FAILED, verdict=r.Verdict.BACKPRESSURE)
        assert state(twin) == "closed"
        fail(twin, leases[5])
        assert state(twin) == "open"

    def test_nothing_is_launched_while_it_is_open_and_the_gateway_sleeps_no_longer_than_that(self) -> None:
        twin = broken()
        answer = claim(twin, 9, now=LATER - 700)
        assert (ids(answer), answer.sleep_ms) == ([], 700)
        assert twin.group.pools["a"].reason == "endpoint_open"

    def test_other_endpoints_run_on(self) -> None:
        twin = configured(
            {"a": {}, "b": {"endpoint": "other"}}, endpoints={"default": {"breaker_failures": 1}, "other": {}}
        )
        for number in range(3):
            submit(twin, f"a{number}", "a")
            submit(twin, f"b{number}", "b")
        (first, *_) = claim(twin, 1).leases
        fail(twin, first)
        assert ids(claim(twin, 9)) == ["b0", "b1", "b2"]

    def test_half_open_it_lets_one_probe_at_a_time_through_and_closes_after_so_many_good_ones(self) -> None:
        twin = broken()
        (probe,) = claim(twin, 9, now=LATER).leases
        assert probe.probe_until_ms == LATER + PROBE_MS
        settle(twin, probe, now=LATER + 1, verdict=r.Verdict.GOOD)
        assert state(twin) == "half_open"
        (probe,) = claim(twin, 9, now=LATER + 2).leases
        settle(twin, probe, now=LATER + 3, verdict=r.Verdict.GOOD)
        assert state(twin) == "closed"
        assert [lease.probe_until_ms for lease in claim(twin, 9, now=LATER + 4).leases] == [0] * 6

    def test_failed_probe_opens_it_again(self) -> None:
        twin = broken()
        (probe,) = claim(twin, 9, now=LATER).leases
        fail(twin, probe, now=LATER + 5, retryable=False)
        assert claim(twin, 9, now=LATER + 4 + OPEN_MS).leases == ()
        assert len(claim(twin, 9, now=LATER + 5 + OPEN_MS).leases) == 1

    def test_what_older_attempts_say_meanwhile_is_counted_and_changes_nothing(self) -> None:
        twin = configured({"a": {}}, endpoints={"default": BREAKER}, lease_ms=10 * LEASE_MS)
        for number in range(10):
            submit(twin, f"r{number}")
        leases = claim(twin, 6).leases
        fail(twin, *leases[:2])
        settle(twin, leases[2], verdict=r.Verdict.GOOD)
        (probe,) = claim(twin, 1, now=LATER).leases
        fail(twin, leases[3], now=LATER + 1)
        settle(twin, *leases[4:], now=LATER + 1, verdict=r.Verdict.GOOD)
        endpoint = twin.group.endpoints["default"]
        assert (endpoint.breaker, endpoint.good, endpoint.failures) == ("half_open", 0, 3)
        assert endpoint.probe is not None
        assert endpoint.probe.request_id == probe.request_id

    @pytest.mark.parametrize("ended_by", ["cancel", "release", "gateway's death", "deadline", "its own time"])
    def test_probe_that_ends_without_a_verdict_makes_way_for_the_next(self, ended_by: str) -> None:
        twin = broken()
        (probe,) = claim(twin, 1, now=LATER).leases
        now = LATER + 1
        if ended_by == "cancel":
            settle(twin, probe, outcome=r.Outcome.CANCELLED, now=now)
        elif ended_by == "release":
            settle(twin, probe, outcome=r.Outcome.RELEASE, now=now)
        elif ended_by == "gateway's death":
            twin.group.leases[probe.request_id] = now
            twin.reap(9, now + 1)
        elif ended_by == "deadline":
            twin.group.requests[probe.request_id].deadline_ms = now - 10 * LEASE_MS
            twin.group.requests[probe.request_id].due_ms = now
            twin.reap(9, now + 1)
        else:
            now = LATER + PROBE_MS - 1
        assert state(twin) == "half_open"
        (following,) = claim(twin, 9, now=now + 1, nonce="next").leases
        assert following.probe_until_ms == now + 1 + PROBE_MS

    def test_probe_has_no_longer_than_its_own_deadline(self) -> None:
        twin = configured(endpoints={"default": BREAKER | {"breaker_failures": 1}})
        submit(twin, "broken")
        fail(twin, *claim(twin).leases, retryable=False)
        submit(twin, "short", timeout_ms=OPEN_MS + SECOND)
        (probe,) = claim(twin, now=LATER).leases
        assert probe.probe_until_ms == NOW + OPEN_MS + SECOND

    def test_late_verdict_of_a_probe_counts_until_another_has_begun(self) -> None:
        twin = broken(close_after=1)
        (slow,) = claim(twin, 1, now=LATER).leases
        late = LATER + PROBE_MS
        (second,) = claim(twin, 9, now=late).leases
        settle(twin, slow, now=late + 1, verdict=r.Verdict.GOOD)
        assert state(twin) == "half_open"
        settle(twin, second, now=late + PROBE_MS, verdict=r.Verdict.GOOD)
        assert state(twin) == "closed"

    @pytest.mark.parametrize(("on_open", "refused"), [("reject", True), ("queue", False)])
    def test_pool_may_refuse_while_its_endpoint_is_open(self, on_open: str, *, refused: bool) -> None:
        twin = configured({"a": {"on_open": on_open}}, endpoints={"default": {"breaker_failures": 1}})
        submit(twin, "first")
        fail(twin, *claim(twin).leases)
        answer = submit(twin, "second")
        assert (answer == r.Refused("endpoint_open", 0, 0, None)) is refused
        assert isinstance(submit(twin, "third", now=NOW + OPEN_MS), r.Admitted)  # it may be the probe

    def test_config_change_leaves_the_breaker_alone(self) -> None:
        twin = broken()
        reconfigured(twin, {"a": {}}, endpoints={"default": BREAKER | {"open_ms": 2 * OPEN_MS}})
        assert claim(twin, 9, now=LATER - 1).leases == ()
        assert len(claim(twin, 9, now=LATER).leases) == 1


class TestHold:
    def held(self, hold_ms: int, **group: Any) -> Reference:
        twin = configured(**group)
        for number in range(4):
            submit(twin, f"r{number}")
        settle(twin, *claim(twin).leases, outcome=r.Outcome.FAILED, verdict=r.Verdict.BACKPRESSURE, hold_ms=hold_ms)
        return twin

    def test_nothing_is_launched_until_it_is_over(self) -> None:
        twin = self.held(3 * SECOND)
        answer = claim(twin, 9, now=NOW + SECOND)
        assert (ids(answer), answer.sleep_ms) == ([], 2 * SECOND)
        assert twin.group.pools["a"].reason == "endpoint_gated"
        assert ids(claim(twin, 9, now=NOW + 3 * SECOND)) == ["r1", "r2", "r3"]

    def test_no_hold_is_longer_than_the_group_allows(self) -> None:
        twin = self.held(900 * SECOND, hold_max_ms=5 * SECOND)
        assert len(claim(twin, 9, now=NOW + 5 * SECOND).leases) == 3

    def test_no_hold_shortens_another(self) -> None:
        twin = configured()
        for number in range(4):
            submit(twin, f"r{number}")
        for lease, hold_ms in zip(claim(twin, 3).leases, (2, 9, 4), strict=True):
            settle(
                twin, lease, outcome=r.Outcome.FAILED, verdict=r.Verdict.BACKPRESSURE, hold_ms=hold_ms * SECOND
            )  # fmt: skip
        assert claim(twin, now=NOW + 9 * SECOND - 1).leases == ()
        assert ids(claim(twin, now=NOW + 9 * SECOND)) == ["r3"]

    def test_probe_that_meets_backpressure_is_no_verdict_and_the_next_waits_for_the_hold(self) -> None:
        twin = broken()
        (probe,) = claim(twin, now=LATER).leases
        settle(
            twin, probe, now=LATER, outcome=r.Outcome.FAILED, verdict=r.Verdict.BACKPRESSURE, hold_ms=7 * SECOND
        )  # fmt: skip
        assert state(twin) == "half_open"
        assert claim(twin, 9, now=LATER + 7 * SECOND - 1).leases == ()
        assert len(claim(twin, 9, now=LATER + 7 * SECOND).leases) == 1

    def test_hold_that_is_told_while_the_endpoint_is_open_counts_as_well(self) -> None:
        twin = configured(endpoints={"default": BREAKER | {"breaker_failures": 1}}, lease_ms=10 * LEASE_MS)
        for number in range(4):
            submit(twin, f"r{number}")
        first, second = claim(twin, 2).leases
        fail(twin, first, retryable=False)
        settle(
            twin, second, now=LATER - SECOND, outcome=r.Outcome.FAILED, verdict=r.Verdict.BACKPRESSURE,
            hold_ms=9 * SECOND,
        )  # fmt: skip
        assert claim(twin, 9, now=LATER + 8 * SECOND - 1).leases == ()
        assert len(claim(twin, 9, now=LATER + 8 * SECOND).leases) == 1

    def test_pools_come_back_in_their_turn_when_it_is_over(self) -> None:
        twin = configured({"a": {}, "b": {}}, endpoints={"default": {"max_concurrent": 1}})
        for number in range(3):
            submit(twin, f"a{number}", "a")
            submit(twin, f"b{number}", "b")
        settle(twin, *claim(twin).leases, outcome=r.Outcome.FAILED, verdict=r.Verdict.BACKPRESSURE, hold_ms=SECOND)
        assert claim(twin, 9, now=NOW + 1).leases == ()
        order = []
        for number in range(4):
            made = claim(twin, 9, now=NOW + SECOND + number)
            order += ids(made)
            settle(twin, *made.leases, now=NOW + SECOND + number)
        assert order == ["b0", "a1", "b1", "a2"]


def test_endings_of_requests_do_not_depend_on_what_the_endpoint_learns() -> None:
    twin = configured(endpoints={"default": {"breaker_failures": 1}})
    submit(twin, "r1")
    submit(twin, "r2")
    fail(twin, *claim(twin, 2).leases, retryable=False)
    assert endings(twin) == [("r1", "failed"), ("r2", "failed")]

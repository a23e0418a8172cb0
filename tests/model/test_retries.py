"""Retries, their budget, and dead requests on the twin: DESIGN section 5, one promise a test."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.contract import Attempt
from dispatch.errors import StateConflict
from dispatch.fabric import records as r
from tests.model import retries
from tests.model.reference import Reference
from tests.model.steps import LEASE_MS, NOW, SECOND, claim, configured, endings, fail, ids, reconfigured, settle, submit

RETRIED: dict[str, Any] = {"max_attempts": 3, "retry_base_ms": 8 * SECOND, "retry_cap_ms": 20 * SECOND}


def failing(pool: dict[str, Any] | None = None, **group: Any) -> tuple[Reference, r.Lease]:
    """Return a group in which one request runs for the first time, and its lease."""
    twin = configured({"a": RETRIED | (pool or {})}, endpoints={"default": {"breaker_failures": 99}}, **group)
    submit(twin, "r")
    (lease,) = claim(twin).leases
    return twin, lease


def due_ms(twin: Reference, request_id: str = "r") -> int:
    return twin.group.requests[request_id].retry_ms


class TestRetry:
    def test_failed_request_waits_and_runs_again(self) -> None:
        twin, lease = failing()
        assert fail(twin, lease) == ("RETRY",)
        assert (endings(twin), twin.group.leases, twin.group.queued) == ([], {}, 0)
        assert claim(twin, now=due_ms(twin) - 1).leases == ()
        (again,) = claim(twin, now=due_ms(twin)).leases
        assert (again.request_id, again.attempt) == ("r", 2)

    def test_gateway_sleeps_no_longer_than_until_it_is_due(self) -> None:
        twin, lease = failing()
        fail(twin, lease)
        assert claim(twin, now=due_ms(twin) - 300).sleep_ms == 300

    def test_longest_delay_doubles_up_to_the_cap_and_chance_takes_a_part_of_it(self) -> None:
        twin, lease = failing({"max_attempts": 5})
        longest = []
        for _ in range(4):
            request = twin.group.requests["r"]
            part = retries.fraction(request)
            assert 0 <= part < 1
            now = request.claimed_ms
            fail(twin, lease, now=now)
            longest.append((due_ms(twin) - now) / part)
            (lease,) = claim(twin, now=due_ms(twin)).leases
        assert longest == pytest.approx([8_000, 16_000, 20_000, 20_000], abs=20)

    def test_chance_spreads_what_failed_together(self) -> None:
        twin = configured({"a": RETRIED}, endpoints={"default": {"breaker_failures": 999}}, retry_budget_percent=100)
        for number in range(64):
            submit(twin, f"r{number}")
        leases = claim(twin, 64).leases + claim(twin, 64, nonce="more").leases
        assert set(fail(twin, *leases)) == {"RETRY"}
        quarters = [4 * (due_ms(twin, lease.request_id) - NOW) // (8 * SECOND) for lease in leases]
        assert {quarter: quarters.count(quarter) > len(leases) // 16 for quarter in range(4)} == dict.fromkeys(
            range(4), True
        )

    def test_never_earlier_than_the_endpoint_asked_for_within_the_groups_bound(self) -> None:
        twin, lease = failing(hold_max_ms=15 * SECOND)
        fail(twin, lease, verdict=r.Verdict.NEUTRAL, hold_ms=14 * SECOND)
        assert due_ms(twin) == NOW + 14 * SECOND
        twin, lease = failing(hold_max_ms=15 * SECOND)
        fail(twin, lease, verdict=r.Verdict.NEUTRAL, hold_ms=900 * SECOND)
        assert due_ms(twin) == NOW + 15 * SECOND

    @pytest.mark.parametrize(
        ("said", "retry_on", "word"),
        [
            ({"error_type": "endpoint_unreachable", "retryable": True}, ["unreachable"], "RETRY"),
            ({"error_type": "endpoint_disconnected", "retryable": True}, ["disconnected"], "RETRY"),
            ({"error_type": "endpoint_overloaded", "retryable": True}, ["overloaded"], "RETRY"),
            ({"error_type": "endpoint_overloaded", "retryable": True}, ["unreachable"], "OK"),
            ({"error_type": "endpoint_disconnected", "retryable": False}, ["disconnected"], "OK"),
            ({"error_type": "endpoint_error", "retryable": True}, ["unreachable", "disconnected"], "OK"),
            ({"error_type": "endpoint_error", "retryable": False, "status": 502}, ["502"], "RETRY"),
            ({"error_type": "endpoint_error", "retryable": False, "status": 504}, ["502", "504"], "RETRY"),
            ({"error_type": "endpoint_error", "retryable": False, "status": 504}, ["502"], "OK"),
            ({"error_type": "endpoint_error", "retryable": False, "status": 500}, ["502", "504"], "OK"),
        ],
    )
    def test_pool_says_what_is_retried(self, said: dict[str, Any], retry_on: list[str], word: str) -> None:
        twin, lease = failing({"retry_on": retry_on})
        assert fail(twin, lease, **said) == (word,)

    def test_pools_retry_nothing_unless_they_say_so(self) -> None:
        twin = configured()
        submit(twin, "r")
        assert fail(twin, *claim(twin).leases) == ("OK",)
        assert endings(twin) == [("r", "failed")]

    def test_last_attempt_that_fails_ends_failed(self) -> None:
        twin, lease = failing({"max_attempts": 2})
        fail(twin, lease)
        later = due_ms(twin)
        (lease,) = claim(twin, now=later).leases
        assert fail(twin, lease, now=later) == ("OK",)
        assert endings(twin) == [("r", "failed")]

    def test_request_that_should_stop_or_comes_due_too_late_is_not_retried(self) -> None:
        twin, lease = failing()
        twin.cancel("r", "test", NOW)
        assert fail(twin, lease) == ("OK",)
        twin, lease = failing({"default_timeout_ms": 9 * SECOND})
        assert fail(twin, lease, hold_ms=9 * SECOND) == ("OK",)

    def test_nobody_retries_for_a_producer_that_is_gone_unless_its_reply_is_kept(self) -> None:
        twin, lease = failing()
        twin.group.alive["producer"] = ("session", 0)
        assert fail(twin, lease) == ("PRODUCER_GONE",)
        submit(twin, "kept", detached=True, now=NOW)
        (lease,) = claim(twin).leases
        twin.group.alive["producer"] = ("session", 0)
        assert fail(twin, lease) == ("RETRY",)
        assert ids(claim(twin, now=due_ms(twin, "kept"))) == ["kept"]

    def test_only_failures_are_retried(self) -> None:
        for outcome in (r.Outcome.SUCCEEDED, r.Outcome.CANCELLED, r.Outcome.EXPIRED, r.Outcome.LOST):
            twin, lease = failing()
            assert settle(twin, lease, outcome=outcome, error_type="endpoint_unreachable", retryable=True) == ("OK",)

    def test_earlier_attempts_are_told_with_the_ending(self) -> None:
        twin, lease = failing()
        fail(twin, lease, now=NOW + 5, status=503)
        later = due_ms(twin)
        (lease,) = claim(twin, now=later, gateway="h").leases
        settle(twin, lease, now=later, gateway="h")
        tries = (Attempt(1, NOW, NOW + 5, 503, "endpoint_unreachable", "g", "default"),)
        assert [ended.tries for ended in twin.group.ended] == [tries]
        assert [told.tries for told in twin.group.told["producer"]] == [tries]

    def test_waiting_pool_with_delayed_requests_is_not_removed(self) -> None:
        twin, lease = failing()
        fail(twin, lease)
        document = {"pools": [{"pool_id": "b"}], "endpoints": [{"endpoint_id": "default", "url": "http://x"}]}
        assert twin.configure(document, expected_generation=1, actor="x", nonce="n").status == "INVALID"

    def test_config_of_the_moment_it_failed_counts(self) -> None:
        twin, lease = failing()
        reconfigured(twin, {"a": RETRIED | {"retry_on": []}}, endpoints={"default": {"breaker_failures": 99}})
        assert fail(twin, lease) == ("OK",)


class TestDelayed:
    def delayed(self) -> Reference:
        twin, lease = failing({"default_timeout_ms": 60 * SECOND})
        fail(twin, lease)
        return twin

    def test_cancel_ends_it_at_once_and_leaves_no_entry(self) -> None:
        twin = self.delayed()
        assert twin.cancel("r", "test", NOW) == r.Cancellation("CANCELLED")
        assert endings(twin) == [("r", "cancelled")]
        assert twin.group.pools["a"].entries == []
        assert claim(twin, now=NOW + 30 * SECOND).leases == ()

    def test_deadline_ends_it(self) -> None:
        twin = self.delayed()
        twin.group.requests["r"].deadline_ms = twin.group.requests["r"].due_ms = NOW + 1
        assert twin.reap(9, NOW + 1).expired == 1
        assert endings(twin) == [("r", "expired")]

    def test_counts_neither_against_the_pools_depth_nor_as_running(self) -> None:
        twin = configured({"a": RETRIED | {"max_queue_depth": 1, "max_concurrent": 1}})
        submit(twin, "r")
        fail(twin, *claim(twin).leases)
        assert isinstance(submit(twin, "next"), r.Admitted)
        assert ids(claim(twin)) == ["next"]

    def test_due_retry_of_a_paused_pool_waits_until_it_is_resumed(self) -> None:
        twin = self.delayed()
        twin.pause("a", "pause")
        later = due_ms(twin)
        assert claim(twin, now=later).leases == ()
        assert twin.group.pools["a"].reason == "paused"
        twin.pause("a", "resume")
        assert ids(claim(twin, now=later)) == ["r"]

    @pytest.mark.parametrize("by", ["claim", "settle", "renew", "reap"])
    def test_whatever_call_comes_next_brings_it_back(self, by: str) -> None:
        twin = self.delayed()
        later = due_ms(twin)
        if by == "claim":
            claim(twin, 0, now=later)
        elif by == "settle":
            settle(twin, r.Lease(*[""] * 15), now=later)
        elif by == "renew":
            beat = r.Heartbeat(gateway_id="g", host="h", pid=1, version="1", slots=8, held=())
            twin.renew(beat, later)
        else:
            twin.reap(9, later)
        assert [entry.id for entry in twin.group.pools["a"].live] == ["r"]


class TestBudget:
    def spent(self, twin: Reference, count: int, now: int) -> int:
        """Let so many new requests fail at once; return how many are retried."""
        for _ in range(count):
            submit(twin, f"r{twin.group.seq}", now=now)
        leases: list[r.Lease] = []
        while made := claim(twin, 64, now=now, nonce=f"{now}-{len(leases)}").leases:
            leases += made
        return fail(twin, *leases, now=now).count("RETRY")

    def group(self, **budget: Any) -> Reference:
        return configured({"a": RETRIED | {"retry_base_ms": 20 * SECOND}},
                          endpoints={"default": {"breaker_failures": 9_999}}, **budget)  # fmt: skip

    def test_is_a_share_of_the_first_attempts(self) -> None:
        twin = self.group(retry_budget_percent=20, retry_budget_min_per_s=0)
        assert self.spent(twin, 4, NOW) == 0
        assert self.spent(twin, 96, NOW) == 20

    def test_allows_so_many_a_second_in_any_case(self) -> None:
        twin = self.group(retry_budget_percent=0, retry_budget_min_per_s=2)
        assert self.spent(twin, 50, NOW) == 20

    def test_of_the_last_window_as_much_counts_as_lies_within_ten_seconds(self) -> None:
        twin = self.group(retry_budget_percent=0, retry_budget_min_per_s=1)
        assert self.spent(twin, 50, NOW) == 10
        assert self.spent(twin, 50, NOW + 9_999) == 0
        assert self.spent(twin, 50, NOW + 15 * SECOND) == 5

    def test_window_begins_anew_after_a_silence(self) -> None:
        twin = self.group(retry_budget_percent=0, retry_budget_min_per_s=1)
        assert self.spent(twin, 50, NOW) == 10
        assert self.spent(twin, 50, NOW + 20 * SECOND) == 10

    def test_belongs_to_the_whole_group(self) -> None:
        pool = RETRIED | {"retry_base_ms": 20 * SECOND}
        twin = configured({"a": pool, "b": pool}, retry_budget_percent=0, retry_budget_min_per_s=1)
        words: list[str] = []
        for name in "ab":
            for number in range(8):
                submit(twin, f"{name}{number}", name)
            while made := claim(twin, 8, nonce=f"{name}{len(words)}").leases:
                words += fail(twin, *made, verdict=r.Verdict.NEUTRAL)
        assert words.count("RETRY") == 10

    def test_release_is_no_retry_and_no_second_first_attempt(self) -> None:
        twin = self.group(retry_budget_percent=100, retry_budget_min_per_s=0)
        submit(twin, "r")
        settle(twin, *claim(twin).leases, outcome=r.Outcome.RELEASE)
        assert twin.group.retries == []


class TestDead:
    def died(self, count: int, **group: Any) -> Reference:
        twin = configured({"a": {"delivery": "at_least_once", "max_attempts": 1}}, **group)
        for number in range(count):
            submit(twin, f"r{number}")
            (lease,) = claim(twin, now=NOW + number, nonce=f"n{number}").leases
            twin.group.leases[lease.request_id] = NOW - 1
            twin.reap(9, NOW + number)
        return twin

    def test_attempts_that_came_to_no_end_kill_a_request_and_it_is_kept(self) -> None:
        twin = self.died(1)
        assert endings(twin) == [("r0", "dead")]
        assert twin.group.dead == {"r0": NOW}
        assert submit(twin, "r0", nonce="another", now=NOW + 600 * SECOND) == r.Exists("ended", "r0", ending="dead")

    def test_lost_attempts_before_are_told(self) -> None:
        twin = configured({"a": {"delivery": "at_least_once", "max_attempts": 2}})
        submit(twin, "r")
        for number in range(2):
            claim(twin, now=NOW + number, nonce=f"n{number}")
            twin.group.leases["r"] = NOW - 1
            twin.reap(9, NOW + number)
        assert [[one.error_type for one in ended.tries] for ended in twin.group.ended] == [["lost"]]

    def test_the_latest_are_kept(self) -> None:
        assert list(self.died(5, dead_kept=2).group.dead) == ["r3", "r4"]
        assert self.died(5, dead_kept=0).group.dead == {}

    def test_one_may_be_dropped(self) -> None:
        twin = self.died(1)
        assert twin.change_dead("drop", "r0", "", NOW).status == "DROPPED"
        assert twin.change_dead("drop", "r0", "", NOW).status == "UNKNOWN"
        assert isinstance(submit(twin, "r0", nonce="another"), r.Admitted)

    def test_one_may_be_retried_as_a_new_detached_request(self) -> None:
        twin = self.died(1)
        twin.group.alive["producer"] = ("session", 0)
        with pytest.raises(StateConflict):
            twin.change_dead("retry", "r0", "r0", NOW)
        assert twin.change_dead("retry", "r0", "new", NOW) == r.DeadChange("RETRIED", new_id="new")
        assert twin.group.dead == {}
        (lease,) = claim(twin, nonce="again").leases
        assert (lease.request_id, lease.attempt, lease.deadline_ms) == ("new", 1, NOW + 3_600_000)
        settle(twin, lease)
        assert twin.group.results["new"].ending == "succeeded"

    def test_retry_that_its_pool_refuses_leaves_it_in_the_list(self) -> None:
        twin = self.died(1)
        twin.pause("a", "drain")
        assert twin.change_dead("retry", "r0", "new", NOW) == r.DeadChange("REFUSED", reason="pool_draining")
        assert list(twin.group.dead) == ["r0"]

    def test_run_that_its_gateway_broke_off_follows_the_delivery_mode(self) -> None:
        for delivery, word, ending in (("at_most_once", "OK", [("r", "lost")]), ("at_least_once", "REQUEUED", [])):
            twin = configured({"a": {"delivery": delivery}})
            submit(twin, "r")
            assert settle(twin, *claim(twin).leases, outcome=r.Outcome.LOST) == (word,)
            assert endings(twin) == ending

    def test_retry_and_loss_count_the_same_attempts(self) -> None:
        twin, lease = failing({"delivery": "at_least_once", "max_attempts": 2}, lease_ms=LEASE_MS)
        fail(twin, lease)
        later = due_ms(twin)
        claim(twin, now=later)
        twin.group.leases["r"] = later - 1
        twin.reap(9, later)
        assert endings(twin) == [("r", "dead")]

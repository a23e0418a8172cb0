"""Gates, and what gateways do for endpoints beside their runs, on the twin: DESIGN sections 6 and 6b.9."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.fabric import records as r
from tests.model.reference import Reference
from tests.model.steps import NOW, SECOND, claim, configured, fail, ids, reconfigured, settle, submit

OPEN_MS, PROBE_MS, POLL_MS, STALE_MS = 30 * SECOND, 60 * SECOND, 1 * SECOND, 5 * SECOND
LATER = NOW + OPEN_MS


def reported(twin: Reference, chore: r.Chore, now: int, **said: Any) -> r.Chore:
    """Tell what a chore came to. Returns the next."""
    report = r.ChoreReport(kind=chore.kind.lower(), endpoint_id=chore.endpoint_id, token=chore.token, **said)
    return twin.report("w", report, now)


class TestProbe:
    def opened(self, waiting: int = 0, **settings: Any) -> Reference:
        """Return a group whose endpoint has just opened, and so many requests that wait for it."""
        breaker = {"breaker_failures": 1, "open_ms": OPEN_MS, "probe_timeout_ms": PROBE_MS, "close_after": 1}
        twin = configured(endpoints={"default": breaker | settings})
        submit(twin, "first")
        fail(twin, *claim(twin).leases, retryable=False)
        for number in range(waiting):
            submit(twin, f"r{number}")
        claim(twin, now=NOW + 1, nonce="parks what waits")
        return twin

    def test_endpoint_nobody_waits_for_is_asked_when_its_time_is_over(self) -> None:
        twin = self.opened()
        assert claim(twin, now=NOW).chore_ms == OPEN_MS
        assert twin.report("w", None, LATER - 1).kind == "NONE"
        chore = twin.report("w", None, LATER)
        assert (chore.kind, chore.endpoint_id, chore.until_ms) == ("PROBE", "default", LATER + PROBE_MS)
        reported(twin, chore, LATER + 1, verdict=r.Verdict.GOOD)
        assert twin.group.endpoints["default"].breaker == "closed"
        assert claim(twin, now=LATER + 1).chore_ms is None

    def test_nothing_is_launched_meanwhile_and_no_second_watcher_asks(self) -> None:
        twin = self.opened()
        twin.report("w", None, LATER)
        submit(twin, "r", now=LATER)
        assert claim(twin, now=LATER).leases == ()
        assert twin.report("v", None, LATER + 1).kind == "NONE"

    def test_what_waits_becomes_the_probe_instead(self) -> None:
        twin = self.opened(waiting=2)
        assert twin.report("w", None, LATER).kind == "NONE"
        assert [lease.probe_until_ms for lease in claim(twin, 9, now=LATER).leases] == [LATER + PROBE_MS]

    def test_watcher_that_never_reports_is_followed_by_another(self) -> None:
        twin = self.opened()
        lost = twin.report("w", None, LATER)
        after = LATER + PROBE_MS
        chore = twin.report("v", None, after)
        assert chore.kind == "PROBE"
        reported(twin, lost, after + 1, verdict=r.Verdict.GOOD)  # too late: its token is not current
        assert twin.group.endpoints["default"].breaker == "half_open"

    def test_failure_opens_it_again_and_what_waits_waits_on(self) -> None:
        twin = self.opened()
        chore = twin.report("w", None, LATER)
        submit(twin, "r", now=LATER)
        claim(twin, now=LATER)
        answer = reported(twin, chore, LATER + 5, verdict=r.Verdict.FAILURE, error_type="endpoint_unreachable")
        assert answer.chore_ms == OPEN_MS
        assert claim(twin, now=LATER + 4 + OPEN_MS).leases == ()
        assert ids(claim(twin, now=LATER + 5 + OPEN_MS)) == ["r"]

    def test_good_one_brings_back_what_waited(self) -> None:
        twin = self.opened(close_after=2)
        chore = twin.report("w", None, LATER)
        for number in range(3):
            submit(twin, f"r{number}", now=LATER)
        assert claim(twin, 9, now=LATER).leases == ()
        reported(twin, chore, LATER + 1, verdict=r.Verdict.GOOD)
        assert ids(claim(twin, 9, now=LATER + 1)) == ["r0"]  # the next probe

    def test_one_that_learnt_nothing_is_repeated_a_moment_later_and_a_hold_is_waited_for(self) -> None:
        twin = self.opened()
        chore = twin.report("w", None, LATER)
        assert reported(twin, chore, LATER + 1, verdict=r.Verdict.NEUTRAL).chore_ms == SECOND
        chore = twin.report("w", None, LATER + 1 + SECOND)
        answer = reported(twin, chore, LATER + 2 * SECOND, verdict=r.Verdict.BACKPRESSURE, hold_ms=7 * SECOND)
        assert answer.chore_ms == 7 * SECOND

    def test_endpoint_that_is_left_out_of_the_config_is_not_asked(self) -> None:
        twin = self.opened()
        reconfigured(twin, {"a": {}}, endpoints={"other": {}})
        assert twin.report("w", None, LATER) == r.Chore("NONE", "", 0, 0, None)


class TestGate:
    def gated(self, *, running: int = 1, **settings: Any) -> Reference:
        """Return a group with a gated endpoint, so many requests that run there, and twelve that wait."""
        gate = {"gate": "vllm", "gate_target": 3, "gate_token_ms": 150, "gate_poll_ms": POLL_MS}
        twin = configured(endpoints={"default": gate | {"gate_stale_ms": STALE_MS, "gate_fail": "open"} | settings})
        for number in range(12):
            submit(twin, f"r{number}")
        claim(twin, running)
        return twin

    def sample(self, twin: Reference, now: int, **said: Any) -> r.Chore:
        chore = twin.report("w", None, now)
        assert chore.kind == "SAMPLE"
        return reported(twin, chore, now, **said)

    def test_one_gateway_at_a_time_samples_once_a_poll_time(self) -> None:
        twin = self.gated()
        chore = twin.report("w", None, NOW)
        assert (chore.kind, twin.report("v", None, NOW).kind) == ("SAMPLE", "NONE")
        assert reported(twin, chore, NOW + 9, waiting=0.0).chore_ms == POLL_MS
        assert twin.report("v", None, NOW + 9 + POLL_MS).kind == "SAMPLE"

    def test_sampler_that_never_reports_is_followed_by_another(self) -> None:
        twin = self.gated()
        chore = twin.report("w", None, NOW)
        assert twin.report("v", None, chore.until_ms).kind == "SAMPLE"
        reported(twin, chore, chore.until_ms + 1, waiting=9.0)  # too late
        assert twin.group.endpoints["default"].sample is None

    def test_launches_since_the_sample_count_as_if_they_waited(self) -> None:
        twin = self.gated()
        self.sample(twin, NOW, waiting=1.0)
        assert ids(claim(twin, 9)) == ["r1", "r2"]
        assert twin.group.pools["a"].reason == "endpoint_gated"
        self.sample(twin, NOW + POLL_MS, waiting=0.0)
        assert ids(claim(twin, 9, now=NOW + POLL_MS)) == ["r3", "r4", "r5"]

    def test_slow_tokens_stop_launches(self) -> None:
        twin = self.gated()
        self.sample(twin, NOW, token_ms=151.0)
        assert claim(twin, 9).leases == ()
        self.sample(twin, NOW + POLL_MS, token_ms=150.0)
        assert len(claim(twin, 9, now=NOW + POLL_MS).leases) == 9

    def test_what_runs_nothing_of_ours_lets_one_trial_through(self) -> None:
        twin = self.gated()
        self.sample(twin, NOW, waiting=99.0)
        (running,) = twin.group.leased()
        item = r.Lease(running.id, *[""] * 3, running.fence, *[0] * 10)
        settle(twin, item)
        assert ids(claim(twin, 9)) == ["r1"]

    @pytest.mark.parametrize(("fail_mode", "launched"), [("open", 9), ("closed", 0)])
    def test_old_sample_counts_as_the_mode_says(self, fail_mode: str, launched: int) -> None:
        twin = self.gated(gate_fail=fail_mode)
        self.sample(twin, NOW, waiting=3.0)
        blocked = claim(twin, 9, now=NOW + STALE_MS)
        assert blocked.leases == ()
        assert blocked.sleep_ms == (1 if fail_mode == "open" else 5_000)
        assert len(claim(twin, 9, now=NOW + STALE_MS + 1).leases) == launched

    def test_missing_sample_counts_as_an_old_one(self) -> None:
        assert len(claim(self.gated(gate_fail="open"), 9).leases) == 9
        assert claim(self.gated(gate_fail="closed"), 9).leases == ()

    def test_sample_that_could_not_be_read_leaves_the_last_one_which_grows_old(self) -> None:
        twin = self.gated()
        self.sample(twin, NOW, waiting=3.0)
        self.sample(twin, NOW + POLL_MS)
        assert claim(twin, 9, now=NOW + POLL_MS).leases == ()
        assert len(claim(twin, 9, now=NOW + STALE_MS + 1).leases) == 9

    def test_sample_that_was_begun_before_its_gate_changed_does_not_count(self) -> None:
        twin = self.gated()
        chore = twin.report("w", None, NOW)
        reconfigured(twin, {"a": {}}, endpoints={"default": {}})
        assert reported(twin, chore, NOW, waiting=99.0) == r.Chore("NONE", "", 0, 0, None)
        assert twin.group.endpoints["default"].sample is None

    def test_changed_gate_forgets_what_was_sampled(self) -> None:
        twin = self.gated()
        self.sample(twin, NOW, waiting=3.0)
        reconfigured(twin, {"a": {}}, endpoints={"default": {"gate": "sglang"}})
        assert len(claim(twin, 9).leases) == 9
        reconfigured(twin, {"a": {}}, endpoints={"default": {}})
        assert twin.report("w", None, NOW) == r.Chore("NONE", "", 0, 0, None)

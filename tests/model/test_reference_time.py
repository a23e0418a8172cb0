"""What time, outages and config changes do in the twin: DESIGN sections 5 and 6b, one promise a test."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.fabric import records as r
from tests.model.bench import document
from tests.model.reference import Reference
from tests.model.steps import (
    LEASE_MS,
    LIVENESS_MS,
    NOW,
    SECOND,
    beat,
    claim,
    configured,
    endings,
    reconfigured,
    settle,
    submit,
)


class TestRenew:
    def test_renews_what_is_held_and_says_what_is_lost_cancelled_and_unknown(self) -> None:
        twin = configured()
        for number in range(4):
            submit(twin, f"r{number}")
        held = claim(twin, 3, nonce="known").leases
        (outstanding,) = claim(twin, 1, nonce="on its way").leases
        twin.cancel("r1", "test", NOW)
        answer = twin.renew(
            beat(("r0", held[0].fence), ("r1", held[1].fence), ("old", 9), nonces=("on its way",)), NOW + 9
        )
        assert (answer.lost, answer.cancelled) == (("old",), ("r1",))
        assert [lease.request_id for lease in answer.unknown] == ["r2"]
        assert twin.group.leases == {
            "r0": NOW + 9 + LEASE_MS, "r1": NOW + 9 + LEASE_MS, "r2": NOW + 9 + LEASE_MS,
            outstanding.request_id: NOW + LEASE_MS,
        }  # fmt: skip

    def test_lease_that_ran_out_is_lost(self) -> None:
        twin = configured()
        submit(twin, "r")
        (lease,) = claim(twin).leases
        twin.renew(beat(nonces=(twin.group.requests["r"].claim_nonce,)), NOW + LEASE_MS)  # somebody is alive
        assert twin.renew(beat(("r", lease.fence)), NOW + LEASE_MS + 1).lost == ("r",)

    def test_heartbeat_ends_waiting_requests_past_their_deadline(self) -> None:
        twin = configured()
        submit(twin, "r", timeout_ms=SECOND)
        twin.renew(beat(), NOW + SECOND)
        assert endings(twin) == [("r", "expired")]


class TestReap:
    def run_out(self, pool: dict[str, Any], *, attempts: int = 1) -> Reference:
        twin = configured({"a": pool})
        submit(twin, "r")
        submit(twin, "next")
        for number in range(attempts):
            claim(twin, nonce=f"n{number}")
            twin.group.leases["r"] = NOW - 1
            twin.reap(10, NOW)
        return twin

    def test_at_most_once_is_told_lost(self) -> None:
        twin = self.run_out({})
        assert endings(twin) == [("r", "lost")]
        assert [told.ending for told in twin.group.told["producer"]] == ["lost"]
        assert twin.group.leases == {}

    def test_at_least_once_goes_back_to_the_head_until_its_attempts_are_spent(self) -> None:
        pool = {"delivery": "at_least_once", "max_attempts": 2}
        twin = self.run_out(pool)
        assert endings(twin) == []
        assert [entry.id for entry in twin.group.pools["a"].entries] == ["r", "next"]
        assert claim(twin).leases[0].attempt == 2
        assert endings(self.run_out(pool, attempts=2)) == [("r", "dead")]

    def test_request_that_was_asked_to_stop_is_cancelled(self) -> None:
        twin = configured({"a": {"delivery": "at_least_once"}})
        submit(twin, "r")
        claim(twin)
        twin.cancel("r", "test", NOW)
        twin.group.leases["r"] = NOW - 1
        assert twin.reap(10, NOW) == r.Reaped(NOW, 0, 0, 0, more=False)
        assert endings(twin) == [("r", "cancelled")]

    def test_running_request_gets_a_lease_time_beyond_its_deadline(self) -> None:
        twin = configured()
        submit(twin, "r", timeout_ms=SECOND)
        claim(twin)
        late = NOW + SECOND
        assert twin.reap(10, late).expired == 0
        twin.group.leases["r"] = late + 2 * LEASE_MS  # its gateway lives and does not stop
        assert twin.reap(10, late + LEASE_MS - 1).expired == 0
        assert twin.reap(10, late + LEASE_MS).expired == 1
        assert endings(twin) == [("r", "expired")]

    def test_batch_is_bounded_and_says_that_more_is_left(self) -> None:
        twin = configured()
        for number in range(5):
            submit(twin, f"r{number}")
        claim(twin, 5)
        first = twin.reap(3, NOW + LEASE_MS + 1)
        second = twin.reap(3, NOW + LEASE_MS + 1)
        assert (first.lost, first.more, second.lost, second.more) == (3, True, 2, False)


class TestOutage:
    """Nobody is judged by a clock that stood still for them."""

    def test_silence_of_two_heartbeats_starts_a_grace_of_one_liveness_time(self) -> None:
        twin = configured()
        twin.renew(beat(), NOW)
        submit(twin, "r", liveness_ms=SECOND)
        (lease,) = claim(twin).leases
        submit(twin, "waits", liveness_ms=SECOND)
        back = NOW + 2 * LEASE_MS
        assert twin.reap(10, back) == r.Reaped(back, 0, 0, 0, more=False)
        assert twin.renew(beat(("r", lease.fence)), back).lost == ()
        assert len(claim(twin, now=back + 1).leases) == 1  # its producer is not taken for gone
        assert settle(twin, lease, now=back + 2) == ("OK",)

    def test_after_the_grace_all_are_judged_again(self) -> None:
        twin = configured()
        twin.renew(beat(), NOW)
        submit(twin, "r")
        claim(twin)
        back = NOW + 2 * LEASE_MS
        twin.reap(10, back)
        for moment in range(back, back + LIVENESS_MS + 1, LEASE_MS // 3):
            twin.renew(beat(nonces=("nothing",)), moment)
        twin.group.leases["r"] = back
        assert twin.reap(10, back + LIVENESS_MS).lost == 1

    def test_short_silence_is_no_outage(self) -> None:
        twin = configured()
        submit(twin, "r", liveness_ms=SECOND)
        twin.renew(beat(), NOW)
        assert claim(twin, now=NOW + 2 * LEASE_MS // 3).leases == ()
        assert endings(twin) == [("r", "producer_gone")]


class TestConfigure:
    def test_compare_and_set_of_the_generation(self) -> None:
        twin = configured()
        config = document({"a": {"quantum": 2}})
        assert twin.configure(config, expected_generation=0, actor="x", nonce="n").status == "CONFLICT"
        assert twin.configure(config, expected_generation=1, actor="x", nonce="n").status == "APPLIED"
        assert twin.configure(config, expected_generation=1, actor="x", nonce="n").status == "APPLIED"  # repeated
        assert twin.configure(config, expected_generation=2, actor="x", nonce="m").status == "UNCHANGED"
        assert twin.group.generation == 2

    @pytest.mark.parametrize(
        "config",
        [
            document({"a": {"min_concurrent": 5}, "b": {"min_concurrent": 4}}, total=8),
            document({"a": {"min_concurrent": 2, "max_concurrent": 1}}),
            document({"a": {"endpoint": "nowhere"}}),
            document({"b": {}}),
        ],
        ids=["sum of minima", "minimum above cap", "unknown endpoint", "pool with work left out"],
    )
    def test_what_does_not_fit_is_refused_whole(self, config: dict[str, Any]) -> None:
        twin = configured()
        submit(twin, "r")
        assert twin.configure(config, expected_generation=1, actor="x", nonce="n").status == "INVALID"
        assert (twin.group.generation, list(twin.group.pools)) == (1, ["a", "default"])

    def test_credit_turn_and_open_visit_outlive_a_change(self) -> None:
        twin = configured({"a": {"quantum": 4}, "b": {}})
        for number in range(9):
            submit(twin, f"a{number}")
            submit(twin, f"b{number}", "b")
        claim(twin, 2)
        reconfigured(twin, {"a": {"quantum": 4, "display_name": "A"}, "b": {}})
        assert [lease.pool_id for lease in claim(twin, 5).leases] == ["a", "a", "b", "a", "a"]

    def test_raised_cap_frees_parked_pools_and_a_disabled_pool_runs_out(self) -> None:
        twin = configured({"a": {"max_concurrent": 1}})
        for number in range(4):
            submit(twin, f"r{number}")
        assert len(claim(twin, 4).leases) == 1
        reconfigured(twin, {"a": {"max_concurrent": 3, "enabled": False}})
        assert isinstance(submit(twin, "refused"), r.Refused)
        assert len(claim(twin, 4, nonce="n").leases) == 2

    def test_policy_may_be_switched_both_ways(self) -> None:
        twin = configured({"a": {}, "b": {"quantum": 4}})
        for number, pool in enumerate("aabbba"):
            submit(twin, f"r{number}", pool)
        reconfigured(twin, {"a": {}, "b": {"quantum": 4}}, policy="fifo")
        assert [lease.pool_id for lease in claim(twin, 3).leases] == ["a", "a", "b"]
        reconfigured(twin, {"a": {}, "b": {"quantum": 4}})
        assert [lease.pool_id for lease in claim(twin, 3, nonce="n").leases] == ["a", "b", "b"]

    def test_lease_on_an_endpoint_that_was_left_out_is_settled(self) -> None:
        twin = configured({"a": {"endpoint": "e"}}, endpoints={"default": {}, "e": {"max_concurrent": 1}})
        submit(twin, "r")
        (lease,) = claim(twin).leases
        reconfigured(twin, {"a": {}})
        assert twin.group.endpoint_in_flight("e") == 1
        assert settle(twin, lease) == ("OK",)
        assert twin.group.leases == {}


def test_frames_are_trimmed_up_to_a_sequence_for_their_owner_only() -> None:
    twin = configured()
    for number in range(3):
        submit(twin, f"r{number}")
        twin.cancel(f"r{number}", "test", NOW)
    assert not twin.acknowledge("producer", "another", 2, NOW).owner
    assert twin.acknowledge("producer", "session", 2, NOW) == r.Acknowledged(owner=True, trimmed=2, remaining=1)
    assert twin.acknowledge("producer", "session", 2, NOW) == r.Acknowledged(owner=True, trimmed=0, remaining=1)

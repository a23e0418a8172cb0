"""What the twin does with a request from submit to settle: DESIGN sections 5 and 6b, one promise a test."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dispatch.errors import PoolUnknown
from dispatch.fabric import records as r
from tests.model.bench import submission
from tests.model.reference import Claimant
from tests.model.steps import (
    LEASE_MS,
    NOW,
    SECOND,
    claim,
    configured,
    endings,
    reconfigured,
    settle,
    submit,
)


class TestSubmit:
    def test_admits_with_the_deadline_of_the_pool_or_the_callers_but_no_later_than_the_pools_most(self) -> None:
        twin = configured({"a": {"default_timeout_ms": 5 * SECOND, "max_timeout_ms": 9 * SECOND}})
        assert submit(twin, "r1") == r.Admitted(NOW + 5 * SECOND, NOW)
        assert submit(twin, "r2", timeout_ms=7 * SECOND) == r.Admitted(NOW + 7 * SECOND, NOW)
        assert submit(twin, "r3", timeout_ms=70 * SECOND) == r.Admitted(NOW + 9 * SECOND, NOW)

    def test_same_id_and_nonce_is_answered_the_same_and_queued_once(self) -> None:
        twin = configured()
        assert submit(twin, "r").deadline_ms == submit(twin, "r", now=NOW + 9).deadline_ms
        assert submit(twin, "r", nonce="another") == r.Exists("queued", "r")
        assert twin.group.queued == 1

    def test_id_may_be_used_again_when_its_request_is_forgotten(self) -> None:
        twin = configured(retention_ms=10 * SECOND)
        submit(twin, "r")
        (lease,) = claim(twin).leases
        settle(twin, lease)
        assert submit(twin, "r", nonce="another", now=NOW + 9 * SECOND) == r.Exists("ended", "r", ending="succeeded")
        assert isinstance(submit(twin, "r", nonce="another", now=NOW + 10 * SECOND), r.Admitted)

    def test_refuses_at_each_bound_and_counts_it(self) -> None:
        twin = configured(
            {"a": {"max_queue_depth": 2}, "b": {"max_queue_bytes": 20}, "c": {"enabled": False}, "d": {}},
            max_queued=4, max_payload_bytes=100,
        )  # fmt: skip
        assert submit(twin, "c1", "c") == r.Refused("pool_disabled", 0, 0, None)
        assert submit(twin, "d1", "d", body_bytes=101) == r.Refused("body_too_large", 101, 100, None)
        for number in range(2):
            submit(twin, f"a{number}")
        assert submit(twin, "a2") == r.Refused("pool_full", 2, 2, None)
        submit(twin, "b1", "b")
        assert submit(twin, "b2", "b") == r.Refused("pool_bytes_full", 13, 20, None)
        submit(twin, "d2", "d")
        assert submit(twin, "d3", "d") == r.Refused("group_full", 4, 4, None)
        assert twin.group.pools["a"].rejected == {"pool_full": 1}

    def test_large_body_has_to_be_stored_before(self) -> None:
        twin = configured()
        large = replace(submission("r", "a", 1), body=b"", body_bytes=5_000)
        assert twin.submit(large, NOW) == r.Refused("body_missing", 0, 5_000, None)
        assert isinstance(twin.submit(large, NOW, stored=True), r.Admitted)

    def test_unknown_pool_is_named_with_the_known_ones(self) -> None:
        with pytest.raises(PoolUnknown) as caught:
            submit(configured(), "r", "nowhere")
        assert caught.value.known == ("a", "default")

    @pytest.mark.parametrize(
        ("explicit", "images", "pages", "cost"),
        [
            (None, 0, 0, 1),
            (None, 2, 0, 5),
            (None, 1, 9, 5),
            (None, 20, 0, 16),
            (7, 9, 9, 7),
            (0, 0, 0, 1),
            (99, 0, 0, 16),
        ],
    )
    def test_cost_rule(self, explicit: int | None, images: int, pages: int, cost: int) -> None:
        twin = configured()
        submit(twin, "r", estimated_cost_units=explicit, images=images, pages=pages)
        assert twin.group.requests["r"].cost == cost


class TestClaim:
    def test_repeated_claim_lists_those_of_its_leases_that_are_current(self) -> None:
        twin = configured()
        submit(twin, "r1")
        submit(twin, "r2")
        first = claim(twin, 2, nonce="n").leases
        assert claim(twin, 2, nonce="n").leases == first
        twin.group.leases["r1"] = NOW - 1
        twin.reap(10, NOW)
        assert claim(twin, 2, nonce="n").leases == first[1:]

    def test_dead_heads_are_ended_and_cost_their_pool_nothing(self) -> None:
        twin = configured({"a": {"quantum": 4, "max_burst_per_visit": 2}, "b": {}})
        for number in range(6):
            submit(twin, f"r{number}", producer_id="gone" if number % 2 == 0 else "producer")
        submit(twin, "late", "b", timeout_ms=1 * SECOND)
        twin.group.alive["gone"] = ("session", 0)
        twin.group.requests["r5"].envelope_lost = True
        made = claim(twin, 9, now=NOW + 2 * SECOND)
        assert [lease.request_id for lease in made.leases] == ["r1", "r3"]
        assert made.ended == 5
        assert sorted(endings(twin)) == [
            ("late", "expired"), ("r0", "producer_gone"), ("r2", "producer_gone"), ("r4", "producer_gone"),
            ("r5", "malformed"),
        ]  # fmt: skip

    def test_stops_at_its_bound_of_dead_heads_and_says_call_again(self) -> None:
        twin = configured()
        for number in range(100):
            submit(twin, f"r{number}", producer_id="gone")
        submit(twin, "live")
        twin.group.alive["gone"] = ("session", 0)
        first = claim(twin)
        assert (first.ended, first.again, first.leases) == (64, True, ())
        second = claim(twin)
        assert (second.ended, second.again, len(second.leases)) == (36, False, 1)

    def test_stops_after_eight_barren_visits_and_says_call_again(self) -> None:
        twin = configured({f"p{number}": {} for number in range(20)})
        for number in range(20):
            submit(twin, f"r{number}", f"p{number}", estimated_cost_units=16)
        answers = [claim(twin, nonce=f"n{number}") for number in range(3)]
        assert [(len(answer.leases), answer.again) for answer in answers] == [(0, True), (0, True), (1, False)]

    def test_paused_pool_is_parked_and_comes_back_at_its_turn(self) -> None:
        twin = configured({"a": {"quantum": 4}, "b": {}})
        for number in range(9):
            submit(twin, f"a{number}")
            submit(twin, f"b{number}", "b")
        assert [lease.pool_id for lease in claim(twin, 2).leases] == ["a", "a"]
        assert twin.pause("a", "pause") == r.PoolState(changed=True, state="paused", waiting=7, in_flight=2)
        assert [lease.pool_id for lease in claim(twin, 3).leases] == ["b", "b", "b"]
        assert twin.group.pools["a"].reason == "paused"
        assert twin.pause("a", "resume").state == "active"
        assert [lease.pool_id for lease in claim(twin, 5).leases] == ["a", "a", "b", "a", "a"]

    def test_old_heads_above_a_lowered_greatest_cost_launch(self) -> None:
        twin = configured({"a": {}})
        submit(twin, "r", estimated_cost_units=16)
        reconfigured(twin, {"a": {}}, cost_max=4)
        (lease,) = claim(twin).leases
        assert (lease.cost, twin.group.pools["a"].cost_served) == (16, 4)


class TestSettle:
    def test_old_fence_and_other_gateway_change_nothing(self) -> None:
        twin = configured()
        submit(twin, "r")
        (lease,) = claim(twin).leases
        assert settle(twin, replace(lease, fence=lease.fence + 1)) == ("LEASE_LOST",)
        other = twin.settle(
            Claimant("h", "h/group", "n"), 0,
            [r.Settlement(request_id="r", fence=lease.fence, outcome=r.Outcome.SUCCEEDED)], NOW,
        )  # fmt: skip
        assert other.answers == ("LEASE_LOST",)
        assert endings(twin) == []

    def test_nonce_is_checked_before_the_fence(self) -> None:
        twin = configured()
        submit(twin, "r")
        (lease,) = claim(twin).leases
        assert settle(twin, lease, nonce="n") == ("OK",)
        assert settle(twin, lease, nonce="n") == ("OK",)
        assert settle(twin, lease, nonce="another") == ("LEASE_LOST",)
        assert endings(twin) == [("r", "succeeded")]

    def test_lease_that_ran_out_is_lost_even_before_it_is_reaped(self) -> None:
        twin = configured()
        submit(twin, "r")
        (lease,) = claim(twin).leases
        assert settle(twin, lease, now=NOW + LEASE_MS + 1) == ("LEASE_LOST",)

    def test_reply_for_a_producer_that_is_gone_is_dropped_and_its_outcome_kept(self) -> None:
        twin = configured()
        submit(twin, "r", liveness_ms=SECOND)
        (lease,) = claim(twin).leases
        assert settle(twin, lease, now=NOW + SECOND) == ("PRODUCER_GONE",)
        assert [(e.ending, e.outcome) for e in twin.group.ended] == [("reply_dropped", "succeeded")]
        assert twin.group.told == {}

    def test_released_request_goes_back_to_its_place_and_its_attempt_is_not_counted(self) -> None:
        twin = configured()
        for number in range(3):
            submit(twin, f"r{number}")
        first, second = claim(twin, 2).leases
        assert settle(twin, second, first, outcome=r.Outcome.RELEASE) == ("REQUEUED", "REQUEUED")
        again = claim(twin, 3, nonce="again").leases
        assert [(lease.request_id, lease.attempt) for lease in again] == [("r0", 1), ("r1", 1), ("r2", 1)]

    def test_released_request_past_its_deadline_or_asked_to_stop_ends(self) -> None:
        twin = configured()
        submit(twin, "late", timeout_ms=SECOND)
        submit(twin, "unwanted")
        leases = claim(twin, 2).leases
        assert twin.cancel("unwanted", "test", NOW) == r.Cancellation("CANCELLING", "g")
        assert settle(twin, *leases, outcome=r.Outcome.RELEASE, now=NOW + SECOND) == ("OK", "OK")
        assert endings(twin) == [("late", "expired"), ("unwanted", "cancelled")]

    def test_settle_claims_the_next_in_the_same_call(self) -> None:
        twin = configured(total=1)
        submit(twin, "r1")
        submit(twin, "r2")
        (lease,) = claim(twin, 2).leases
        item = r.Settlement(request_id="r1", fence=lease.fence, outcome=r.Outcome.FAILED, verdict=r.Verdict.FAILURE)
        answer = twin.settle(Claimant("g", "g/group", "n"), 2, [item], NOW)
        assert [made.request_id for made in answer.claim.leases] == ["r2"]
        assert twin.group.endpoints["default"].failures == 1


class TestCancel:
    def test_waiting_request_ends_at_once_and_leaves_a_tombstone(self) -> None:
        twin = configured()
        submit(twin, "r1")
        submit(twin, "r2")
        assert twin.cancel("r1", "test", NOW) == r.Cancellation("CANCELLED")
        assert twin.cancel("r1", "test", NOW) == r.Cancellation("ENDED", "cancelled")
        assert twin.cancel("nobody", "test", NOW) == r.Cancellation("UNKNOWN")
        assert (len(twin.group.pools["a"].live), twin.group.pools["a"].tombstones) == (1, 1)
        assert [lease.request_id for lease in claim(twin, 2).leases] == ["r2"]
        assert [told.ending for told in twin.group.told["producer"]] == ["cancelled"]

    def test_empty_pool_forgets_credit_and_keeps_debt(self) -> None:
        twin = configured({"a": {"quantum": 9, "min_concurrent": 1}, "b": {}})
        submit(twin, "r1", estimated_cost_units=5)
        claim(twin)
        assert twin.group.pools["a"].deficit == -5
        submit(twin, "r2", estimated_cost_units=1)
        submit(twin, "r3", estimated_cost_units=1)
        claim(twin)
        assert twin.group.pools["a"].deficit == 9 - 5 - 1
        twin.cancel("r3", "test", NOW)
        assert twin.group.pools["a"].deficit == 0

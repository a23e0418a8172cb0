"""Idempotency keys and detached requests on the twin: one promise a test."""

from __future__ import annotations

from typing import Any

from dispatch.fabric import records as r
from tests.model.reference import Reference
from tests.model.steps import NOW, SECOND, claim, configured, endings, fail, settle, submit


def keyed(twin: Reference, request_id: str, *, now: int = NOW, fingerprint: str = "f", **fields: Any) -> Any:
    return submit(twin, request_id, now=now, idempotency="h", fingerprint=fingerprint, **fields)


class TestKey:
    def test_repeat_while_the_first_waits_or_runs_is_told_of_it(self) -> None:
        twin = configured()
        keyed(twin, "r1")
        assert keyed(twin, "r2") == r.Exists("queued", "r1", same=True)
        claim(twin)
        assert keyed(twin, "r2") == r.Exists("leased", "r1", same=True)

    def test_repeat_after_the_end_gets_the_reply(self) -> None:
        twin = configured(idempotency_ttl_ms=60 * SECOND, retention_ms=SECOND)
        keyed(twin, "r1")
        settle(twin, *claim(twin).leases)
        assert keyed(twin, "r2", now=NOW + 59 * SECOND) == r.Replayed("r1", b"")
        assert isinstance(keyed(twin, "r2", now=NOW + 60 * SECOND), r.Admitted)

    def test_same_key_for_something_else_is_told(self) -> None:
        twin = configured()
        keyed(twin, "r1")
        assert keyed(twin, "r2", fingerprint="other") == r.Exists("queued", "r1", same=False)
        settle(twin, *claim(twin).leases)
        assert keyed(twin, "r2", fingerprint="other") == r.Exists("ended", "r1", same=False, ending="succeeded")

    def test_key_of_a_request_that_never_ran_is_free_again(self) -> None:
        twin = configured()
        keyed(twin, "r1")
        twin.cancel("r1", "test", NOW)
        assert isinstance(keyed(twin, "r2"), r.Admitted)

    def test_key_of_a_request_that_was_given_back_unexecuted_is_free_again(self) -> None:
        twin = configured()
        keyed(twin, "r1")
        settle(twin, *claim(twin).leases, outcome=r.Outcome.RELEASE)
        twin.cancel("r1", "test", NOW)
        assert isinstance(keyed(twin, "r2"), r.Admitted)

    def test_reply_is_kept_though_its_producer_is_gone(self) -> None:
        twin = configured()
        keyed(twin, "r1")
        (lease,) = claim(twin).leases
        twin.group.alive["producer"] = ("session", 0)
        assert settle(twin, lease) == ("PRODUCER_GONE",)
        assert endings(twin) == [("r1", "reply_dropped")]
        assert twin.group.results["r1"].ending == "succeeded"
        assert keyed(twin, "r2") == r.Replayed("r1", b"")

    def test_failed_attempt_before_the_ending_counts_as_having_run(self) -> None:
        twin = configured({"a": {"max_attempts": 2, "retry_base_ms": SECOND, "retry_cap_ms": SECOND}})
        keyed(twin, "r1")
        fail(twin, *claim(twin).leases)
        twin.cancel("r1", "test", NOW)
        assert keyed(twin, "r2") == r.Replayed("r1", b"")


class TestDetached:
    def test_reply_is_kept_and_told_to_nobody(self) -> None:
        twin = configured()
        submit(twin, "r", detached=True)
        settle(twin, *claim(twin).leases)
        assert twin.group.told == {}
        assert twin.group.results["r"].ending == "succeeded"

    def test_it_needs_no_producer(self) -> None:
        twin = configured()
        submit(twin, "r", detached=True, liveness_ms=1)
        (lease,) = claim(twin, now=NOW + SECOND).leases
        assert settle(twin, lease, now=NOW + SECOND) == ("OK",)
        assert endings(twin) == [("r", "succeeded")]

    def test_one_that_never_ran_keeps_what_became_of_it(self) -> None:
        twin = configured()
        submit(twin, "r", detached=True)
        twin.cancel("r", "test", NOW)
        assert twin.group.results["r"].ending == "cancelled"


class TestWait:
    def test_caller_may_bound_the_time_in_the_queue_but_not_that_of_the_run(self) -> None:
        twin = configured()
        submit(twin, "runs", max_wait_ms=SECOND)
        submit(twin, "waits", max_wait_ms=SECOND)
        claim(twin, 1)
        assert claim(twin, 9, now=NOW + SECOND).ended == 1
        twin.reap(9, NOW + 9 * SECOND)
        assert endings(twin) == [("waits", "expired")]

"""Chunks of running streams on the twin: one promise a test."""

from __future__ import annotations

from dispatch.fabric import records as r
from tests.model.reference import Reference
from tests.model.steps import NOW, claim, configured, endings, fail, submit

RUN_AGAIN = {"delivery": "at_least_once", "max_attempts": 3, "retry_base_ms": 1, "retry_cap_ms": 1}


def running() -> tuple[Reference, r.Lease]:
    twin = configured({"a": RUN_AGAIN})
    submit(twin, "r")
    (lease,) = claim(twin).leases
    return twin, lease


def append(twin: Reference, lease: r.Lease, number: int, count: int = 1, gateway: str = "g") -> str:
    item = r.Chunks(request_id=lease.request_id, fence=lease.fence, number=number, count=count, payload=b"x")
    (word,) = twin.append(gateway, [item], NOW)
    return word


def test_chunks_are_sent_in_order_and_once() -> None:
    twin, lease = running()
    assert [append(twin, lease, number, 2) for number in (0, 2, 0, 5, 3)] == ["OK", "OK", "OK", "GAP", "GAP"]
    assert [told.attempt for told in twin.group.told["producer"]] == [0, 2]  # the numbers of the first ones


def test_nothing_is_sent_by_who_does_not_hold_the_lease_or_for_who_does_not_want_it() -> None:
    twin, lease = running()
    assert append(twin, lease, 0, gateway="another") == "LEASE_LOST"
    twin.group.alive["producer"] = ("session", 0)
    assert append(twin, lease, 0) == "PRODUCER_GONE"
    twin.cancel("r", "test", NOW)
    assert append(twin, lease, 0) == "CANCELLED"
    twin.group.leases["r"] = NOW - 1
    assert append(twin, lease, 0) == "LEASE_LOST"
    assert twin.group.told == {}


def test_what_was_sent_in_part_is_neither_retried_nor_run_again() -> None:
    twin, lease = running()
    append(twin, lease, 0)
    assert fail(twin, lease) == ("OK",)
    twin2, lease = running()
    append(twin2, lease, 0)
    twin2.group.leases["r"] = NOW - 1
    twin2.reap(9, NOW)
    assert (endings(twin), endings(twin2)) == ([("r", "failed")], [("r", "lost")])

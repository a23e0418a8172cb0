"""Keys of a group that somebody else wrote into, or that vanished: what it costs is bounded, and all else goes on."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from dispatch.errors import BadArgument
from dispatch.fabric import functions as f
from dispatch.fabric.audit import differences
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import LIMITS, key
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.leftovers import counters_above_zero, keys_without_expiry
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

LEASE_MS = 300
UNREADABLE = [b"", b"\xc1", b"\x80", b"\x2a", b"\xff\xfe\xfd", b"\x81\xa1a"]


@dataclass
class Damaged:
    """A group with short leases, its hands, and an eye that writes where only the library may."""

    hand: ByHand
    keys: redis.Redis

    def key(self, name: str, **parts: str) -> str:
        return key(self.hand.group, name, **parts)

    def reap(self) -> None:
        """Let the leases run out under the eyes of a gateway that lives, and reap them."""
        for _ in range(5):
            time.sleep(LEASE_MS / 4000)
            self.hand.beat(gateway="warden")
        self.hand.run(f.lease_reap(limit=LIMITS["reap_max"]))

    def serves(self, pool: str = "default") -> None:
        """Hold the group against what a new one does: a lone request is claimed at once, and nothing stays."""
        [request_id] = self.hand.submit(pool)
        leases = self.hand.claim(5)
        assert [lease.request_id for lease in leases] == [request_id]
        self.hand.settle(leases)
        assert counters_above_zero(self.hand.url, self.hand.group) == {}

    def endings(self) -> dict[str, str]:
        return {row["request_id"]: row["ending"] for row in self.hand.section("endings")["rows"]}


@pytest.fixture
def damaged(valkey: ValkeyProcess) -> Iterator[Damaged]:
    group = unique_group()
    pools = [{"pool_id": "default", "max_concurrent": 2}, {"pool_id": "other", "quantum": 4, "min_concurrent": 1}]
    configure(valkey.url, group, default_document() | {"pools": pools, "lease_ms": LEASE_MS, "retention_ms": 60_000})
    hand = ByHand(valkey.url, group)
    hand.beat()
    with eye(valkey.url) as keys:
        yield Damaged(hand, keys)
    hand.close()


@pytest.mark.parametrize("foreign", [b"x", b"", b"\xff\xfe\0", b"1|2|3", b"a" * 10_000])
def test_what_is_pushed_before_a_known_head_costs_nobody_a_turn(damaged: Damaged, foreign: bytes) -> None:
    ids = damaged.hand.submit(count=2)
    damaged.keys.lpush(damaged.key("requests", pool="default"), foreign, foreign)
    leases = damaged.hand.claim(5)
    assert [lease.request_id for lease in leases] == ids
    damaged.hand.settle(leases)
    for _ in range(3):
        damaged.serves()
    assert damaged.keys.exists(damaged.key("requests", pool="default")) == 0


def test_entries_put_in_another_order_stay(damaged: Damaged) -> None:
    ids = damaged.hand.submit(count=4)
    waiting = damaged.key("requests", pool="default")
    damaged.keys.lmove(waiting, waiting, "RIGHT", "LEFT")
    leases = damaged.hand.claim(2)
    damaged.hand.settle(leases)
    more = damaged.hand.claim(2)
    damaged.hand.settle(more)
    assert sorted(lease.request_id for lease in [*leases, *more]) == ids
    damaged.serves()


def test_what_is_put_before_a_request_that_was_given_back_does_not_hide_it(damaged: Damaged) -> None:
    [request_id] = damaged.hand.submit()
    damaged.hand.settle(damaged.hand.claim(1), outcome=Outcome.RELEASE)
    damaged.keys.zadd(damaged.key("returned", pool="default"), {b"x": 0, b"y": -1})
    leases = damaged.hand.claim(1)
    assert [lease.request_id for lease in leases] == [request_id]
    damaged.hand.settle(leases)
    damaged.serves()


def test_entries_that_the_record_does_not_know_are_found(damaged: Damaged) -> None:
    [request_id] = damaged.hand.submit()
    damaged.hand.change_record("pool", {"levels": [0, 0, 0, 0], "head": None}, pool="default")
    leases = damaged.hand.claim(1)
    assert [lease.request_id for lease in leases] == [request_id]
    damaged.hand.settle(leases)
    damaged.serves()


def test_a_name_without_a_pool_does_not_hold_up_the_pools(damaged: Damaged) -> None:
    [request_id] = damaged.hand.submit("other")
    damaged.keys.zadd(damaged.key("rotation"), {"ghost": -5, "spirit": -4})
    damaged.keys.lpush(damaged.key("kept"), "ghost", "spirit")
    leases = damaged.hand.claim(1)
    assert [lease.request_id for lease in leases] == [request_id]
    damaged.hand.settle(leases)
    damaged.serves("other")
    assert damaged.keys.exists(damaged.key("kept"), damaged.key("rotation")) == 0


@pytest.mark.parametrize("record", UNREADABLE)
def test_a_waiting_request_that_cannot_be_read_is_malformed(damaged: Damaged, record: bytes) -> None:
    bad, good = damaged.hand.submit(count=2)
    damaged.keys.hset(damaged.key("request", id=bad), "record", record)
    leases = damaged.hand.claim(5)
    assert [lease.request_id for lease in leases] == [good]
    damaged.hand.settle(leases)
    assert damaged.endings() == {bad: "malformed", good: "succeeded"}
    damaged.serves()
    assert [name for name in keys_without_expiry(damaged.hand.url, damaged.hand.group) if bad in name] == []


@pytest.mark.parametrize("how", ["unreadable", "gone"])
def test_a_running_request_that_vanishes_frees_its_slots(damaged: Damaged, how: str) -> None:
    bad, good = damaged.hand.submit(count=2)
    assert len(damaged.hand.claim(5)) == 2  # the pool's cap
    [waiting] = damaged.hand.submit()
    request = damaged.key("request", id=bad)
    damaged.keys.delete(request) if how == "gone" else damaged.keys.hset(request, "record", b"\xc1")
    damaged.reap()
    assert damaged.endings() == {good: "lost"}  # the other one that ran out was met in the same call
    leases = damaged.hand.claim(5)
    assert [lease.request_id for lease in leases] == [waiting]
    damaged.hand.settle(leases)
    damaged.serves()


def test_an_unreadable_request_past_its_deadline_expires(damaged: Damaged) -> None:
    [request_id] = damaged.hand.submit(timeout_ms=1)
    request = damaged.key("request", id=request_id)
    damaged.keys.hset(request, "record", b"\xc1")
    damaged.reap()
    assert damaged.keys.pttl(request) > 0


def test_leases_that_fell_out_of_the_index_are_settled(damaged: Damaged) -> None:
    damaged.hand.submit(count=2)
    leases = damaged.hand.claim(2)
    damaged.keys.delete(damaged.key("leases"))
    damaged.hand.settle(leases)
    assert set(damaged.endings().values()) == {"succeeded"}
    damaged.serves()


def test_leases_that_fell_out_of_the_index_come_back_with_a_heartbeat(damaged: Damaged) -> None:
    damaged.hand.submit(count=2)
    leases = damaged.hand.claim(2)
    damaged.keys.delete(damaged.key("leases"))
    damaged.hand.beat(leases)
    assert damaged.keys.zcard(damaged.key("leases")) == 2
    damaged.reap()
    assert set(damaged.endings().values()) == {"lost"}
    damaged.serves()


def test_a_pool_that_vanishes_takes_nobody_with_it(damaged: Damaged) -> None:
    [running] = damaged.hand.submit()
    damaged.hand.claim(1)
    waiting = damaged.hand.submit(count=3, timeout_ms=1)
    [left, *_] = damaged.hand.submit(count=2)
    [other] = damaged.hand.submit("other")
    damaged.keys.delete(damaged.key("pool", pool="default"))
    assert damaged.hand.run(f.request_cancel(left, actor="test")).status == "CANCELLED"
    damaged.reap()
    endings: dict[str, Any] = {running: "lost", left: "cancelled", **dict.fromkeys(waiting, "expired")}
    assert damaged.endings() == endings
    assert [lease.request_id for lease in damaged.hand.claim(5)] == [other]


@pytest.mark.parametrize("how", ["gone", "unreadable"])
@pytest.mark.parametrize("name", ["pool", "endpoint"])
def test_the_same_config_makes_a_pool_or_an_endpoint_again(damaged: Damaged, name: str, how: str) -> None:
    damaged.hand.submit(count=2)
    leases = damaged.hand.claim(2)
    lost = damaged.key(name, **{name: "default"})
    damaged.keys.delete(lost) if how == "gone" else damaged.keys.hset(lost, "record", b"\xc1")
    [other] = damaged.hand.submit("other")
    leases += damaged.hand.claim(1)
    assert leases[2].request_id == other
    missing = name == "pool"
    assert [row["pool_id"] for row in damaged.hand.section("pools")["rows"]] == ["default", "other"][missing:]
    told = [each for each in differences(damaged.hand.connection, damaged.hand.group) if each.field == "record"]
    assert [(each.name, each.repair) for each in told] == ([("default", None)] if missing else [])
    current = damaged.hand.section("config")
    document = json.dumps(current["document"]).encode()
    call = f.group_configure(
        document, expected_generation=current["generation"], actor="t", reason="", nonce=uuid.uuid4().hex
    )
    assert damaged.hand.run(call).status == ("UNCHANGED" if (name, how) == ("endpoint", "unreadable") else "APPLIED")
    damaged.hand.settle(leases)
    damaged.serves()
    damaged.serves("other")
    again = f.group_configure(document, expected_generation=99, actor="t", reason="", nonce=uuid.uuid4().hex)
    assert damaged.hand.run(again).status == "CONFLICT"


@pytest.mark.parametrize("waiting", [3, 5])
@pytest.mark.parametrize("keys", [("",), ("a", "b", "")], ids=["no keys", "keys"])
def test_what_waits_in_a_pool_that_is_made_again_is_served(
    damaged: Damaged, keys: tuple[str, ...], waiting: int
) -> None:
    ids = [damaged.hand.submit(fairness_key=name)[0] for name in keys for _ in range(waiting)]
    damaged.hand.run(f.request_cancel(ids[-1], actor="test"))
    leases = damaged.hand.claim(1)
    damaged.hand.settle(damaged.hand.claim(1), outcome=Outcome.RELEASE)
    damaged.keys.delete(damaged.key("pool", pool="default"))
    left = ids[-2]
    damaged.hand.run(f.request_cancel(left, actor="test"))
    current = damaged.hand.section("config")
    document = json.dumps(current["document"]).encode()
    damaged.hand.run(
        f.group_configure(document, expected_generation=current["generation"], actor="t", reason="", nonce="n")
    )
    assert differences(damaged.hand.connection, damaged.hand.group) == []
    while leases:
        damaged.hand.settle(leases)
        leases = damaged.hand.claim(2)
    assert damaged.endings() == dict.fromkeys(ids, "succeeded") | {ids[-1]: "cancelled", left: "cancelled"}
    damaged.serves()


def test_ids_that_a_dead_gateway_seems_to_hold_go_with_time(damaged: Damaged) -> None:
    damaged.hand.submit()
    name = uuid.uuid4().hex
    damaged.hand.beat(gateway=name)
    damaged.hand.claim(1, gateway=name)
    damaged.keys.sadd(damaged.key("holding", gateway=name), "nobody knows this one")
    damaged.reap()
    damaged.reap()
    assert damaged.keys.pttl(damaged.key("holding", gateway=name)) > 0


def test_an_envelope_that_is_too_large_is_refused(damaged: Damaged) -> None:
    limit = LIMITS["envelope_max_bytes"]
    damaged.hand.submit(envelope=b"x" * limit)
    with pytest.raises(BadArgument, match="envelope"):
        damaged.hand.submit(envelope=b"x" * (limit + 1))

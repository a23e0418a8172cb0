"""Hot records are packed by position: what the library writes is what the tools read, and older maps still work."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.audit import differences
from dispatch.fabric.layouts import read_record
from dispatch.fabric.records import Outcome, Settlement
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.groups import configure, unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def hand(valkey: ValkeyProcess) -> ByHand:
    group = unique_group()
    configure(valkey.url, group)
    return ByHand(valkey.url, group)


def keys_of(hand: ByHand, *requests: str) -> dict[str, str]:
    """Return the kind of each packed record of the group, by its key."""
    found = {key(hand.group, "group"): "group", key(hand.group, "pool", pool="default"): "pool"}
    return found | {key(hand.group, "request", id=one): "request" for one in requests}


def records(hand: ByHand, *requests: str) -> dict[str, dict[str, Any]]:
    with eye(hand.url) as client:
        return {kind: read_record(kind, client.hget(name, "record")) for name, kind in keys_of(hand, *requests).items()}


def test_what_is_packed_is_what_is_read(hand: ByHand) -> None:
    hand.submit(count=2, message_count=None)
    [lease] = hand.claim(1)
    found = records(hand, lease.request_id)
    group, pool, request = found["group"], found["pool"], found["request"]
    assert (group["queued"], group["in_flight"], group["fence"], group["sleepers"]) == (1, 1, lease.fence, {})
    assert (pool["depth"], pool["in_flight"], pool["launched"], pool["levels"]) == (1, 1, 1, [0, 1, 0, 0])
    assert (pool["place"], pool["open"], pool["kept"], pool["endings"]) == ("line", False, False, {})
    assert pool["head"].endswith("|r2")
    assert "drain_before" not in pool
    assert (request["pool"], request["gateway"], request["fence"]) == ("default", "g", lease.fence)
    assert "message_count" not in request
    assert "due_ms" not in request
    assert "tries" not in request


def test_a_group_whose_records_an_older_library_wrote_runs_on(hand: ByHand) -> None:
    hand.submit(count=3)
    [first] = hand.claim(1)
    with eye(hand.url) as client:
        for name, kind in keys_of(hand, "r1", "r2", "r3").items():
            said = {
                field: value
                for field, value in read_record(kind, client.hget(name, "record")).items()
                if value or field != "delayed"
            }
            client.hset(name, "record", msgspec.msgpack.encode(said))
    item = Settlement(request_id=first.request_id, fence=first.fence, outcome=Outcome.SUCCEEDED)
    settled = hand.run(f.lease_settle("g", "g/1", nonce="s1", want=2, items=[item]))
    assert settled.answers == ("OK",)
    assert [lease.request_id for lease in settled.claim.leases] == ["r2", "r3"]
    assert not list(differences(hand.connection, hand.group))
    assert records(hand)["pool"]["endings"] == {"succeeded": 1}


def test_a_record_that_cannot_be_read_holds_up_nobody_else(hand: ByHand) -> None:
    hand.submit(count=2)
    with eye(hand.url) as client:
        whole = client.hget(key(hand.group, "request", id="r1"), "record")
        client.hset(key(hand.group, "request", id="r1"), "record", whole[:40])
    assert [lease.request_id for lease in hand.claim(1)] == ["r2"]

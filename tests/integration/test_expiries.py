"""Nothing expires before the thing that needs it, and nothing of a finished request stays for ever."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
import redis

from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome, Settlement, Submission
from dispatch.fabric.schema import key
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess

LARGE = b"x" * 10_000
STRUCTURE = (
    "hash:llm:group", "hash:llm:pool:", "hash:llm:endpoint:", "stream:", "zset:llm:", "list:llm:wake",
    "set:llm:gateways",
)  # fmt: skip
"""What a group is made of, and what is bounded by itself."""


@pytest.fixture
def client(valkey: ValkeyProcess) -> Iterator[redis.Redis]:
    with redis.Redis(host="127.0.0.1", port=valkey.port) as opened:
        yield opened


def submit_large(fleet: Fleet, client: redis.Redis, timeout_ms: int) -> str:
    """Queue a request whose body stands under its own key; returns that key."""
    request_id = uuid.uuid4().hex
    body_key = key(fleet.group, "request_body", id=request_id, nonce="n")
    client.set(body_key, LARGE, px=60_000)
    submission = Submission(
        request_id=request_id, pool_id="default", producer_id="p", session="s", nonce="n", model="m", message_count=1,
        images=0, pages=0, estimated_cost_units=1, timeout_ms=timeout_ms, envelope=b"{}", body_bytes=len(LARGE),
    )  # fmt: skip
    fleet.connection.run(fleet.group, f.request_submit(submission))
    return body_key


def test_a_body_lives_as_long_as_its_request_may_run(valkey: ValkeyProcess, client: redis.Redis) -> None:
    fleet = Fleet(valkey.url, {"default": {}})
    body_key = submit_large(fleet, client, timeout_ms=3_000_000)
    assert client.pttl(body_key) > 3_000_000
    [lease] = fleet.claim(1)
    assert client.pttl(body_key) > 3_000_000
    fleet.settle([lease])
    assert client.pttl(body_key) <= 1  # gone, or going this millisecond
    fleet.close()


def test_a_reply_nobody_can_read_is_counted_as_dropped(valkey: ValkeyProcess, client: redis.Redis) -> None:
    fleet = Fleet(valkey.url, {"default": {}})
    fleet.submit("default", [1])
    [lease] = fleet.claim(1)
    client.delete(key(fleet.group, "alive", producer="p"), key(fleet.group, "replies", producer="p"))
    reply_key = key(fleet.group, "reply_body", id=lease.request_id)
    client.set(reply_key, LARGE, px=300_000)
    item = Settlement(request_id=lease.request_id, fence=lease.fence, outcome=Outcome.SUCCEEDED, by_reference=True)
    settle = f.lease_settle("g", "g/d", nonce=uuid.uuid4().hex, want=0, items=[item])
    assert fleet.connection.run(fleet.group, settle).answers == ("PRODUCER_GONE",)
    [row] = fleet.connection.run(fleet.group, f.fabric_snapshot("endings"))["rows"]
    assert (row["ending"], row["outcome"]) == ("reply_dropped", "succeeded")
    assert client.pttl(reply_key) <= 1
    assert not client.exists(key(fleet.group, "replies", producer="p"))
    fleet.close()


def test_no_key_of_a_finished_request_stays_without_an_expiry(valkey: ValkeyProcess, client: redis.Redis) -> None:
    fleet = Fleet(valkey.url, {"default": {}})
    waiting = fleet.submit("default", [1] * 20, fairness_key="k")
    submit_large(fleet, client, timeout_ms=60_000)
    fleet.connection.run(fleet.group, f.request_cancel(waiting[-1], actor="test"))
    while leases := fleet.claim(8):
        fleet.settle(leases)
    kept = [
        name.decode()
        for name in client.scan_iter(f"{{{fleet.group}}}:*", count=1000)
        if client.pttl(name) == -1 and not name.decode().partition("}:")[2].startswith(STRUCTURE)
    ]
    assert kept == []
    assert client.zcard(key(fleet.group, "leases")) == client.zcard(key(fleet.group, "deadlines")) == 0
    fleet.close()

"""Requests that end dead, made by hand."""

from __future__ import annotations

from typing import Any

from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import LIMITS, key
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.valkey import ValkeyProcess

POOLS = [
    {"pool_id": "again", "delivery": "at_least_once", "max_attempts": 2, "default_timeout_ms": 60_000},
    {"pool_id": "once-more", "delivery": "at_least_once", "max_attempts": 1},
    {"pool_id": "default"},
]
LARGE = LIMITS["inline_body_bytes"] + 1
"""Bytes of a body that stands under its own key; its nonce is `LARGE_NONCE`."""
LARGE_NONCE = "n-large"


def group_where_requests_die(valkey: ValkeyProcess, **fields: Any) -> ByHand:
    """Configure a group with `POOLS` and further `fields`; returns its hands."""
    group = unique_group()
    configure(valkey.url, group, default_document() | {"pools": POOLS} | fields)
    return ByHand(valkey.url, group)


def dies(hand: ByHand, pool: str = "again", **fields: Any) -> str:
    """Submit a request and have each of its runs broken off until its attempts are spent; returns its id."""
    size = fields.get("size", 0)
    if size > LIMITS["inline_body_bytes"]:
        fields = {"request_id": f"large-{size}", "nonce": LARGE_NONCE, "body": b"", "body_bytes": size} | fields
        where = key(hand.group, "request_body", id=fields["request_id"], nonce=LARGE_NONCE)
        hand.connection.put(where, b"y" * size, ttl_ms=60_000)
    [request_id] = hand.submit(pool, **fields)
    while leases := hand.claim(1):
        hand.settle(leases, outcome=Outcome.LOST)
    [row] = hand.section("request", subject=request_id)["rows"]
    assert row["ending"] == "dead"
    return request_id


def dead(hand: ByHand) -> list[str]:
    """Return the ids in the dead list, the last that died first."""
    return [row["request_id"] for row in hand.section("dead")["rows"]]

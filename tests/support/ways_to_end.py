"""Requests that end in one way after the other."""

from __future__ import annotations

import time
from typing import Any

from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.producing import eye


def end_in_most_ways(hand: ByHand) -> dict[str, str]:
    """Let requests of the pool `default` end in every way that needs no other pool; returns the ending of each."""
    ways: dict[str, str] = {}

    def one(ending: str, pool: str = "default", **fields: Any) -> str:
        [name] = hand.submit(pool, **fields)
        ways[name] = ending
        return name

    for outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED, Outcome.EXPIRED, Outcome.LOST):
        one(outcome.value)
        hand.settle(hand.claim(1), outcome=outcome)
    hand.run(f.request_cancel(one("cancelled"), actor="test"))
    with eye(hand.url) as client:
        client.hset(key(hand.group, "request", id=one("malformed")), "body", "")
        one("producer_gone", producer_id="dead")
        client.delete(key(hand.group, "alive", producer="dead"))
        assert hand.claim(1) == []
        one("reply_dropped", producer_id="dead")
        leases = hand.claim(1)
        client.delete(key(hand.group, "alive", producer="dead"))
        hand.settle(leases)
    one("expired", timeout_ms=1)
    time.sleep(0.01)
    hand.claim(1)
    return ways

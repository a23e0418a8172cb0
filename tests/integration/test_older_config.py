"""A group that an older library configured: what its config does not say has the defaults."""

from __future__ import annotations

import msgspec
import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome, Settlement, Verdict
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.groups import configure, unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

YOUNGER = {
    "group": ("retry_budget_percent", "retry_budget_min_per_s", "hold_max_ms", "dead_kept", "dead_ttl_ms",
              "idempotency_ttl_ms", "max_stream_bytes", "max_stream_backlog_bytes"),
    "pool": ("retry_on", "retry_base_ms", "retry_cap_ms", "on_open"),
    "endpoint": ("breaker_failures", "open_ms", "close_after", "probe_timeout_ms", "gate", "gate_stale_ms"),
}  # fmt: skip


def forget(url: str, name: str, kind: str) -> None:
    """Take the younger fields out of a stored config, as if they had never been there."""
    client = eye(url)
    text = client.hget(name, "config")
    assert text is not None
    packed = not text.startswith(b"{")
    config = msgspec.msgpack.decode(text) if packed else msgspec.json.decode(text)
    for field in YOUNGER[kind]:
        config.pop(field, None)
    client.hset(name, "config", msgspec.msgpack.encode(config) if packed else msgspec.json.encode(config))


@pytest.mark.parametrize("verdict", [Verdict.FAILURE, Verdict.BACKPRESSURE])
def test_a_group_of_an_older_library_works_with_the_defaults(valkey: ValkeyProcess, verdict: Verdict) -> None:
    group = unique_group()
    configure(valkey.url, group)
    forget(valkey.url, key(group, "group"), "group")
    forget(valkey.url, key(group, "pool", pool="default"), "pool")
    forget(valkey.url, key(group, "endpoint", endpoint="default"), "endpoint")
    hand = ByHand(valkey.url, group)
    hand.submit(count=6)
    for lease in hand.claim(6):
        item = Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=Outcome.FAILED, verdict=verdict, hold_ms=90_000,
            error_type="endpoint_overloaded", retryable=True,
        )  # fmt: skip
        hand.run(f.lease_settle("g", "g/1", nonce=lease.request_id, want=0, items=[item]))
    [row] = [row for row in hand.section("endpoints")["rows"] if row["endpoint_id"] == "default"]
    if verdict is Verdict.FAILURE:
        assert row["breaker"] == "open"
    else:
        assert 55_000 < row["blocked_until_ms"] - hand.section("group")["server_ms"] <= 60_000
    assert hand.section("group")["retry_budget"]["allowed_10s"] == 30

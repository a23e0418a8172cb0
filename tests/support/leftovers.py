"""What a fabric group must not keep once nothing waits and nothing runs, seen by an independent client."""

from __future__ import annotations

from collections import Counter
from typing import Any

import redis

from dispatch.fabric.layouts import read_record
from dispatch.fabric.schema import key
from tests.support.producing import eye

_RUNNING = ("in_flight", "queued", "delayed", "kept", "depth", "bytes", "tombstones", "returned", "waiting")
_EMPTY = ("leases", "deadlines", "rotation", "heads", "kept")
# They describe the group and not a request. The streams are bounded in length.
_LASTING = (
    "group",
    "generations",
    "endings",
    "deliveries",
    "events",
    "gateways",
    "published",
    "wake",
    "timers",
    "chores",
)
_FAMILIES = ("pool", "endpoint")


def counters_above_zero(url: str, group: str) -> dict[str, Any]:
    """Return every counter and structure of running and waiting work that is not back to zero."""
    found: dict[str, Any] = {}
    with eye(url) as client:
        for name in _EMPTY:
            found[name] = _size(client, key(group, name))
        records = [(name, one) for name in _FAMILIES for one in _family(client, group, name)]
        for kind, record_key in [("group", key(group, "group")), *records]:
            packed = client.hget(record_key, "record")
            record = read_record(kind, packed) if packed else {}
            found |= {f"{record_key} {name}": record.get(name, 0) for name in _RUNNING}
            found[f"{record_key} levels"] = sum(record.get("levels", ()))
    return {name: value for name, value in found.items() if value != 0}


def keys_without_expiry(url: str, group: str) -> list[str]:
    """Return the keys without a TTL that are none of those that describe the group itself."""
    with eye(url) as client:
        lasting = {key(group, name) for name in _LASTING}
        for name in _FAMILIES:
            lasting |= set(_family(client, group, name))
        names = (name.decode() for name in client.scan_iter(match=f"{{{group}}}:*", count=1000))
        return sorted(name for name in names if name not in lasting and client.ttl(name) == -1)


def endings_by_request(url: str, group: str) -> Counter[str]:
    """Return how often each request that was admitted ended."""
    with eye(url) as client:
        records = [record for _, record in client.xrange(key(group, "endings"))]
    return Counter(one[b"request_id"].decode() for one in records if one[b"ending"] != b"rejected")


def _family(client: redis.Redis, group: str, name: str) -> list[str]:
    pattern = key(group, name, **{name: "*"})
    # Pools and endpoints only: no other key has this beginning and one more part.
    return [found.decode() for found in client.scan_iter(match=pattern, count=1000, _type="hash")]


def _size(client: redis.Redis, name: str) -> int:
    sizes = {b"zset": client.zcard, b"list": client.llen}
    kind = client.type(name)
    return int(sizes[kind](name)) if kind in sizes else 0

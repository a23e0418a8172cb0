"""After a run: wait until nothing waits and nothing runs, then read what is there."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import redis

from dispatch.fabric import audit
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import key
from dispatch.fabric.sync import BlockingConnection
from tests.chaos.evidence import Evidence, Record, Trouble
from tests.chaos.plan import DEFAULT_TIMEOUT_MS, delivery_of
from tests.chaos.world import GROUP, World
from tests.support.leftovers import counters_above_zero, keys_without_expiry
from tests.support.producing import eye

QUIET_S = 40.0
"""How long a group may take after the last call: the longest timeout, a lease, and what a slow machine adds."""

_LOOK_S = 0.25


def wait_for_quiet(url: str) -> float:
    """Wait until the group holds nothing of any request, at most `QUIET_S`; returns how long it took."""
    started = time.monotonic()
    while leftovers(url) and time.monotonic() - started < QUIET_S:
        time.sleep(_LOOK_S)
    return time.monotonic() - started


def leftovers(url: str) -> dict[str, Any]:
    """Return every counter, lease and set of running and waiting work that is not empty."""
    found = counters_above_zero(url, GROUP)
    with eye(url) as client:
        for name in _keys(client, key(GROUP, "holding", gateway="*")):
            if client.type(name) == b"set":
                found[name] = sorted(member.decode() for member in client.smembers(name))
        for timer in client.zrange(key(GROUP, "timers"), 0, -1):
            if timer.startswith(b"retry:"):
                found[f"timer {timer.decode()}"] = "due"
    return found


def gather(world: World, troubles: list[Trouble]) -> Evidence:
    """Read everything there is to know, once the group is quiet."""
    evidence = Evidence(
        delivery=delivery_of(world.plan.mode),
        default_timeout_s=DEFAULT_TIMEOUT_MS / 1000,
        calls=[call for producer in world.producers.values() for call in producer.calls()],
        stalls={name: producer.stalls() for name, producer in world.producers.items()},
        executions=[one for backend in world.backends.values() for one in backend.executions],
        troubles=troubles,
        crashes=[*world.crashes, *(line for gateway in world.gateways.values() for line in gateway.complaints())],
    )
    read_group(world.valkey.url, evidence)
    return evidence


def read_group(url: str, evidence: Evidence) -> None:
    """Add what the group's server says."""
    evidence.leftovers = leftovers(url) | _lasting(url, evidence.delivery)
    with BlockingConnection(url) as connection:
        evidence.audit = [str(difference) for difference in audit.confirmed_differences(connection, GROUP)]
        for row in connection.run(GROUP, fabric_snapshot("pools"))["rows"]:
            evidence.submitted += row["submitted"]
            evidence.counted.update(row.get("endings") or {})
    with eye(url) as client:
        found = [fields for _, fields in client.xrange(key(GROUP, "endings"))]
        evidence.records = [_record(fields) for fields in found if fields[b"ending"] != b"rejected"]
        evidence.states = _states(client)


def counts(evidence: Evidence) -> dict[str, Any]:
    """Return the numbers of a run that are no violations."""
    told = Counter(call.ended.how if call.ended else "died" for call in evidence.calls)
    return {
        "requests": len(evidence.calls),
        "admitted": evidence.submitted,
        "executions": len(evidence.executions),
        "endings": dict(sorted(Counter(record.ending for record in evidence.records).items())),
        "callers": dict(sorted(told.items())),
        "attempts": dict(sorted(Counter(record.attempt for record in evidence.records).items())),
    }


def _lasting(url: str, pools: Iterable[str]) -> dict[str, Any]:
    """Return the keys that no expiry will remove. Tags of idle fairness keys are the pool's, and bounded."""
    tags = {key(GROUP, "idle_flows", pool=pool) for pool in pools}
    return {f"key without expiry {name}": True for name in keys_without_expiry(url, GROUP) if name not in tags}


def _record(fields: dict[bytes, bytes]) -> Record:
    text = defaultdict(str, {name.decode(): value.decode("utf-8", "replace") for name, value in fields.items()})
    envelope = json.loads(text["envelope"]) if text["envelope"] else {}
    return Record(
        request_id=text["request_id"],
        tag=(envelope.get("metadata") or {}).get("tag", ""),
        ending=text["ending"],
        pool=text["pool"],
        attempt=int(text["attempt"]),
        submitted=int(text["submitted_ms"]) / 1000,
        ended=int(text["ended_ms"]) / 1000,
        outcome=text["outcome"],
        gateway=text["gateway"],
        error=text["error_type"],
        tries=len(text["tries"].split(";")) if text["tries"] else 0,
        chunks=int(text["chunks"] or 0),
    )


def _states(client: redis.Redis) -> dict[str, tuple[str, str]]:
    beginning = len(key(GROUP, "request", id=""))
    names = _keys(client, key(GROUP, "request", id="*"))
    found: dict[str, tuple[str, str]] = {}
    for start in range(0, len(names), 500):
        part = names[start : start + 500]
        pipeline = client.pipeline(transaction=False)
        for name in part:
            pipeline.hmget(name, "state", "ending")
        for name, (state, ending) in zip(part, pipeline.execute(), strict=True):
            found[name[beginning:]] = ((state or b"").decode(), (ending or b"").decode())
    return found


def _keys(client: redis.Redis, pattern: str) -> list[str]:
    return sorted(name.decode() for name in client.scan_iter(match=pattern, count=1000))


def as_json(evidence: Evidence) -> bytes:
    """Encode the evidence, to be kept with the logs of a run that failed."""
    return msgspec.json.format(msgspec.json.encode(evidence), indent=1)

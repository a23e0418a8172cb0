"""No call holds up the server, whatever the group's state: each is bounded, and long work is paged.

Times are the processor time of the server's main thread: the machine may take the processor away in the middle of a
call, which is not the call's fault. They are told as those of a usual machine: after each call the server does a fixed
piece of the same kind of work (`REFERENCE`), and a machine that takes k times as long for that may take k times as long
for the call. Between quiet and busy moments of one machine both changed by 1.8, their ratio by less than a tenth. The
typical call of each kind is judged.
"""

from __future__ import annotations

import json
import statistics
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis

from dispatch.fabric import functions as f
from dispatch.fabric.layouts import read_record
from dispatch.fabric.records import Repair
from dispatch.fabric.schema import LIMITS, key
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess

CALL_MS = 5.0
"""The longest that a call may take on a usual machine."""
REFERENCE = """
local record = { name = "reference", depth = 1, bytes = 1024, place = "line", levels = { 0, 1, 0, 0 }, endings = {} }
for at = 1, 200 do
  server.call("HSET", KEYS[1], "record", cmsgpack.pack(record))
  record = cmsgpack.unpack(server.call("HMGET", KEYS[1], "config", "record")[2])
  record.depth = record.depth + #string.format("%.0f|%s", at, record.name)
end
server.call("DEL", KEYS[1])
"""
REFERENCE_MS = 0.9
"""What the reference takes on a usual machine: two virtual processors of a server of 2023, nothing else running."""
CONFIG_FLOORS = 4.0
"""How many times the least that it takes (`FLOOR`: decode the document, read and write each pool) a config that changes
1,000 pools may take: 2.9 to 3.2 in ten runs, 5.8 to 7.2 before. As times that was 26 to 64 ms on a machine whose speed
changes by two."""
FLOOR = """
cjson.decode(ARGV[1])
for at = 0, 998 do
  local pool = string.gsub(KEYS[1], "POOL", "p" .. at)
  server.call("HSET", pool, "record", server.call("HMGET", pool, "config", "record")[2])
end
"""
CONFIGS = 11
DEAD = 20_000
MANY_POOLS = {f"p{at}": {"quantum": 1 + at % 4} for at in range(999)}


class Stopwatch:
    """Reads how long the server's main thread worked on a call (asking costs about 0.1 ms, which is in it)."""

    def __init__(self, server: ValkeyProcess) -> None:
        self.client = redis.Redis(host="127.0.0.1", port=server.port)

    def typical_ms(self, call: Callable[[], Any], times: int) -> float:
        """Make the call so often and return what it typically takes on a usual machine."""
        spent, reference = [], []
        for _ in range(times):
            spent.append(self.ms(call))
            reference.append(self.ms(lambda: self.client.eval(REFERENCE, 1, "{reference}")))
        return statistics.median(spent) / statistics.median(reference) * REFERENCE_MS

    def ms(self, call: Callable[[], Any]) -> float:
        """Make the call once and return what it took here."""
        before = self._worked_s()
        call()
        return (self._worked_s() - before) * 1000

    def _worked_s(self) -> float:
        info: dict[str, Any] = self.client.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])


@pytest.fixture
def server(start_valkey: Callable[..., ValkeyProcess]) -> ValkeyProcess:
    return start_valkey()


@pytest.fixture
def watch(server: ValkeyProcess) -> Iterator[Stopwatch]:
    watch = Stopwatch(server)
    yield watch
    watch.client.close()


def test_many_dead_heads_are_ended_in_bounded_steps(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, {"default": {}})
    fleet.submit("default", [1] * DEAD)
    watch.client.delete(key(fleet.group, "alive", producer="p"))
    claim = f.lease_claim("g", "g/d", nonce=uuid.uuid4().hex, want=8)
    assert fleet.connection.run(fleet.group, claim).again
    assert watch.typical_ms(lambda: fleet.claim(8), DEAD // 64 - 2) < CALL_MS
    while fleet.connection.run(fleet.group, f.lease_claim("g", "g/d", nonce=uuid.uuid4().hex, want=8)).again:
        pass
    assert fleet.connection.run(fleet.group, f.fabric_snapshot("group"))["pending"] == 0
    fleet.close()


def test_many_passed_deadlines_are_reaped_in_bounded_steps(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, {"default": {"default_timeout_ms": 1, "max_timeout_ms": 1}})
    fleet.submit("default", [1] * 4_000)
    reap = f.lease_reap(limit=LIMITS["reap_max"])
    assert watch.typical_ms(lambda: fleet.connection.run(fleet.group, reap), 4_000 // LIMITS["reap_max"]) < CALL_MS
    fleet.connection.run(fleet.group, reap)
    assert fleet.connection.run(fleet.group, f.fabric_snapshot("group"))["pending"] == 0
    fleet.close()


def test_the_largest_settle_and_claim(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, {"default": {}}, slots=1_000)
    fleet.submit("default", [1] * 1_000)
    held = list(fleet.claim(LIMITS["claim_max"]))

    def turn() -> None:
        held[:] = fleet.settle(held, want=LIMITS["claim_max"])
        assert len(held) == LIMITS["settle_max"]

    assert watch.typical_ms(turn, 9) < CALL_MS
    fleet.close()


def test_a_thousand_pools_are_read_in_pages(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, MANY_POOLS)
    for pool in list(MANY_POOLS)[:200]:
        fleet.submit(pool, [1] * 5)
    fleet.claim(8)
    run = fleet.connection.run
    for section in ("group", "config", "pools", "endpoints", "gateways", "leases"):
        assert watch.typical_ms(lambda name=section: run(fleet.group, f.fabric_snapshot(name, limit=100)), 9) < CALL_MS
    for part in ("group", "pools", "endpoints", "leases"):
        assert watch.typical_ms(lambda name=part: run(fleet.group, f.fabric_audit(name, limit=100)), 9) < CALL_MS
    fleet.close()


def test_a_deep_pool_is_read_in_pages(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, {"default": {}})
    fleet.submit("default", [1] * 1_000)
    deepen(watch.client, fleet.group, 1_000_000)
    run = fleet.connection.run
    for cursor in ("", "500000", "999000"):
        read = f.fabric_audit("entries", cursor=cursor, limit=200, subject="default")
        assert watch.typical_ms(lambda call=read: run(fleet.group, call), 9) < CALL_MS
    waiting = f.fabric_snapshot("waiting", limit=100, subject="default")
    assert watch.typical_ms(lambda: run(fleet.group, waiting), 9) < CALL_MS
    assert watch.typical_ms(lambda: fleet.claim(1), 9) < CALL_MS
    repair = f.fabric_repair(Repair("placement", "default"), actor="test")
    assert watch.typical_ms(lambda: run(fleet.group, repair), 3) < CALL_MS
    fleet.close()


def test_ten_thousand_keys_cost_no_more_than_a_page(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, {"default": {}})
    for number in range(2_000):
        fleet.submit("default", [1], fairness_key=f"k{number}")
    run = fleet.connection.run
    waiting = f.fabric_snapshot("waiting", limit=100, subject="default")
    assert watch.typical_ms(lambda: run(fleet.group, waiting), 9) < CALL_MS
    assert watch.typical_ms(lambda: fleet.claim(1), 9) < CALL_MS
    fleet.close()


def test_a_config_that_changes_a_thousand_pools(server: ValkeyProcess, watch: Stopwatch) -> None:
    fleet = Fleet(server.url, MANY_POOLS)
    for pool in list(MANY_POOLS)[:300]:
        fleet.submit(pool, [1])
    shown = fleet.connection.run(fleet.group, f.fabric_snapshot("config"))
    document, generation = shown["document"], shown["generation"]
    names, times, floors = key(fleet.group, "pool", pool="POOL"), [], []
    for turn in range(CONFIGS):
        for pool in document["pools"]:
            pool["quantum"] += 1
        text = json.dumps(document).encode()
        apply = f.group_configure(
            text, expected_generation=generation + turn, actor="test", reason="", nonce=uuid.uuid4().hex
        )
        floors.append(watch.ms(lambda text=text: watch.client.eval(FLOOR, 1, names, text)))
        times.append(watch.ms(lambda call=apply: fleet.connection.run(fleet.group, call)))
    assert fleet.connection.run(fleet.group, f.fabric_snapshot("group"))["generation"] == generation + CONFIGS
    assert statistics.median(times) < CONFIG_FLOORS * statistics.median(floors)
    fleet.close()


def deepen(client: redis.Redis, group: str, count: int) -> None:
    """Make the pool's list longer, without requests behind the entries: only its length matters here."""
    waiting = key(group, "requests", pool="default")
    for _ in range(0, count, 10_000):
        client.rpush(waiting, *[f"1|{10_000_000 + at}|1|9999999999999|2|none" for at in range(10_000)])
    name = key(group, "pool", pool="default")
    record = read_record("pool", client.hget(name, "record"))
    record["depth"] += count
    record["levels"][1] += count
    client.hset(name, "record", msgspec.msgpack.encode(record))

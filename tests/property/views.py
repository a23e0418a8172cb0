"""What a group looks like on the server and in the twin, as plain data that must be equal after every step."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import redis

from dispatch.contract import Attempt
from dispatch.fabric.frames import decode_frame
from dispatch.fabric.layouts import read_record
from dispatch.fabric.schema import key
from tests.model import line, retries
from tests.model.flows import SHARED
from tests.model.records import USUAL_LEVEL, Endpoint, Group, Pool, Request, Told

View = dict[str, Any]

_LASTING = re.compile(
    r"hash:llm:group|zset:llm:flows:[^:]+:idle|hash:llm:(pool|endpoint):[^:]+|list:llm:(kept|wake)|stream:llm:[a-z]+"
    r"|set:llm:gateways|zset:llm:(timers|chores)"
)
_POOL_FIELDS = ("deficit", "open", "launches", "place", "submitted", "launched", "cost_served")
_RECORD_FIELDS = ("depth", "bytes", "tombstones", "in_flight", "delayed", *_POOL_FIELDS)
_BUDGET = ("start", "first", "first_before", "retries", "retries_before")


class ServerEye:
    """Reads everything a group has stored, past the function library."""

    def __init__(self, port: int, group: str) -> None:
        self.client = redis.Redis(host="127.0.0.1", port=port)
        self._group = group

    def key(self, name: str, **parts: str) -> str:
        return key(self._group, name, **parts)

    def record(self, key_: str) -> View:
        """Read the packed record of a hash."""
        return read_record(key_.split(":")[3], self.client.hget(key_, "record"))

    def change(self, key_: str, fields: View) -> None:
        """Overwrite fields of the packed record of a hash."""
        record = self.record(key_) | fields
        tables = {name: {} for name, value in record.items() if value == []}  # an empty Lua table comes as a list
        self.client.hset(key_, "record", msgspec.msgpack.encode(record | tables))

    def _list_key(self, pool: str, flow: str, level: int) -> str:
        if (flow, level) == (SHARED, USUAL_LEVEL):
            return self.key("requests", pool=pool)
        return self.key("flow", pool=pool, flow=flow, level=str(level))

    def immortal_keys(self) -> list[str]:
        """Return keys that no expiry bounds, but those that belong to the group, its pools and its endpoints."""
        found = []
        for name in self.client.scan_iter(match="{" + self._group + "}*", count=10_000):
            kind = name.decode().partition("}:")[2]
            if not _LASTING.fullmatch(kind) and self.client.ttl(name) == -1:
                found.append(kind)
        return found

    def view(self, twin: Group, gateways: Iterable[str]) -> View:
        """Read the group. The twin says only which names to look for."""
        pools, endpoints, gateways = list(twin.pools), list(twin.endpoints), list(gateways)
        requests, producers = list(twin.requests), list(twin.alive)
        pipe = self.client.pipeline(transaction=True)
        pipe.hmget(self.key("group"), "record", "config", "generation")
        for name in ("rotation", "heads", "leases", "deadlines", "timers", "chores", "dead"):
            pipe.zrange(self.key(name), 0, -1, withscores=True)
        pipe.lrange(self.key("kept"), 0, -1)
        pipe.xrange(self.key("endings"))
        pipe.xrange(self.key("events"))
        pipe.llen(self.key("wake"))
        for pool in pools:
            pipe.hget(self.key("pool", pool=pool), "record")
            pipe.zcard(self.key("returned", pool=pool))
            pipe.zrange(self.key("flows", pool=pool), 0, -1, withscores=True)
            pipe.zrange(self.key("idle_flows", pool=pool), 0, -1, withscores=True)
            for flow, level in _lists(twin.pools[pool]):
                pipe.llen(self._list_key(pool, flow, level))
        for endpoint in endpoints:
            pipe.hget(self.key("endpoint", endpoint=endpoint), "record")
            pipe.zrange(self.key("waiting", endpoint=endpoint), 0, -1)
        for gateway in gateways:
            pipe.smembers(self.key("holding", gateway=gateway))
        for request in requests:
            pipe.hmget(self.key("request", id=request), "state", "record", "ending")
        kept = sorted({*requests, *twin.results})
        for request in kept:
            pipe.get(self.key("result", id=request))
        for producer in producers:
            pipe.lrange(self.key("replies", producer=producer), 0, -1)
        answers = iter(pipe.execute())
        record, config, generation = next(answers)
        fifo = msgspec.msgpack.decode(config)["policy"] == "fifo"
        rotation, heads, leases, deadlines, self.timers, chores, dead = (_scores(next(answers)) for _ in range(7))
        group = read_record("group", record)
        view: View = {
            "group": _group_view(group, int(generation)),
            "line": heads if fifo else rotation,
            "other line": rotation if fifo else heads,
            "leases": leases,
            "deadlines": deadlines,
            "retries": {name: due for name, due in self.timers.items() if name.startswith("retry:")},
            "chores": chores,
            "dead": dead,
            "kept": [name.decode() for name in next(answers)],
            "ended": [_ending(fields) for _, fields in next(answers) if fields[b"ending"] != b"rejected"],
            "moves": [move for _, fields in next(answers) if (move := _move(fields))],
        }
        self.tokens = next(answers)
        view["pools"] = {}
        for name in pools:
            packed, returned, tags, idle = (next(answers) for _ in range(4))
            lists = {listed: next(answers) for listed in _lists(twin.pools[name])}
            record = read_record("pool", packed)
            assert (
                sum(lists.values()) + returned
                == record["depth"] + record["tombstones"]
                == sum(record["levels"]) + returned
            )
            view["pools"][name] = _pool_record(record) | {
                "returned": returned,
                "lists": lists,
                "tags": _scores(tags),
                "idle_tags": _scores(idle),
            }
        view["endpoints"] = {name: _endpoint_record(next(answers), next(answers)) for name in endpoints}
        view["holding"] = {name: {member.decode() for member in next(answers)} for name in gateways}
        view["requests"] = {name: _request_view(next(answers)) for name in requests}
        results = {name: next(answers) for name in kept}
        view["results"] = {name: _told(frame) for name, frame in results.items() if frame}
        view["told"] = {name: [_told(frame) for frame in next(answers)] for name in producers}
        _check_counts(view, group)
        assert not self.timers or group["next_timer"] <= min(self.timers.values())
        return view


def _scores(found: list[tuple[bytes, float]]) -> dict[str, int]:
    return {name.decode(): int(score) for name, score in found}


def _group_view(record: View, generation: int) -> View:
    view = {name: record.get(name) for name in ("seq", "turn", "round", "fence", "frame", "queued", "in_flight")}
    return view | {
        "generation": generation,
        "pass": (record.get("pass_limit"), record.get("pass_visits"), set(record.get("pass_held", ()))),
        "sleepers": set(record.get("sleepers", ())),
        "last_beat_ms": record["last_beat"],
        "grace_until_ms": record["grace_until"],
        "delayed": record["delayed"],
        "budget": [record[f"budget_{name}"] for name in _BUDGET],
    }


def _lists(pool: Pool) -> dict[tuple[str, int], int]:
    """Count the entries that should stand in each list of the pool; its plain one is always looked at."""
    return {(SHARED, USUAL_LEVEL): 0} | Counter((entry.flow, entry.level) for entry in pool.waiting)


def _pool_record(record: View) -> View:
    view = {name: record[name] for name in _RECORD_FIELDS}
    for counter in ("endings", "rejected", "skips"):
        view[counter] = record[counter] or {}
    return view | {
        "mark": record["mark"] if record["place"] == "line" else None,
        "turn": record.get("turn"),
        "state": "paused" if record.get("paused") else "draining" if record.get("draining") else "active",
        "keyed": record.get("keyed") or False,
        "virtual_time": record.get("virtual_time") or 0,
        "parked": record.get("parked") or "",
        "reason": record.get("reason") or "",
    }


def _endpoint_record(packed: bytes | None, waiting: list[bytes]) -> View:
    record = msgspec.msgpack.decode(packed) if packed else {"in_flight": 0, "attempts": 0, "failures": 0, "waiting": 0}
    assert record["waiting"] == len(waiting)
    view = {name: record[name] for name in ("in_flight", "attempts", "failures")}
    return view | {
        "holder": record.get("holder") or "",
        "last_error": record.get("last_error") or "",
        "waiting": [name.decode() for name in waiting],
        "breaker": record.get("breaker") or "closed",
        "in_a_row": record.get("in_a_row") or 0,
        "open_until": record.get("open_until") or 0,
        "good": record.get("good") or 0,
        "probe": _cells(record.get("probe"), "id", "fence", "gateway", "until_ms"),
        "hold_until": record.get("hold_until") or 0,
        "sample": _cells(record.get("gate"), "waiting", "token_ms", "at", "launched"),
        "sampling": record.get("sampling"),
    }


def _cells(found: View | None, *names: str) -> tuple[Any, ...] | None:
    return tuple(found.get(name) for name in names) if found else None


def _request_view(found: list[bytes | None]) -> View | None:
    if found[0] is None:
        return None
    state, ending = found[0].decode(), (found[2] or b"").decode()
    record = read_record("request", found[1] or b"")
    view = {"state": state, "ending": ending, "attempt": record["attempt"], "pool": record["pool"]}
    if state == "leased":
        view |= {name: record[name] for name in ("fence", "gateway", "endpoint")}
        view["probe_until"] = record.get("probe_until") or 0
    return view | ({"retry_ms": record["due_ms"]} if state == "delayed" else {})


def _ending(fields: dict[bytes, bytes]) -> View:
    names = ("request_id", "ending", "outcome", "pool", "gateway", "attempt", "tries")
    return {name: fields.get(name.encode(), b"").decode() for name in names}


def _move(fields: dict[bytes, bytes]) -> tuple[str, ...] | None:
    names = (b"endpoint", b"from", b"to")
    return tuple(fields[name].decode() for name in names) if fields[b"kind"] == b"breaker" else None


def _told(raw: bytes) -> tuple[Any, ...]:
    if (cells := raw.partition(b"\n")[0].decode().split("|"))[2] == "chunks":
        return int(cells[1]), cells[3], cells[2], int(cells[4]), ()
    frame = decode_frame(raw)
    return frame.sequence, frame.reply.request_id, frame.reply.ending, frame.reply.attempt, frame.reply.tries


def _check_counts(view: View, group: View) -> None:
    """Hold the server's counters against its own ground truth: in-flight numbers are numbers of leases."""
    running = [request for request in view["requests"].values() if request and request["state"] == "leased"]
    assert group["in_flight"] == len(view["leases"]) == len(running)
    for name, pool in view["pools"].items():
        assert pool["in_flight"] == sum(request["pool"] == name for request in running), name
    for name, endpoint in view["endpoints"].items():
        assert endpoint["in_flight"] == sum(request["endpoint"] == name for request in running), name
    assert group["queued"] == sum(pool["depth"] for pool in view["pools"].values())
    assert group["delayed"] == sum(pool["delayed"] for pool in view["pools"].values()) == len(view["retries"])
    assert set(view["line"]) == {name for name, pool in view["pools"].items() if pool["place"] == "line"}
    assert group["kept"] == len(view["kept"])


def twin_view(group: Group, gateways: Iterable[str]) -> View:
    """Return what the twin says the server has stored."""
    in_line = {name: line.rank(group, pool)[0] for name, pool in group.pools.items() if pool.place == "line"}
    return {
        "group": {
            "seq": group.seq, "turn": group.turn, "round": group.round, "fence": group.fence, "frame": group.frame,
            "queued": group.queued, "in_flight": len(group.leases), "generation": group.generation,
            "pass": (group.pass_limit, group.pass_visits, set(group.pass_held)), "sleepers": group.sleepers,
            "last_beat_ms": group.last_beat_ms, "grace_until_ms": group.grace_until_ms,
            "delayed": len(group.delayed()), "budget": retries.counts(group),
        },
        "line": in_line,
        "other line": {},
        "leases": group.leases,
        "deadlines": {r.id: r.due_ms for r in group.requests.values() if r.due_ms is not None},
        "retries": {f"retry:{r.id}": r.retry_ms for r in group.delayed()},
        "chores": group.chores,
        "dead": group.dead,
        "kept": group.kept,
        "moves": [(move.endpoint, move.before, move.after) for move in group.moves],
        "ended": [
            {
                "request_id": e.request_id, "ending": e.ending, "outcome": e.outcome, "pool": e.pool,
                "gateway": e.gateway, "attempt": str(e.attempt), "tries": ";".join(_try_text(one) for one in e.tries),
            }
            for e in group.ended
        ],
        "pools": {name: _pool_view(group, pool) for name, pool in group.pools.items()},
        "endpoints": {name: _endpoint_view(group, endpoint) for name, endpoint in group.endpoints.items()},
        "holding": {name: {r.id for r in group.leased() if r.gateway == name} for name in gateways},
        "requests": {
            name: {"state": r.state, "ending": r.ending, "attempt": r.attempt, "pool": r.pool_id}
            | (_lease_view(r) if r.state == "leased" else {})
            | ({"retry_ms": r.retry_ms} if r.state == "delayed" else {})
            for name, r in group.requests.items()
        },
        "results": {name: _frame(told) for name, told in group.results.items()},
        "told": {name: [_frame(told) for told in group.told.get(name, [])] for name in group.alive},
    }  # fmt: skip


def _frame(told: Told) -> tuple[Any, ...]:
    return told.sequence, told.request_id, told.ending, told.attempt, told.tries


def _lease_view(request: Request) -> View:
    names = {"fence": request.fence, "gateway": request.gateway, "endpoint": request.endpoint}
    return names | {"probe_until": request.probe_until_ms}


def _try_text(one: Attempt) -> str:
    status = "" if one.status is None else str(one.status)
    cells = (one.number, one.claimed_ms, one.ended_ms, status, one.error_type, one.gateway_id, one.endpoint_id)
    return ",".join(str(cell) for cell in cells)


def _pool_view(group: Group, pool: Pool) -> View:
    view = {name: getattr(pool, name) for name in _POOL_FIELDS}
    return view | {
        "depth": len(pool.live),
        "bytes": sum(request.bytes for request in pool.live),
        "tombstones": pool.tombstones,
        "in_flight": group.pool_in_flight(pool.name),
        "delayed": len(group.delayed(pool.name)),
        "endings": dict(pool.endings),
        "rejected": dict(pool.rejected),
        "skips": dict(pool.skips),
        "mark": pool.mark if pool.place == "line" else None,
        "turn": pool.turn,
        "state": pool.state,
        "keyed": pool.keyed,
        "virtual_time": pool.virtual_time,
        "returned": len(pool.returned),
        "lists": _lists(pool),
        "tags": pool.tags,
        "idle_tags": pool.idle_tags,
        "parked": pool.parked,
        "reason": pool.reason,
    }


def _endpoint_view(group: Group, endpoint: Endpoint) -> View:
    waiting = [p for p in group.pools.values() if p.on_endpoint and p.settings.endpoint == endpoint.name]
    waiting.sort(key=lambda pool: (not line.below_minimum(group, pool), line.rank(group, pool)))
    return {
        "in_flight": group.endpoint_in_flight(endpoint.name),
        "attempts": endpoint.attempts,
        "failures": endpoint.failures,
        "holder": endpoint.holder,
        "last_error": endpoint.last_error,
        "waiting": [pool.name for pool in waiting],
        "breaker": endpoint.breaker,
        "in_a_row": endpoint.in_a_row,
        "open_until": endpoint.open_until_ms,
        "good": endpoint.good,
        "probe": dataclasses.astuple(endpoint.probe) if endpoint.probe else None,
        "hold_until": endpoint.hold_until_ms,
        "sample": dataclasses.astuple(endpoint.sample) if endpoint.sample else None,
        "sampling": endpoint.sampling,
    }


def differences(server: View, twin: View, path: str = "") -> list[str]:
    """Return where two views differ, one line each."""
    if server == twin:
        return []
    if isinstance(server, dict) and isinstance(twin, dict):
        found = []
        for name in sorted({*server, *twin}, key=str):
            found += differences(server.get(name), twin.get(name), f"{path}.{name}" if path else str(name))
        return found
    return [f"{path}: server {server!r}, twin {twin!r}"]

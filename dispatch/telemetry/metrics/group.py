"""The group's state as metrics. What was not read is left out; where the state says "none", that is 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dispatch.fabric.schema import ENDINGS, document
from dispatch.telemetry.metrics import catalogue as c
from dispatch.telemetry.metrics.catalogue import Family
from dispatch.telemetry.metrics.reading import SECTIONS, Look
from dispatch.telemetry.metrics.tallies import Labels, Reading

Row = Mapping[str, Any]

REFUSALS: tuple[str, ...] = tuple(document()["refusals"])
SKIPS: tuple[str, ...] = tuple(document()["skips"]["reasons"])
DROPPED = ("expired", "lost", "dead", "malformed", "producer_gone", "reply_dropped")
BREAKER_STATES = ("closed", "open", "half_open")
GATE_STATES = ("open", "closed", "stale")
POOL_STATES = ("enabled", "paused", "draining", "disabled")

_GROUP = (
    (c.GROUP_PENDING, "pending"), (c.GROUP_IN_FLIGHT, "in_flight"), (c.GROUP_LIMIT, "total_concurrent_dispatch"),
    (c.GROUP_QUEUE_LIMIT, "max_queued"), (c.GROUP_DELAYED, "delayed"), (c.GROUP_DEAD, "dead"),
    (c.GROUP_GENERATION, "generation"), (c.GROUP_SLEEPING, "sleeping_gateways"),
)  # fmt: skip
_POOL = (
    (c.PENDING, "pending"), (c.PENDING_BYTES, "pending_bytes"), (c.IN_FLIGHT, "in_flight"), (c.DELAYED, "delayed"),
    (c.DEFICIT, "deficit"), (c.HEAD_COST, "head_cost"), (c.QUANTUM, "quantum"), (c.MAX_CONCURRENT, "max_concurrent"),
    (c.MIN_CONCURRENT, "min_concurrent"), (c.QUEUE_LIMIT, "max_queue_depth"), (c.ADMITTED, "submitted"),
    (c.LAUNCHED, "launched"), (c.COST_SERVED, "cost_served"),
)  # fmt: skip
_ENDPOINT = (
    (c.ENDPOINT_IN_FLIGHT, "in_flight"), (c.ENDPOINT_LIMIT, "max_concurrent"), (c.ENDPOINT_WAITING, "waiting_pools"),
    (c.ATTEMPTS, "attempts"), (c.FAILURES, "failures"), (c.IN_A_ROW, "failures_in_a_row"),
)  # fmt: skip
_GATE = ((c.GATE_VALUE, "waiting", 1), (c.GATE_TARGET, "target", 1), (c.GATE_TOKEN, "token_ms", 1000),
         (c.GATE_AGE, "age_ms", 1000))  # fmt: skip


class _Table:
    """Values by family, as they are found."""

    def __init__(self) -> None:
        self.values: dict[Family, dict[Labels, float]] = {}

    def put(self, family: Family, value: float | bool | None, *labels: str) -> None:
        """Note a value; None = it is not known."""
        if value is not None:
            self.values.setdefault(family, {})[labels] = value

    def put_words(self, family: Family, counts: Mapping[str, float], words: Iterable[str], *labels: str) -> None:
        """Note counts by word. The state has none of what was never counted: that is 0."""
        for word in words:
            self.put(family, counts.get(word, 0), *labels, word)

    def put_state(self, family: Family, state: str, states: Iterable[str], *labels: str) -> None:
        """Note which of the states it is."""
        for each in states:
            self.put(family, int(each == state), *labels, each)


def read_group(look: Look, age_s: float) -> Iterator[Reading]:
    """Return what `look` says, as metrics. Whatever it does not know is missing."""
    table = _Table()
    for section in SECTIONS:
        table.put(c.GROUP_UP, int(look.has(section)), section)
        if look.has(section):
            table.put(c.GROUP_TRUNCATED, int(section in look.truncated), section)
    if any(look.has(section) for section in SECTIONS):
        table.put(c.GROUP_AGE, age_s)
    if look.group is not None:
        for family, name in _GROUP:
            table.put(family, look.group.get(name))
        budget = look.group.get("retry_budget") or {}
        for kind in ("first_attempts", "retries", "allowed"):
            table.put(c.GROUP_RETRIES, budget.get(f"{kind}_10s"), kind)
    for row in look.rows.get("pools", ()):
        _pool(table, row, look.server_ms)
    for row in look.rows.get("endpoints", ()):
        _endpoint(table, row, look.server_ms)
    if "gateways" in look.rows:
        _gateways(table, look.rows["gateways"])
    yield from table.values.items()


def _pool(table: _Table, row: Row, server_ms: int) -> None:
    pool = row["pool_id"]
    for family, name in _POOL:
        table.put(family, row.get(name), pool)
    table.put_state(c.POOL_STATE, _pool_state(row), POOL_STATES, pool)
    submitted_ms, reason = row.get("head_submitted_ms"), row.get("block_reason")
    if row.get("pending") == 0:
        table.put(c.OLDEST_AGE, 0, pool)
    elif submitted_ms is not None:
        table.put(c.OLDEST_AGE, max(0, server_ms - submitted_ms) / 1000, pool)
    if reason and row.get("pending"):
        table.put(c.BLOCKED, max(0, server_ms - row.get("block_since_ms", server_ms)) / 1000, pool, reason)
    ended = row.get("endings") or {}
    table.put_words(c.ENDINGS, ended, ENDINGS, pool)
    table.put_words(c.DROPS, ended, DROPPED, pool)
    table.put_words(c.REFUSED, row.get("rejected") or {}, REFUSALS, pool)
    table.put_words(c.SKIPS, row.get("skips") or {}, SKIPS, pool)


def _pool_state(row: Row) -> str:
    if not row.get("enabled", True):
        return "disabled"
    if row.get("draining"):
        return "draining"
    return "paused" if row.get("paused") else "enabled"


def _endpoint(table: _Table, row: Row, server_ms: int) -> None:
    endpoint = row["endpoint_id"]
    for family, name in _ENDPOINT:
        table.put(family, row.get(name), endpoint)
    if row.get("breaker"):
        table.put_state(c.BREAKER, row["breaker"], BREAKER_STATES, endpoint)
    table.put(c.HELD, max(0, (row.get("hold_until_ms") or server_ms) - server_ms) / 1000, endpoint)
    gate = row.get("gate")
    if gate:
        table.put_state(c.GATE, _gate_state(gate), GATE_STATES, endpoint)
        for family, name, scale in _GATE:
            value = gate.get(name)
            table.put(family, None if value is None else value / scale, endpoint)


def _gate_state(gate: Row) -> str:
    if gate.get("stale"):
        return "stale"
    waiting, token_ms, limit_ms = gate.get("waiting"), gate.get("token_ms"), gate.get("token_limit_ms")
    full = waiting is not None and waiting + (gate.get("launched_since") or 0) >= gate["target"]
    slow = token_ms is not None and limit_ms is not None and token_ms > limit_ms
    return "closed" if full or slow else "open"


def _gateways(table: _Table, rows: list[dict[str, Any]]) -> None:
    draining = sum(bool(row.get("draining")) for row in rows)
    table.put(c.GROUP_GATEWAYS, len(rows) - draining, "active")
    table.put(c.GROUP_GATEWAYS, draining, "draining")
    table.put(c.GROUP_SLOTS, sum(row.get("slots") or 0 for row in rows))

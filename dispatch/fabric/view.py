"""A fabric group's state as frozen records, assembled from the sections of `fabric_snapshot`.

What could not be read, or is not known, is None, never 0; a section that was refused stands in `FabricView.unknown`
with the reason, one that was longer than was asked for in `truncated`. Times are milliseconds of the server's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dispatch.errors import DispatchError, GroupUnknown
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import LIMITS

_PAGE = LIMITS["snapshot_page_max"]

Calls = list[FunctionCall[Any]]
Answers = list[Any]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all rows: members that a row does not have are None or empty."""


class Note(Row, frozen=True, kw_only=True):
    """Who did something, when and why."""

    by: str = ""
    at_ms: int | None = None
    reason: str = ""


class ReaderRow(Row, frozen=True, kw_only=True):
    """One who takes the endings to a history: how many are left (None = the server cannot tell), and how far it is.

    `taken` were handed to it and are not confirmed, the oldest of them ended at `oldest_taken_ms`.
    """

    name: str
    consumers: int | None = None
    lag: int | None = None
    last_ms: int | None = None
    taken: int | None = None
    oldest_taken_ms: int | None = None


class GroupRow(Row, frozen=True, kw_only=True):
    """Totals and bounds of the group. `readers` None = not known, empty = nothing takes the endings."""

    server_ms: int
    generation: int | None = None
    policy: str | None = None
    total_concurrent_dispatch: int | None = None
    max_queued: int | None = None
    cost_max: int | None = None
    lease_ms: int | None = None
    pending: int | None = None
    in_flight: int | None = None
    delayed: int | None = None
    dead: int | None = None
    pools: int | None = None
    last_beat_ms: int | None = None
    readers: tuple[ReaderRow, ...] | None = None


class PoolRow(Row, frozen=True, kw_only=True):
    """One pool: bounds, what waits and runs, counters since the pool was made, and what holds it up."""

    pool_id: str
    quantum: int | None = None
    enabled: bool | None = None
    min_concurrent: int | None = None
    max_concurrent: int | None = None
    endpoint_id: str | None = None
    delivery: str | None = None
    max_queue_depth: int | None = None
    max_queue_bytes: int | None = None
    pending: int | None = None
    pending_bytes: int | None = None
    delayed: int | None = None
    in_flight: int | None = None
    deficit: int | None = None
    place: str | None = None
    submitted: int | None = None
    launched: int | None = None
    cost_served: int | None = None
    head_cost: int | None = None
    head_submitted_ms: int | None = None
    block_reason: str | None = None
    block_since_ms: int | None = None
    paused: Note | None = None
    draining: Note | None = None
    endings: Mapping[str, int] = msgspec.field(default_factory=dict)
    rejected: Mapping[str, int] = msgspec.field(default_factory=dict)
    skips: Mapping[str, int] = msgspec.field(default_factory=dict)


class ProbeRow(Row, frozen=True, kw_only=True):
    """The breaker's probe that is under way."""

    request_id: str | None = None
    gateway_id: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class GateRow(Row, frozen=True, kw_only=True):
    """The gate of an endpoint and its last sample."""

    engine: str | None = None
    target: int | None = None
    token_limit_ms: int | None = None
    fail: str | None = None
    stale_after_ms: int | None = None
    waiting: float | None = None
    token_ms: float | None = None
    sampled_ms: int | None = None
    launched_since: int | None = None
    stale: bool | None = None


class EndpointRow(Row, frozen=True, kw_only=True):
    """One endpoint. `gate` None = it has none; `breaker` None = it is not configured any more."""

    endpoint_id: str
    url: str | None = None
    max_concurrent: int | None = None
    in_flight: int | None = None
    waiting_pools: int | None = None
    attempts: int | None = None
    failures: int | None = None
    last_error_type: str | None = None
    last_error_ms: int | None = None
    hold_until_ms: int | None = None
    block_reason: str | None = None
    blocked_until_ms: int | None = None
    breaker: str | None = None
    breaker_since_ms: int | None = None
    breaker_failures: int | None = None
    failures_in_a_row: int | None = None
    open_until_ms: int | None = None
    next_probe_ms: int | None = None
    good_probes: int | None = None
    close_after: int | None = None
    probe: ProbeRow | None = None
    gate: GateRow | None = None


class GatewayRow(Row, frozen=True, kw_only=True):
    """One registered gateway."""

    gateway_id: str
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    slots: int | None = None
    started_ms: int | None = None
    beat_ms: int | None = None
    draining: bool | None = None
    in_flight: int | None = None


class RequestRow(Row, frozen=True, kw_only=True):
    """One request that has not ended."""

    request_id: str
    state: str | None = None
    pool_id: str | None = None
    producer_id: str | None = None
    model: str | None = None
    cost: int | None = None
    attempt: int | None = None
    submitted_ms: int | None = None
    deadline_ms: int | None = None
    claimed_ms: int | None = None
    lease_until_ms: int | None = None
    gateway_id: str | None = None
    endpoint_id: str | None = None
    cancel_asked_by: str | None = None
    chunks: int | None = None
    first_chunk_ms: int | None = None


class EndingRow(Row, frozen=True, kw_only=True):
    """One request that ended."""

    record_id: str
    request_id: str | None = None
    ending: str | None = None
    outcome: str | None = None
    pool: str | None = None
    producer: str | None = None
    gateway: str | None = None
    endpoint: str | None = None
    error_type: str | None = None
    status: int | None = None
    attempt: int | None = None
    submitted_ms: int | None = None
    claimed_ms: int | None = None
    ended_ms: int | None = None


class EventRow(Row, frozen=True, kw_only=True):
    """One thing that changed: what `facts` says depends on its kind."""

    event_id: str
    kind: str | None = None
    at_ms: int | None = None
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)


class FabricView(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a group (the sections are read one after the other). A section that is not known is None.

    `running` is as many leases as were asked for, the one that runs longest first; `endings` and `events` are the
    newest, newest first. `read_ms` is this machine's clock when the first answer came, `server_ms` the server's then.
    """

    name: str
    server_ms: int
    read_ms: int
    group: GroupRow | None = None
    pools: tuple[PoolRow, ...] | None = None
    endpoints: tuple[EndpointRow, ...] | None = None
    gateways: tuple[GatewayRow, ...] | None = None
    running: tuple[RequestRow, ...] | None = None
    endings: tuple[EndingRow, ...] | None = None
    events: tuple[EventRow, ...] | None = None
    truncated: frozenset[str] = frozenset()
    unknown: Mapping[str, str] = msgspec.field(default_factory=dict)

    def pool(self, pool_id: str | None) -> PoolRow | None:
        """Return the pool, or None when it is not known."""
        return next((row for row in self.pools or () if row.pool_id == pool_id), None)

    def endpoint(self, endpoint_id: str | None) -> EndpointRow | None:
        """Return the endpoint, or None when it is not known."""
        return next((row for row in self.endpoints or () if row.endpoint_id == endpoint_id), None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many rows of each section are read at most; 0 = the section is left out, and None in the view."""

    pools: int = LIMITS["pools_max"]
    endpoints: int = LIMITS["pools_max"]
    gateways: int = 1_000
    running: int = 1_000
    endings: int = 200
    events: int = 50


EVERYTHING = Wanted()

_SECTIONS: tuple[tuple[str, str, str], ...] = (
    ("pools", "pools", "pool_id"),
    ("endpoints", "endpoints", "endpoint_id"),
    ("gateways", "gateways", "gateway_id"),
    ("running", "leases", "request_id"),
    ("endings", "endings", "record_id"),
    ("events", "events", "event_id"),
)
"""Member of a view, section of the snapshot, and the member that names a row."""

_ROWS: dict[str, type[Row]] = {
    "pools": PoolRow,
    "endpoints": EndpointRow,
    "gateways": GatewayRow,
    "running": RequestRow,
    "endings": EndingRow,
    "events": EventRow,
}


@dataclass(slots=True)
class _Part:
    """What has been read of one section."""

    member: str
    section: str
    key: str
    most: int
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    cursor: str = ""
    problem: str = ""
    ended: bool = False

    def call(self) -> FunctionCall[Any]:
        return fabric_snapshot(self.section, cursor=self.cursor, limit=min(_PAGE, self.most - len(self.rows)))

    def take(self, answer: Any) -> None:
        """Take in a page. A list may shift between two pages: a row that comes twice counts once."""
        if isinstance(answer, DispatchError):
            self.problem, self.ended = str(answer), True
            return
        self.rows.update((row[self.key], row) for row in answer["rows"])
        self.cursor = answer["cursor"]
        self.ended = not self.cursor or len(self.rows) >= self.most

    def decoded(self) -> tuple[Row, ...]:
        return tuple(
            event_row(row) if self.member == "events" else _row(row, self.member) for row in self.rows.values()
        )


def reading(name: str, wanted: Wanted = EVERYTHING) -> Generator[Calls, Answers, FabricView]:
    """Read a view: yields the calls of one round trip, is sent their answers (an error stands at its call's place).

    Raises:
        GroupUnknown: there is no such group.
    """
    parts = [_Part(member, section, key, getattr(wanted, member)) for member, section, key in _SECTIONS]
    parts = [part for part in parts if part.most > 0]
    group, *answers = yield [fabric_snapshot("group"), *(part.call() for part in parts)]
    read_ms = time.time_ns() // 1_000_000
    if isinstance(group, GroupUnknown):
        raise group
    first = next((answer for answer in (group, *answers) if not isinstance(answer, DispatchError)), None)
    if first is None:
        raise group
    waiting = parts
    while waiting:
        for part, answer in zip(waiting, answers, strict=True):
            part.take(answer)
        waiting = [part for part in waiting if not part.ended]
        answers = (yield [part.call() for part in waiting]) if waiting else []
    return _view(name, (first["server_ms"], read_ms), group, parts)


async def read_view(connection: Connection, name: str, wanted: Wanted = EVERYTHING) -> FabricView:
    """Read a view of the group `name`.

    Raises:
        FabricUnavailable: the server does not answer.
        GroupUnknown: there is no such group.
    """
    steps = reading(name, wanted)
    calls = next(steps)
    while True:
        answers = await connection.run_many(name, calls)
        try:
            calls = steps.send(answers)
        except StopIteration as done:
            view: FabricView = done.value
            return view


def read_view_blocking(
    run_many: Callable[[str, Sequence[FunctionCall[Any]]], Answers], name: str, wanted: Wanted = EVERYTHING
) -> FabricView:
    """Read a view as `read_view` does, with the `run_many` of a blocking connection."""
    steps = reading(name, wanted)
    calls = next(steps)
    while True:
        try:
            calls = steps.send(run_many(name, calls))
        except StopIteration as done:
            view: FabricView = done.value
            return view


def _view(name: str, clocks: tuple[int, int], group: Any, parts: list[_Part]) -> FabricView:
    server_ms, read_ms = clocks
    unknown = {part.member: part.problem for part in parts if part.problem}
    truncated = frozenset(part.member for part in parts if part.cursor and not part.problem)
    known: dict[str, Any] = {part.member: part.decoded() for part in parts if not part.problem}
    if "running" in known:
        known["running"] = tuple(sorted(known["running"], key=lambda row: row.claimed_ms or 0))
    if isinstance(group, DispatchError):
        unknown["group"] = str(group)
    else:
        known["group"] = msgspec.convert(group, GroupRow)
    return FabricView(name=name, server_ms=server_ms, read_ms=read_ms, truncated=truncated, unknown=unknown, **known)


def _row(row: dict[str, Any], member: str) -> Row:
    return msgspec.convert(row, _ROWS[member])


def event_row(row: dict[str, Any]) -> EventRow:
    """Make the record of one row of the snapshot's events."""
    facts = {name: value for name, value in row.items() if name not in {"event_id", "kind", "at_ms"}}
    return EventRow(event_id=row["event_id"], kind=row.get("kind"), at_ms=row.get("at_ms"), facts=facts)

"""From the fabric's streams of records to a sink: each record at least once, whoever wrote it.

A recorder runs in each gateway process for each sink it has (that of the history of `dispatch dev` in the dev process).
Those of one sink are consumers of one group, named like it, so that the records are shared out among them, and no sink
waits for another. A batch is acknowledged when the sink has taken it; what a process had when it died is taken over by
another one after `CLAIM_IDLE_S`. Nothing of this is on the path of a request, and one batch is all that is held in
memory: while a sink is away the records stay in Valkey. Their streams are bounded; what is trimmed there before it was
read is lost, is counted and is warned about.

It polls instead of waiting in the server: a blocked reader would be woken for each single record.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import msgspec
import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from dispatch.errors import ConfigurationError, ContractError, FabricError
from dispatch.fabric import functions
from dispatch.fabric.connection import Connection
from dispatch.fabric.schema import LIMITS, key
from dispatch.fabric.streams import Reading, RecordsState, StreamEntry
from dispatch.telemetry.identity import always
from dispatch.telemetry.sinks import Sink, SinkAway
from dispatch.telemetry.spans import delivery_span, spans_of
from dispatch.telemetry.stream_records import read_deliveries, read_ending

log = structlog.get_logger(__name__)

STREAMS = ("endings", "deliveries")

CLAIM_IDLE_S = 60.0
"""How long a batch may be another process's before it is taken over."""

_RETRY_MAX_S = 15.0
_SLICE = 25
"""Records that are turned into spans between two turns of the event loop: about a millisecond."""
_REST = 31
"""How many times as long as making spans took it rests: requests go first. Making spans is about half of its work, so
it takes a sixteenth of a processor at most; what comes faster waits in the stream."""
_BACKLOG_MAX = LIMITS["endings_kept"] // 4
"""From so many waiting records on it does not rest at all: now they go first, or some would be lost."""
_REFUSALS_MAX = 3
"""How often a batch is offered to a sink that raises what is no outage."""
_FLUSH_ROUNDS_MAX = 100
_FROM_THE_START = "0-0"

_PROBLEMS = (FabricError, ConfigurationError)


def unnoticed(_pool: str, _seconds: float) -> None:
    """Take no notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
    """How a recorder reads. `consumer` names it among the others of its fabric group: the gateway's id."""

    group: str
    consumer: str
    resource: Resource
    batch: int = 500
    pause_s: float = 0.25
    """Between two looks when nothing is there; what it adds to the age of a row."""
    retry_s: float = 0.5
    """First pause when something is away; it doubles up to 15 s."""
    claim_idle_s: float = CLAIM_IDLE_S
    on_delivery: Callable[[str, float], None] = field(default=unnoticed)
    """Told of each delivery: its pool, and seconds from the ending to the acknowledgement."""
    samples_root: Callable[[int], bool] = field(default=always)
    """Whether a trace without a producer's context is sampled, by its id."""


class RecorderStats(msgspec.Struct, frozen=True):
    """What a recorder has done since it started, but for the last four: these are the group's, as last seen.

    `records` were read, `claimed` of them from processes that died; `unreadable` were none of this version's. Of the
    `spans` made of them the sink took `taken` and will never get `dropped`; `failures` counts attempts that failed,
    `away`: the last one did.

    `lost`: records that were trimmed before this sink's recorders had read them. `lag` and `pending`: records that none
    has read yet, and that are read and not acknowledged (None = not known yet). `length`: endings in their stream.
    """

    sink: str
    records: int = 0
    claimed: int = 0
    unreadable: int = 0
    spans: int = 0
    taken: int = 0
    dropped: int = 0
    failures: int = 0
    away: bool = False
    lost: int = 0
    lag: int | None = None
    pending: int | None = None
    length: int | None = None


class Recorder:
    """Reads records, makes spans of them and hands these to a sink. Run `run` in a task; `stop` ends it."""

    def __init__(self, connection: Connection, options: RecorderOptions, sink: Sink) -> None:
        """`connection` should be the recorder's own: its answers are large. The caller closes it and the sink."""
        self._connection = connection
        self._options = options
        self._sink = sink
        self._keys = {key(options.group, name): name for name in STREAMS}
        self._reading = Reading(sink.name, options.consumer, options.batch)
        self._stopping = anyio.Event()
        self._hurry = anyio.CancelScope()
        self._stats = RecorderStats(sink=sink.name)
        self._claim_at = 0.0
        self._problem = ""

    def stats(self) -> RecorderStats:
        """Say what it has done so far; cheap."""
        return self._stats

    async def run(self) -> None:
        """Record until stopped, then what is left, within the time that `stop` gave. Never raises for outages."""
        pause, rounds = self._options.retry_s, 0
        with self._hurry:
            while not self._stopping.is_set() or rounds < _FLUSH_ROUNDS_MAX:
                rounds += self._stopping.is_set()
                try:
                    read = await self._round()
                except _PROBLEMS as error:
                    self._note_problem(str(error))
                    if self._stopping.is_set():
                        return
                    await self._sleep(pause)
                    pause = min(2 * pause, _RETRY_MAX_S)
                    continue
                self._note_problem("")
                pause = self._options.retry_s
                if read == 0 and self._stopping.is_set():
                    return
                if read < self._options.batch:
                    await self._sleep(self._options.pause_s)

    def stop(self, within_s: float) -> None:
        """Let `run` end: when everything is read, or `within_s` from now. What is left, another process records."""
        self._hurry.deadline = min(self._hurry.deadline, anyio.current_time() + within_s)
        self._stopping.set()

    async def _round(self) -> int:
        """Read and hand on one batch; returns how many records there were."""
        options, taken_over, now = self._options, 0, anyio.current_time()
        watch = functions.records_watch(self._sink.name, prepare=True)
        self._note_state(await self._connection.run(options.group, watch))
        if now >= self._claim_at and not self._stopping.is_set():
            for name in self._keys:
                taken_over += await self._claim(name)
            self._claim_at = now + options.claim_idle_s / 4
        entries = await self._connection.read_records(list(self._keys), self._reading)
        await self._record(entries)
        return taken_over + len(entries)

    async def _claim(self, name: str) -> int:
        """Take over what dead processes have left of one stream."""
        cursor, count, gone = "", 0, 0
        while cursor != _FROM_THE_START:
            claimed = await self._connection.claim_records(
                name,
                self._reading,
                idle_ms=int(self._options.claim_idle_s * 1000),
                cursor=cursor or _FROM_THE_START,
            )
            await self._record(claimed.entries)
            count += len(claimed.entries)
            gone += claimed.deleted
            cursor = claimed.cursor
        if count:
            log.info("records_taken_over", sink=self._sink.name, stream=self._keys[name], count=count)
        if gone:
            self._warn_of_lost(self._keys[name], gone)
        self._add(claimed=count, lost=gone)
        return count

    async def _record(self, entries: Sequence[StreamEntry]) -> None:
        """Hand on the spans of these records, then acknowledge them."""
        if not entries:
            return
        spans: list[ReadableSpan] = []
        for at in range(0, len(entries), _SLICE):
            began = time.perf_counter()
            for entry in entries[at : at + _SLICE]:
                spans += self._spans_of(entry)
            await self._sleep(self._rest() * (time.perf_counter() - began))
        await self._offer(spans)
        for name in self._keys:
            ids = [entry.entry_id for entry in entries if entry.key == name]
            await self._connection.ack_records(name, self._sink.name, ids)
        self._add(records=len(entries), spans=len(spans))

    def _spans_of(self, entry: StreamEntry) -> list[ReadableSpan]:
        options = self._options
        try:
            if self._keys[entry.key] == "deliveries":
                deliveries = read_deliveries(entry.entry_id, entry.fields)
                for one in deliveries:
                    options.on_delivery(one.pool_id, max(0, one.acked_ms - one.ended_ms) / 1000)
                return [delivery_span(one, options.group, options.resource, options.samples_root) for one in deliveries]
            record = read_ending(entry.entry_id, entry.fields)
            return spans_of(record, options.group, options.resource, options.samples_root)
        except ContractError as error:
            log.warning("record_unreadable", stream=self._keys[entry.key], record=entry.entry_id, reason=str(error))
            self._add(unreadable=1)
            return []

    async def _offer(self, spans: Sequence[ReadableSpan]) -> None:
        """Offer spans to the sink until it has taken them, or its patience is over."""
        if not spans:
            return
        patience = self._sink.patience_s
        until = math.inf if patience is None else anyio.current_time() + patience
        if self._stats.away and patience is not None:
            until = 0.0  # it has been away for longer than that already: one attempt
        pause, refusals = self._options.retry_s, 0
        while True:
            try:
                await self._sink.take(spans)
            except SinkAway as error:
                self._note_sink(str(error))
            except Exception as error:  # noqa: BLE001 - a sink's fault costs spans, never the gateway
                refusals += 1
                self._note_sink(f"{type(error).__name__}: {error}")
            else:
                self._note_sink("")
                self._add(taken=len(spans))
                return
            if anyio.current_time() >= until or refusals >= _REFUSALS_MAX:
                log.warning("spans_dropped", sink=self._sink.name, count=len(spans))
                self._add(dropped=len(spans))
                return
            await anyio.sleep(pause)
            pause = min(2 * pause, _RETRY_MAX_S)

    def _rest(self) -> float:
        """Return how many times as long as it worked it rests: the less, the more waits to be recorded."""
        return _REST * max(0.0, 1 - (self._stats.lag or 0) / _BACKLOG_MAX)

    async def _sleep(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._stopping.wait()

    def _note_state(self, state: RecordsState) -> None:
        for name, stream in zip(STREAMS, (state.endings, state.deliveries), strict=True):
            if stream.lost_now:
                self._warn_of_lost(name, stream.lost_now)
        self._stats = msgspec.structs.replace(
            self._stats,
            lost=max(self._stats.lost, state.lost),
            lag=_sum(state.endings.lag, state.deliveries.lag),
            pending=_sum(state.endings.pending, state.deliveries.pending),
            length=state.endings.length,
        )

    def _warn_of_lost(self, stream: str, count: int) -> None:
        reason = "they were trimmed before they were recorded: too many, or the sink was away for too long"
        log.warning("records_lost", sink=self._sink.name, stream=stream, count=count, reason=reason)

    def _add(self, **counts: int) -> None:
        changed = {name: getattr(self._stats, name) + count for name, count in counts.items()}
        self._stats = msgspec.structs.replace(self._stats, **changed)

    def _note_sink(self, problem: str) -> None:
        """Note that the sink failed (or, "", that it did not); an outage is warned about once."""
        if problem:
            self._add(failures=1)
        if problem and not self._stats.away:
            log.warning("sink_away", sink=self._sink.name, reason=problem)
        if self._stats.away and not problem:
            log.info("sink_back", sink=self._sink.name)
        self._stats = msgspec.structs.replace(self._stats, away=bool(problem))

    def _note_problem(self, problem: str) -> None:
        """Note that records cannot be read (or, "", that they can)."""
        if problem and not self._problem:
            log.warning("records_not_read", sink=self._sink.name, group=self._options.group, reason=problem)
        if self._problem and not problem:
            log.info("records_read_again", sink=self._sink.name, group=self._options.group)
        self._problem = problem


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None

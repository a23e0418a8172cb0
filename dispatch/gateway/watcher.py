"""Chores for the group: asking an endpoint whether it is back where nothing waits for it, polling an engine's metrics.

The server knows what is due and hands each chore to one gateway; every answer to a claim, a settle and a heartbeat
says how long it is until then. No claim and no heartbeat waits for a chore: each has a task of its own, bounded by the
time the server gives it, and a few run at once, so that a silent endpoint delays the samples of no other.
"""

from __future__ import annotations

import asyncio
import math
import random
import traceback

import anyio
import structlog

from dispatch.backend.client import EndpointClient
from dispatch.backend.engine_metrics import EngineReading, token_ms_between
from dispatch.backend.probing import Probe
from dispatch.fabric import functions
from dispatch.fabric.records import Chore, ChoreReport, Verdict
from dispatch.gateway.endpoints import Endpoints, EndpointUnusable
from dispatch.gateway.identity import Identity
from dispatch.gateway.link import PROBLEMS, Link

log = structlog.get_logger(__name__)

_AT_ONCE = 8
_PAUSE_S = 0.5  # after a call that was not answered
_SHORTEST_PAUSE_S = 0.01  # between two questions for a chore
_MARGIN, _MARGIN_S = 0.1, 0.25  # of a chore's time, at most: what its report takes
_LAST_REPORT_S = 0.3
_WINDOW_S = 60.0  # two readings that lie further apart say nothing about now


class Watcher:
    """Does chores of one gateway's group. `expect` is told by whoever hears when the next one is due."""

    def __init__(self, identity: Identity, link: Link, endpoints: Endpoints, client: EndpointClient) -> None:
        self._gateway_id = identity.gateway_id
        self._link = link
        self._endpoints = endpoints
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._due_at = math.inf
        self._heard_ms = 0
        self._offset = 0.0
        self._not_before = 0.0
        self._busy = 0
        self._changed = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._readings: dict[str, tuple[float, EngineReading]] = {}
        self._problems: dict[str, str] = {}

    def expect(self, chore_ms: int | None, server_ms: int, sent_at: float) -> None:
        """Note when the next chore is due (None = none is known), from an answer of the server to a call sent then."""
        if server_ms < self._heard_ms and server_ms > self._heard_ms - 60_000:
            return  # an older answer that came later; a clock that was set back by much is another server's
        self._heard_ms = server_ms
        self._offset = sent_at - server_ms / 1000
        self._due_in(chore_ms)

    def close(self) -> None:
        """Do no more chores; what is under way is given back, and `run` returns."""
        self._scope.cancel()

    async def run(self) -> None:
        """Do chores as they come due, until closed or cancelled."""
        with self._scope:
            async with anyio.create_task_group() as chores:
                while True:
                    await self._until_due()
                    chore = await self._next()
                    if chore is not None:
                        self._busy += 1
                        chores.start_soon(self._work, chore)

    def _due_in(self, chore_ms: int | None) -> None:
        if chore_ms is None:
            self._due_at = math.inf
            return
        self._due_at = self._loop.time() + chore_ms / 1000
        self._changed.set()

    async def _until_due(self) -> None:
        while True:
            wait_until = max(self._due_at, self._not_before) if self._busy < _AT_ONCE else math.inf
            if wait_until <= self._loop.time():
                return
            self._changed.clear()
            with anyio.CancelScope(deadline=wait_until):
                await self._changed.wait()

    async def _next(self) -> Chore | None:
        """Ask for a chore; None = there is none now, or no answer."""
        self._not_before = self._loop.time() + _SHORTEST_PAUSE_S
        try:
            return self._taken((await self._link.once(functions.endpoint_report(self._gateway_id))).value)
        except PROBLEMS as error:
            log.debug("chore_not_taken", error=str(error))
            self._not_before = self._loop.time() + _PAUSE_S * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            return None

    def _taken(self, chore: Chore) -> Chore | None:
        self._due_in(chore.chore_ms)
        return None if chore.kind == "NONE" else chore

    async def _work(self, first: Chore) -> None:
        """Do a chore, report it, and go on with what the report brings."""
        chore: Chore | None = first
        try:
            while chore is not None:
                chore = await self._report(chore, await self._result(chore))
        finally:
            self._busy -= 1
            self._changed.set()

    async def _result(self, chore: Chore) -> ChoreReport:
        try:
            return await (self._probe(chore) if chore.kind == "PROBE" else self._sample(chore))
        except asyncio.CancelledError:
            # Not left to its time: until then nobody else may ask the endpoint.
            with anyio.move_on_after(_LAST_REPORT_S, shield=True):
                given_back: Chore | None = chore
                while given_back is not None:
                    given_back = await self._report(given_back, _nothing(given_back))
            raise
        except Exception:  # noqa: BLE001 - a chore's fault ends the chore, never the gateway
            trace = traceback.format_exc()
            log.error("chore_failed", kind=chore.kind, endpoint=chore.endpoint_id, trace=trace)  # noqa: TRY400 - text
            return _nothing(chore)

    def _seconds_left(self, chore: Chore) -> float:
        left = self._offset + chore.until_ms / 1000 - self._loop.time()
        return left - min(_MARGIN * left, _MARGIN_S)

    async def _probe(self, chore: Chore) -> ChoreReport:
        endpoint, why = None, "endpoint_unknown"
        with anyio.move_on_after(self._seconds_left(chore)):
            try:
                endpoint = await self._endpoints.find(chore.endpoint_id)
            except EndpointUnusable as error:
                why = error.error_type
        probe = Probe("neutral", why)
        if endpoint is not None:
            probe = await self._client.probe(endpoint, within_s=self._seconds_left(chore))
        log.info("endpoint_probed", endpoint=chore.endpoint_id, verdict=probe.verdict, error_type=probe.error_type)
        return ChoreReport(
            kind="probe",
            endpoint_id=chore.endpoint_id,
            token=chore.token,
            verdict=Verdict(probe.verdict),
            hold_ms=probe.hold_ms,
            error_type=probe.error_type,
        )

    async def _sample(self, chore: Chore) -> ChoreReport:
        name, reading, problem = chore.endpoint_id, EngineReading(), "its metrics cannot be asked for here"
        gauge = None
        with anyio.move_on_after(self._seconds_left(chore)):
            gauge = await self._endpoints.gauge(name)
        if gauge is not None:
            found = await self._client.gauge(gauge, within_s=self._seconds_left(chore))
            reading, problem = (EngineReading(), found) if isinstance(found, str) else (found, "")
        now = self._loop.time()
        read_at, before = self._readings.get(name, (-math.inf, None))
        token_ms = token_ms_between(before if now - read_at <= _WINDOW_S else None, reading)
        if reading.tokens is not None:
            self._readings[name] = (now, reading)
        if reading == EngineReading() and not problem:
            problem = "its metrics page shows none of the names that are looked for"
        self._tell(name, problem)
        return ChoreReport(
            kind="sample", endpoint_id=name, token=chore.token, waiting=reading.waiting, token_ms=token_ms
        )

    def _tell(self, name: str, problem: str) -> None:
        """Log what is in the way of an endpoint's samples, once."""
        if problem != self._problems.get(name, ""):
            if problem:
                log.warning("gate_without_sample", endpoint=name, problem=problem)
            else:
                log.info("gate_sampled_again", endpoint=name)
            self._problems[name] = problem

    async def _report(self, chore: Chore, report: ChoreReport) -> Chore | None:
        """Report until answered, as long as the chore is ours; then it is due again by itself."""
        left = self._offset + chore.until_ms / 1000 - self._loop.time()
        with anyio.move_on_after(max(left, _PAUSE_S)):
            return self._taken((await self._link.insist(functions.endpoint_report(self._gateway_id, report))).value)
        return None


def _nothing(chore: Chore) -> ChoreReport:
    """Return the report of a chore that was not done."""
    return ChoreReport(kind=chore.kind.lower(), endpoint_id=chore.endpoint_id, token=chore.token)

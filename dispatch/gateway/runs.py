"""Running leases: one task each, from the body to the result that waits to be settled."""

from __future__ import annotations

import asyncio
import traceback

import msgspec
import structlog

from dispatch.backend.execution import Execution
from dispatch.contract.envelope import CONTRACT_VERSION, RequestEnvelope
from dispatch.errors import FabricFull
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.fabric.records import Lease, Settlement
from dispatch.fabric.schema import LIMITS, key
from dispatch.gateway.endpoints import EndpointUnusable
from dispatch.gateway.executors import Executor, StreamingExecutor
from dispatch.gateway.holdings import NOTHING_TO_SETTLE, Begun, Held, Holdings, Phase, StopReason, attempt_of
from dispatch.gateway.link import Link
from dispatch.gateway.settling import Settler
from dispatch.gateway.streams import Appender

log = structlog.get_logger(__name__)

_LATE_S = 0.25  # an executor keeps its deadline itself and says more about it; only one that does not is cut off
_SWEEP_S = 0.1
_PROBE_MARGIN, _PROBE_MARGIN_S = 0.1, 0.25  # of a probe's time, at most: what its report takes, or it says nothing
_REPLY_BODY_TTL_MS = 300_000

# What the server's words about chunks mean for a run. (GAP is a fault of ours: it has no reason to stop for.)
_UNWANTED = {
    "LEASE_LOST": StopReason.LOST,
    "CANCELLED": StopReason.CANCELLED,
    "PRODUCER_GONE": StopReason.GONE,
    "SLOW_CONSUMER": StopReason.SLOW,
}

_ENVELOPE = msgspec.json.Decoder(RequestEnvelope)


class _Version(msgspec.Struct):
    """What can be read of an envelope of any contract."""

    contract: int


class Runner:
    """Starts and stops runs.

    The tasks live in an asyncio.TaskGroup that the claim loop opens: starting a task in anyio's group costs 10 us, in
    this one 2 us, and it is paid once for each request. A run never raises, so it never takes its siblings down.
    """

    def __init__(self, link: Link, holdings: Holdings, executor: Executor, settler: Settler) -> None:
        self.appender = Appender(link, settler.gateway_id)
        """Has to run for streams to come through."""
        self.observer: Observer = NOBODY
        self._link = link
        self.holdings = holdings
        self._executor = executor
        # Asked once: of a protocol Python looks at every member, which takes longer than reading some chunks.
        self._streaming = executor if isinstance(executor, StreamingExecutor) else None
        self._settler = settler
        self._tasks: asyncio.TaskGroup | None = None
        self._begun = Begun()
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None

    def bind(self, tasks: asyncio.TaskGroup | None) -> None:
        """Start runs in this group from now on; None: start no more, and look after none."""
        self._tasks = tasks
        if tasks is None and self._sweep is not None:
            self._sweep.cancel()

    def start(self, lease: Lease, offset: float) -> None:
        """Run a lease, unless it is held already. `offset` + server time (s) = the event loop's time, never late.

        One attempt is never executed twice: where the server gives it out again (a primary that lost its newest
        writes), what runs goes on under the new lease, but for a stream; of one that does not, its result is told if
        we have it still, else that it is lost. A lease whose end has passed on its way here is not begun.
        """
        if self.holdings.get(lease.request_id, lease.fence) is not None:
            return
        ends_at, deadline_at = offset + lease.lease_until_ms / 1000, offset + lease.deadline_ms / 1000
        older = self.holdings.other(lease)
        if older is not None:
            if attempt_of(older.lease) == attempt_of(lease) and not older.streams:
                log.warning("lease_given_out_again", request_id=lease.request_id, phase=older.phase.value)
                self.holdings.carry_on(older, lease, ends_at, deadline_at)
                self._bound_probe(older, offset)
                return
            self.stop(older, StopReason.LOST)
        if lease in self._begun:
            log.warning("attempt_given_out_again", request_id=lease.request_id, attempt=lease.attempt)
            self.settle_unrun(lease, self.holdings.returned(lease) or self._settler.lost(lease))
            return
        if ends_at <= self._loop.time():
            self.holdings.abandon(lease, Phase.NEW)
            return
        held = Held(lease, ends_at, deadline_at)
        self.holdings.add(held)
        if self._tasks is None:
            self.holdings.finish(held, self._settler.released(lease))
            return
        held.task = self._tasks.create_task(self._run(held))
        self._bound_probe(held, offset)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_SWEEP_S, self._look_after)

    def settle_unrun(self, lease: Lease, settlement: Settlement) -> None:
        """Hold a lease only to settle it, unless it is held already."""
        if self.holdings.get(lease.request_id, lease.fence) is not None:
            return
        held = Held(lease, 0.0, 0.0)
        self.holdings.add(held)
        self.holdings.finish(held, settlement)

    def stop(self, held: Held, reason: StopReason) -> None:
        """Stop a run; what has finished stays as it is. A lost or fenced lease is let go of at once."""
        if held.phase is Phase.FINISHED or held.stop in NOTHING_TO_SETTLE:
            return
        first = held.stop is None
        held.stop = reason
        if reason in NOTHING_TO_SETTLE:
            self.holdings.drop(held)
            self.observer.lease_lost(held.lease, reason.value)
        # A task that was cancelled before its first step would never run: it sees `stop` when it does.
        if first and held.phase is not Phase.NEW and held.task is not None:
            held.task.cancel()

    def stop_unbegun(self) -> None:
        """Give back what has not reached its endpoint."""
        for held in self.holdings:
            if held.phase is not Phase.CALLING:
                self.stop(held, StopReason.DRAINED)

    def stop_all(self) -> None:
        """Break everything off; the callers of what had begun are told `lost`."""
        for held in self.holdings:
            self.stop(held, StopReason.DRAINED)

    def settle_all(self) -> None:
        """Have a result for every lease now, also for a run that does not let itself be stopped."""
        for held in self.holdings:
            if held.phase is not Phase.FINISHED:
                held.stop = held.stop or StopReason.DRAINED
                self.holdings.finish(held, self._settler.stopped(held))

    def _bound_probe(self, held: Held, offset: float) -> None:
        """End a breaker's probe a little before the server counts it as gone: its verdict has to get there.

        One that is bounded by its own deadline is left to that: then the endpoint is not to blame.
        """
        if held.task is None or not 0 < held.lease.probe_until_ms < held.lease.deadline_ms:
            return
        until = offset + held.lease.probe_until_ms / 1000
        margin = min(_PROBE_MARGIN * max(0.0, until - self._loop.time()), _PROBE_MARGIN_S)
        timer = self._loop.call_at(until - margin, self._stop_probe, held)
        held.task.add_done_callback(lambda _: timer.cancel())

    def _stop_probe(self, held: Held) -> None:
        """Stop a probe, unless its answer is coming already: then the endpoint is well, whoever says so first."""
        if held.stop is None and held.phase is not Phase.FINISHED and not held.told:
            log.warning("probe_over", request_id=held.lease.request_id, endpoint=held.lease.endpoint_id)
            self.stop(held, StopReason.PROBE_OVER)

    def _look_after(self) -> None:
        """Break off what is late or not ours any more, and look again while anything is held. Asks nobody.

        A run whose lease ended without a confirmed renewal is another's; also after this process stood still. A result
        is offered until the server answers: the fence decides. One timer for all: each has its price.
        """
        now = self._loop.time()
        for held in self.holdings:
            if held.phase is Phase.FINISHED:
                continue
            if held.ends_at <= now:
                log.warning("lease_not_renewed", request_id=held.lease.request_id, pool=held.lease.pool_id)
                self.stop(held, StopReason.FENCED)
            elif held.deadline_at <= now - _LATE_S and held.stop is None:
                self.stop(held, StopReason.EXPIRED)
        self._sweep = self._loop.call_later(_SWEEP_S, self._look_after) if self.holdings else None

    async def _run(self, held: Held) -> None:
        # For whatever is logged on the way; a task has a context of its own.
        structlog.contextvars.bind_contextvars(request_id=held.lease.request_id, pool=held.lease.pool_id)
        try:
            settlement = await self._result(held)
        except asyncio.CancelledError:
            own = held.stop is not None
            self._conclude(held, None)
            if not own:
                raise
        except EndpointUnusable as error:
            self._conclude(held, self._settler.failed(held.lease, error.error_type, str(error)))
        except Exception:  # noqa: BLE001 - an executor's fault ends one request, never the gateway
            # As text: where logging is not set up, structlog would show local variables, which hold the body.
            trace = traceback.format_exc()
            log.error("run_failed", request_id=held.lease.request_id, trace=trace)  # noqa: TRY400 - see above
            message = "the gateway failed while it ran the request; its log says more"
            self._conclude(held, self._settler.failed(held.lease, "gateway_fault", message))
        else:
            self._conclude(held, settlement)

    def _conclude(self, held: Held, settlement: Settlement | None) -> None:
        """Queue the result; None = the run was stopped."""
        held.streams = False  # what is left of it is a result like any other
        if held.stop in NOTHING_TO_SETTLE:
            return
        self.holdings.finish(held, settlement or self._settler.stopped(held))

    async def _result(self, held: Held) -> Settlement | None:
        """Run a lease to its end; None = it was stopped before it began."""
        lease = held.lease
        if held.stop is not None:
            return None
        held.phase = Phase.FETCHING
        try:
            envelope = _ENVELOPE.decode(lease.envelope)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._unreadable(lease, error)
        if envelope.contract != CONTRACT_VERSION:
            return self._unreadable(lease, None)
        body = lease.body if lease.body or not lease.body_bytes else await self._body(lease)
        if body is None:
            return self._settler.failed(lease, "body_missing", "the request's body is not in the fabric (any more)")
        deadline_s = held.deadline_at - self._loop.time()
        if deadline_s <= 0:
            held.stop = StopReason.EXPIRED
            return None
        held.phase = Phase.CALLING
        self._begun.add(lease)
        if envelope.stream:
            execution = await self._stream(held, envelope, body, deadline_s)
        else:
            execution = await self._executor.execute(lease, envelope, body, deadline_s)
        first_s = None if execution.first_chunk_ms is None else execution.first_chunk_ms / 1000
        self.observer.ran(envelope, execution.head, execution.execution_ms / 1000, first_s)
        return await self._settlement(lease, execution, body)

    async def _stream(self, held: Held, envelope: RequestEnvelope, body: bytes, deadline_s: float) -> Execution:
        """Pass a stream on as it comes; returns when the fabric has all of it, so that its end is told last."""
        if self._streaming is None:
            raise TypeError(f"{type(self._executor).__name__} cannot stream")
        held.streams = True
        channel = self.appender.open(held.lease)
        try:
            async with await self._streaming.stream(held.lease, envelope, body, deadline_s) as stream:
                try:
                    async for payload in stream:
                        held.told = True
                        if not await channel.put(payload.event, payload.data):
                            break
                finally:
                    held.usage = stream.head.usage
            if not await channel.flushed():
                self.stop(held, _UNWANTED[channel.refused])
                await asyncio.sleep(0)  # where this run, which has just been cancelled, ends
            return stream.execution
        finally:
            channel.close()

    async def _body(self, lease: Lease) -> bytes | None:
        group = self._link.group
        # The body stands under the submit's nonce, which the lease carries.
        return await self._link.fetch(key(group, "request_body", id=lease.request_id, nonce=lease.nonce))

    async def _settlement(self, lease: Lease, execution: Execution, asked: bytes) -> Settlement:
        large = len(execution.body) > LIMITS["inline_reply_bytes"]
        if large:
            reply_key = key(self._link.group, "reply_body", id=lease.request_id)
            try:
                await self._link.store(reply_key, execution.body, ttl_ms=_REPLY_BODY_TTL_MS)
            except FabricFull:
                # A settle is done all the same, as it frees memory in the end: the body travels in it.
                log.warning("reply_body_not_stored", request_id=lease.request_id, size_bytes=len(execution.body))
                large = False
        return self._settler.executed(lease, execution, asked, by_reference=large)

    def _unreadable(self, lease: Lease, error: Exception | None) -> Settlement:
        try:
            contract = msgspec.json.decode(lease.envelope, type=_Version).contract
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._settler.failed(lease, "envelope_unreadable", f"the request's envelope is damaged: {error}")
        if contract == CONTRACT_VERSION:
            return self._settler.failed(lease, "envelope_unreadable", f"the request's envelope is wrong: {error}")
        message = f"the request follows contract {contract}, this gateway speaks {CONTRACT_VERSION}"
        return self._settler.failed(lease, "contract_mismatch", message)

"""The queued path of the asynchronous client: through the fabric group to a gateway and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from dispatch.contract import Call, Reply
from dispatch.errors import DispatchError, FabricError, RequestInProgress, StateConflict
from dispatch.fabric.connection import Connection
from dispatch.fabric.verifying import verify_library
from dispatch.producer.bodies import Bodies
from dispatch.producer.detached import Handle, detached, handle_of, handle_of_earlier
from dispatch.producer.draft import make_draft, require_stream, require_whole
from dispatch.producer.errand import LATE_S, admission_bound_s
from dispatch.producer.farewell import Farewell, reply_due
from dispatch.producer.inbox import Inbox, Outcome
from dispatch.producer.inheritance import keep_in_children
from dispatch.producer.intake import Reservoir
from dispatch.producer.liveness import Listener, Liveness, beat_connection
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.overdue import Overdue
from dispatch.producer.pipeline import SENDERS, Pipeline
from dispatch.producer.promise import Promise
from dispatch.producer.pump import Pump, PumpEvents
from dispatch.producer.queued_stream import QueuedStream
from dispatch.producer.recovery import state_of, unanswerable
from dispatch.producer.session import Session
from dispatch.producer.standing import Standing
from dispatch.producer.submitter import AsyncErrand, Submitter

_log = structlog.get_logger(__name__)

_CLOSE_POLL_S = 0.01
LAST_DRAIN_S = 1.0
_LOOK_AGAIN_S = 1.0


class QueuedPath:
    """One producer session on one connection. Opened and closed once; may be closed from another task."""

    def __init__(self, url: str, options: ClientOptions, connection: Connection) -> None:
        self._options = options
        self._connection = self.connection = connection
        self.session = Session.begin(options)
        self.inbox = Inbox(time.monotonic)
        self.reservoir = Reservoir(options)
        self._pipeline = Pipeline(connection, self.session.group)
        self._submitter = Submitter(connection, self._pipeline)
        self._farewell = Farewell(connection, self._pipeline, self.session, self.inbox)
        self._bodies = Bodies(connection, self.session.group)
        self._overdue = Overdue(connection, self.session.group)
        self._standing = Standing(self.session, self.inbox)
        events = PumpEvents(recovered=self._interrupted, taken_over=self._standing.taken_over)
        self._pump = Pump(connection, self.session, self.inbox, events)
        self._liveness = Liveness(
            self.session,
            lambda: beat_connection(url, self.session),
            Listener(
                lapsed=lambda: self._from_thread(self._interrupted),
                taken_over=lambda: self._from_thread(self._standing.taken_over),
            ),
        )
        self._standing.silencers = (self._liveness.stop, self._pump.retire)
        self._stop = anyio.Event()
        self._doubt = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        keep_in_children(self)

    async def open(self) -> None:
        """Check the library, give the first sign of life and start the background work.

        Raises:
            FabricUnavailable, LibraryProblem, ConfigurationError: the group cannot be used; nothing was started.
        """
        session = self.session
        await verify_library(self._connection, session.group)
        await self._connection.keep_alive(
            session.alive_key,
            session.session_id,
            session.replies_key,
            alive_ms=session.liveness_ms,
            replies_ms=session.replies_ttl_ms,
        )
        self._loop = asyncio.get_running_loop()
        started = anyio.Event()
        # A task of its own, awaited by aclose(): a task group cannot be entered in one task and left in another, and an
        # error of the caller's must leave `async with` as itself, not inside a group.
        self._supervisor = asyncio.create_task(self._supervise(started), name=f"producer-{session.producer_id}")
        self._supervisor.add_done_callback(self._supervisor_ended)
        await started.wait()
        self._liveness.start()

    async def call(self, call: Call, options: CallOptions) -> Reply:
        """Queue `call` and wait for its terminal reply, whatever its ending.

        When the waiting task is cancelled the request is cancelled in the background.

        Raises:
            InvalidRequest: the call cannot be queued, or asks for a stream.
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict: nothing was queued.
            FabricUnavailable: Valkey did not answer; whether it was queued is not known, and it is cancelled if so.
            OutcomeUnknown: it was queued, and how it ended cannot be learnt any more.
        """
        require_whole(call)
        errand = self.errand(call, options, Promise())
        try:
            reply_s = await self.begin(errand)
            return await self._reply(errand, reply_s)
        except BaseException:
            self.leave(errand)
            raise

    async def submit(self, call: Call, options: CallOptions) -> Handle:
        """Queue `call` for nobody to wait for. A task that is cancelled meanwhile cancels the request.

        Raises:
            InvalidRequest: the call cannot be queued, or asks for a stream.
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of `call`.
        """
        errand = self.errand(call, detached(call, options), Promise())
        try:
            await self._submitter.admit(errand)
        except RequestInProgress as earlier:
            return handle_of_earlier(errand, earlier)
        except BaseException:
            self.leave(errand)
            raise
        return handle_of(errand)

    def stream(self, call: Call, options: CallOptions) -> QueuedStream:
        """Return the stream of `call`; nothing is sent before it is opened.

        Raises:
            InvalidRequest: the call cannot be queued, or does not ask for a stream.
            StateConflict: the client cannot be used any more.
        """
        require_stream(call, options)
        return QueuedStream(self, call, options)

    def errand(self, call: Call, options: CallOptions, slot: Promise[Outcome]) -> AsyncErrand:
        """Make a request of `call` whose outcome goes to `slot`; nothing is sent yet.

        Raises:
            InvalidRequest: the call cannot be queued.
            StateConflict: the client cannot be used any more.
        """
        self._standing.check()
        if self._supervisor is None:
            raise StateConflict("this client is not open: use it inside 'async with DispatchClient(...)'")
        return AsyncErrand(
            draft=make_draft(self.session, call, options),
            slot=slot,
            timeout_ms=options.timeout_ms,
            admission_s=admission_bound_s(options, self._options),
            waits_for_room=options.wait_for_room,
        )

    async def begin(self, errand: AsyncErrand) -> float:
        """Queue the request; returns how many seconds its reply may take. On any exception the caller calls `leave`.

        Raises:
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of `call`.
        """
        self._standing.check()  # some time may have passed since the errand was made
        draft = errand.draft
        self.inbox.expect(
            draft.request_id, errand.slot, fingerprint=draft.submission.fingerprint, lasting=draft.lasting
        )
        self._pump.wake()
        reply_s = await self._submitter.admit(errand)
        self._admitted(errand)
        return reply_s

    async def conclude(self, errand: AsyncErrand, until: float) -> Reply:
        """Return the reply of an errand whose outcome is there, or overdue; its body is read until `until`.

        Raises:
            DispatchError: the outcome is an error, or how the request ended cannot be learnt.
        """
        if errand.slot.done():
            outcome = errand.slot.result()
            if isinstance(outcome, DispatchError):
                raise outcome
            if isinstance(outcome, Reply):
                return outcome
            with anyio.move_on_after(until - time.monotonic()):
                reply = await self._bodies.read(outcome)
                if self._tasks is not None and not errand.draft.repeatable:
                    self._tasks.start_soon(self._bodies.release, outcome)
                return reply
        overdue = errand.no_word(time.monotonic() - self._pump.last_contact)
        self.leave(errand)
        return overdue

    def leave(self, errand: AsyncErrand) -> None:
        """Stop waiting for `errand` and see to it, in the background, that it does not run for nobody."""
        if errand.has_ended() or errand.surely_not_queued() or errand.draft.lasting or self._tasks is None:
            self.inbox.withdraw(errand.request_id, errand.slot)
            return
        self.inbox.abandon(errand.request_id, errand.slot, 0.0 if self._pump.retired else reply_due())
        self._pump.wake()
        self._tasks.start_soon(self._farewell.retire, errand)

    def ask_after_overdue(self) -> None:
        """Have the group end what is past its deadline."""
        self._overdue.ask()

    async def catch_up(self) -> None:
        """Take what replies there are, within a bound: the pump may have had no turn for a while."""
        with anyio.move_on_after(LAST_DRAIN_S):
            try:
                await self._pump.drain()
            except FabricError as error:
                _log.info("replies_not_read", producer_id=self.session.producer_id, reason=str(error))

    async def state_of(self, request_id: str) -> Any:
        """Ask the group where a request is; the answer is `fabric_snapshot`'s.

        Raises:
            FabricError: it does not say.
        """
        return await self._connection.run(self.session.group, state_of(request_id))

    async def aclose(self) -> None:
        """Cancel what is outstanding, wait for that at most `close_ms`, and end. Repeatable; cannot be cancelled."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        self._standing.end(self.session.closed)
        self._liveness.stop()
        with anyio.CancelScope(shield=True):
            if not supervisor.done():
                self.inbox.fail_lasting(self.session.interrupted)
                with anyio.move_on_after(self._options.close_ms / 1000):
                    await self._cancel_outstanding()
                self.inbox.fail_all(self.session.closed)
                await self.catch_up()
            self._stop.set()
            await asyncio.wait([supervisor])
            await anyio.to_thread.run_sync(self._liveness.join)
        if not supervisor.cancelled() and (failure := supervisor.exception()) is not None:
            raise failure

    async def _supervise(self, started: anyio.Event) -> None:
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for _ in range(SENDERS):
                tasks.start_soon(self._pipeline.run)
            tasks.start_soon(self._pump.run)
            tasks.start_soon(self._look_after)
            tasks.start_soon(self._overdue.run)
            started.set()
            await self._stop.wait()
            self._tasks = None
            tasks.cancel_scope.cancel()

    def _supervisor_ended(self, supervisor: asyncio.Task[None]) -> None:
        self._tasks = None
        self._liveness.stop()
        if self._standing.good:  # nobody closed it: a bug in the background work, or the loop is being torn down
            self._standing.end(_broken)
            self.inbox.fail_all(_broken)
            if not supervisor.cancelled():
                _log.error("producer_broken", producer_id=self.session.producer_id, error=repr(supervisor.exception()))

    def _admitted(self, errand: AsyncErrand) -> None:
        """Note what the submit came to: the reply is due, or here already."""
        if errand.replay is not None:
            self.inbox.settle(errand.request_id, errand.replay)
            return
        self.inbox.admitted(errand.request_id)
        if errand.lapsed:  # the group may have taken this producer for gone and dropped earlier requests
            self._interrupted()

    async def _reply(self, errand: AsyncErrand, reply_s: float) -> Reply:
        until = time.monotonic() + reply_s
        errand.expect(reply_s)
        pause = errand.ask_at - time.monotonic()
        while True:
            began = time.monotonic()
            answered = await errand.slot.within(pause)
            if time.monotonic() - began > pause + LATE_S:  # while the loop was blocked the pump had no turn, either
                until = max(until, time.monotonic() + LAST_DRAIN_S)
                if not answered:
                    await self.catch_up()
            if errand.slot.done() or time.monotonic() >= until:
                break
            self.ask_after_overdue()
            errand.asked_now()
            pause = min(errand.ask_at, until) - time.monotonic()
        return await self.conclude(errand, until)

    async def _cancel_outstanding(self) -> None:
        told: set[str] = set()
        async with anyio.create_task_group() as cancels:
            while self.inbox.busy():
                for request_id in set(self.inbox.outstanding(admitted_only=True)) - told:  # some are only now admitted
                    told.add(request_id)
                    cancels.start_soon(self._farewell.cancel, request_id, "the client was closed")
                await anyio.sleep(_CLOSE_POLL_S)

    async def _look_after(self) -> None:
        """After each interruption tell the callers whose request the group has dropped or lost meanwhile."""
        while True:
            await self._doubt.wait()
            self._doubt = anyio.Event()
            if not (ids := self.inbox.outstanding(admitted_only=True)):
                continue
            try:
                outcomes = await unanswerable(self._connection, self.session.group, ids)
                await self._pump.drain()  # a frame goes before what is concluded here
            except DispatchError as error:
                _log.info("requests_not_looked_after", producer_id=self.session.producer_id, reason=str(error))
                self._doubt.set()
                await anyio.sleep(_LOOK_AGAIN_S)
                continue
            for request_id, outcome in outcomes.items():
                self.inbox.settle(request_id, outcome)

    def _interrupted(self) -> None:
        self._doubt.set()

    def _from_thread(self, callback: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed, and with it everything that could wait
            self._liveness.stop()


def _broken() -> DispatchError:
    return FabricError("the client's background work ended unexpectedly; open a new client")

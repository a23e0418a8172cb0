"""The queued path for blocking code: each caller submits in its own thread, one pump thread brings the replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import structlog

from dispatch.contract import Call, Reply
from dispatch.errors import DispatchError, FabricUnavailable, OutcomeUnknown, RequestRefused
from dispatch.fabric import functions
from dispatch.fabric.frames import Frame
from dispatch.fabric.functions import Admission
from dispatch.fabric.patience import answered_within
from dispatch.fabric.sync import BlockingConnection
from dispatch.fabric.verifying import verify_library_blocking
from dispatch.producer.background import Background
from dispatch.producer.blocking_errand import BlockingErrand, Submit, Waiting
from dispatch.producer.blocking_pump import BlockingPump
from dispatch.producer.blocking_stream import BlockingQueuedStream
from dispatch.producer.bodies import RETRY_S, body_key, with_body
from dispatch.producer.draft import BODY_TTL_MS, make_draft, require_stream, require_whole
from dispatch.producer.errand import RETRY_MAX_S, RETRY_MIN_S, admission_bound_s
from dispatch.producer.farewell import FAREWELL_S, reply_due
from dispatch.producer.inbox import Inbox, Outcome
from dispatch.producer.intake import Reservoir
from dispatch.producer.liveness import Listener, Liveness, beat_connection
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.overdue import ROUNDS_MAX, end_overdue
from dispatch.producer.recovery import row_of, state_of
from dispatch.producer.session import Session
from dispatch.producer.standing import Standing

_log = structlog.get_logger(__name__)

_CLOSE_POLL_S = 0.01
_LATE_S = 0.1
_LAST_ROUND_S = 1.0
_ASK_S = 1.0


class BlockingQueuedPath:
    """One producer session for many threads of one process."""

    def __init__(self, url: str, options: ClientOptions) -> None:
        self._url = url
        self._options = options
        self.session = Session.begin(options)
        self.inbox = Inbox(time.monotonic)
        self.reservoir = Reservoir(options)
        self._connection = self.connection = BlockingConnection(url)
        self._standing = Standing(self.session, self.inbox)
        self._pump = BlockingPump(self._connection, self.session, self.inbox, self._standing.taken_over)
        self._liveness = Liveness(
            self.session,
            lambda: beat_connection(url, self.session),
            Listener(lapsed=self._pump.look_after, taken_over=self._standing.taken_over),
        )
        self._standing.silencers = (self._liveness.stop, self._pump.retire)
        self._background = Background(f"background-{self.session.producer_id}")
        self._asked = threading.Event()
        self._ended = False

    def open(self) -> None:
        """Check the library, give the first sign of life and start the threads.

        Raises:
            FabricUnavailable, LibraryProblem, ConfigurationError: the group cannot be used; nothing was started.
        """
        session = self.session
        try:
            verify_library_blocking(self._connection, session.group)
            self._connection.keep_alive(
                session.alive_key,
                session.session_id,
                session.replies_key,
                alive_ms=session.liveness_ms,
                replies_ms=session.replies_ttl_ms,
            )
        except BaseException:
            self._connection.close()
            raise
        self._pump.start()
        self._liveness.start()

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that opened the path: its threads did not come along."""
        return self.session.forked

    def prepare(self, call: Call, options: CallOptions) -> Waiting:
        """Make a request of `call`; nothing is sent yet.

        Raises:
            InvalidRequest: the call cannot be queued, or asks for a stream.
            StateConflict: the client cannot be used any more.
        """
        require_whole(call)
        return self.waiting(call, options, Future())

    def stream(self, call: Call, options: CallOptions) -> BlockingQueuedStream:
        """Return the stream of `call`; nothing is sent before it is opened.

        Raises:
            InvalidRequest: the call cannot be queued, or does not ask for a stream.
            StateConflict: the client cannot be used any more.
        """
        require_stream(call, options)
        return BlockingQueuedStream(self, call, options)

    def waiting(self, call: Call, options: CallOptions, slot: Future[Outcome]) -> Waiting:
        """Make a request of `call` whose outcome goes to `slot`; nothing is sent yet.

        Raises:
            InvalidRequest: the call cannot be queued.
            StateConflict: the client cannot be used any more.
        """
        self._standing.check()
        errand = BlockingErrand(
            draft=make_draft(self.session, call, options),
            slot=slot,
            timeout_ms=options.timeout_ms,
            admission_s=admission_bound_s(options, self._options),
            waits_for_room=options.wait_for_room,
        )
        return Waiting(errand)

    def begin(self, waiting: Waiting) -> None:
        """Queue the request, blocking until it is admitted. On any exception the caller calls `leave`.

        Raises:
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict: nothing was queued.
            FabricUnavailable: Valkey did not answer; whether it was queued is not known, and the caller cancels it.
        """
        errand = waiting.errand
        draft = errand.draft
        self.inbox.expect(
            draft.request_id, errand.slot, fingerprint=draft.submission.fingerprint, lasting=draft.lasting
        )
        self._pump.wake()
        try:
            reply_s = self.admit(errand)
        except FabricUnavailable:
            self.leave_soon(waiting)
            raise
        waiting.end = time.monotonic() + reply_s
        errand.expect(reply_s)
        waiting.until = errand.overdue_at
        if errand.replay is not None:
            self.inbox.settle(errand.request_id, errand.replay)
            return
        self.inbox.admitted(errand.request_id)
        if errand.lapsed:  # the group may have taken this producer for gone and dropped earlier requests
            self._pump.look_after()

    def finish(self, waiting: Waiting) -> Reply:
        """Wait for the terminal reply, whatever its ending.

        Raises:
            FabricUnavailable, StateConflict: no reply will come; the text says what is known.
        """
        return self.conclude(waiting, self._outcome(waiting))

    def conclude(self, waiting: Waiting, outcome: Outcome | None) -> Reply:
        """Make the reply of an outcome; None = none came in time.

        Raises:
            DispatchError: the outcome is an error, or how the request ended cannot be learnt.
        """
        if isinstance(outcome, DispatchError):
            raise outcome
        if isinstance(outcome, Frame):
            return self._read_body(waiting, outcome)
        if outcome is None:
            self.leave_soon(waiting)
            outcome = waiting.errand.no_word(time.monotonic() - self._pump.last_contact)
        return outcome

    def leave(self, waiting: Waiting) -> None:
        """Stop waiting and see to it that the request does not run for nobody. One attempt; never raises an error."""
        if self._let_go(waiting):
            self._farewell(waiting.errand)

    def leave_soon(self, waiting: Waiting) -> None:
        """Leave without a call in this thread: its caller has waited as long as it may."""
        until = time.monotonic() + FAREWELL_S
        if self._let_go(waiting):
            self._background.soon(lambda: self._farewell(waiting.errand) if time.monotonic() < until else None)

    def _let_go(self, waiting: Waiting) -> bool:
        """Stop waiting, once; returns whether the request has to be told to stop."""
        if waiting.left:
            return False
        waiting.left = True
        errand = waiting.errand
        if errand.has_ended() or errand.surely_not_queued() or errand.draft.lasting:
            self.inbox.withdraw(errand.request_id, errand.slot)
            return False
        self.inbox.abandon(errand.request_id, errand.slot, 0.0 if self._pump.retired else reply_due())
        self._pump.wake()
        return True

    def _farewell(self, errand: BlockingErrand) -> None:
        try:
            if errand.surely_ours() or self._is_ours(errand.request_id):
                self._cancel(self._connection, errand.request_id, "the caller left")
            else:
                self.inbox.forget(errand.request_id)
        except DispatchError as error:
            _log.warning("request_not_cancelled", request_id=errand.request_id, reason=str(error))

    def close(self) -> None:
        """Cancel what is outstanding, wait for that at most about `close_ms`, and end. Repeatable."""
        if self._ended:
            return
        self._ended = True
        self._standing.end(self.session.closed)
        self.inbox.fail_lasting(self.session.interrupted)
        until = time.monotonic() + self._options.close_ms / 1000
        try:
            self._cancel_outstanding(until)
        finally:
            self.inbox.fail_all(self.session.closed)
            self._liveness.stop()
            self._pump.stop()
            self._pump.join()
            self._background.stop()
            self._liveness.join()
            self._connection.close()

    def admit(self, errand: BlockingErrand) -> float:
        """Submit until the group has answered; returns how many seconds the reply may take from now.

        Raises:
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of `begin`.
        """
        with errand.draft.span:
            return self._admit(errand)

    def _admit(self, errand: BlockingErrand) -> float:
        pause = RETRY_MIN_S
        while True:
            answer = self._attempt(errand)
            try:
                reply_s = errand.judge(answer)
            except RequestRefused as refusal:
                wait([errand.slot], errand.room_in_s(refusal))
                errand.check()
                continue
            if reply_s is not None:
                return reply_s
            if errand.admission_left_s() <= pause:
                raise errand.unanswered(answer)
            self._standing.check()
            time.sleep(pause)
            pause = min(pause * 2, RETRY_MAX_S)

    def _attempt(self, errand: BlockingErrand) -> Admission | DispatchError:
        draft = errand.draft
        with answered_within(errand.admission_left_s()):
            try:
                if errand.must_store and draft.body_key is not None:
                    self._connection.put(draft.body_key, draft.body, ttl_ms=BODY_TTL_MS)
                    errand.stored = True
            except DispatchError as error:
                return error
            submit = draft.submit(errand.timeout_left_ms())
            errand.attempt = Submit()
            try:
                errand.attempt.answer = self._connection.run(self.session.group, submit)
            except DispatchError as error:
                errand.attempt.answer = error
        return errand.attempt.answer

    def _outcome(self, waiting: Waiting) -> Outcome | None:
        """Wait for the outcome; once it is overdue, have the group end what is past its deadline. None = none came."""
        errand = waiting.errand
        slot, left = errand.slot, errand.ask_at - time.monotonic()
        while True:
            try:
                return slot.result(max(0.0, left))
            except FutureTimeout:
                if (late_s := time.monotonic() - waiting.end) >= 0:
                    # A process that stood still goes on with all its threads: the pump gets its turn first.
                    return slot.result() if late_s > _LATE_S and wait([slot], _LAST_ROUND_S).done else None
            self.ask_after_overdue()
            errand.asked_now()
            left = min(errand.ask_at, waiting.end) - time.monotonic()

    def soon(self, work: Callable[[], object]) -> None:
        """Do `work` in the background; from any place, also from a finaliser."""
        self._background.soon(work)

    def ask_after_overdue(self) -> None:
        """Have the group end what is past its deadline, soon."""
        if not self._asked.is_set():  # once for all
            self._asked.set()
            self._background.soon(self._end_overdue)

    def state_of(self, request_id: str) -> Any:
        """Ask the group where a request is; the answer is `fabric_snapshot`'s.

        Raises:
            FabricError: it does not say.
        """
        with answered_within(_ASK_S):
            return self._connection.run(self.session.group, state_of(request_id))

    def _end_overdue(self) -> None:
        self._asked.clear()
        with answered_within(_ASK_S):
            for _ in range(ROUNDS_MAX):
                if not self._connection.run(self.session.group, end_overdue()).more:
                    return

    def _read_body(self, waiting: Waiting, frame: Frame) -> Reply:
        where = body_key(self.session.group, frame)
        while True:
            try:
                with answered_within(max(_LATE_S, waiting.end - time.monotonic())):
                    body = self._connection.get(where)
                break
            except FabricUnavailable as error:
                if time.monotonic() > waiting.end:
                    name = frame.reply.request_id
                    raise OutcomeUnknown(
                        f"request {name} ended, but its reply's body could not be read in time"
                    ) from error
                time.sleep(RETRY_S)
        reply = with_body(frame, body)
        if waiting.errand.draft.repeatable:
            return reply
        try:
            self._connection.put(where, b"", ttl_ms=1)  # read once: free its memory now
        except DispatchError as error:
            _log.info("reply_body_left_to_expire", request_id=reply.request_id, reason=str(error))
        return reply

    def _is_ours(self, request_id: str) -> bool:
        row = row_of(self._connection.run(self.session.group, state_of(request_id)))
        return row is not None and row["producer_id"] == self.session.producer_id

    def _cancel(self, connection: BlockingConnection, request_id: str, reason: str) -> None:
        call = functions.request_cancel(request_id, actor=self.session.producer_id, reason=reason)
        if connection.run(self.session.group, call).status == "UNKNOWN":
            self.inbox.forget(request_id)

    def _cancel_outstanding(self, until: float) -> None:
        told: set[str] = set()
        try:
            # A connection of its own, which gives a frozen server up within the bound of closing.
            with BlockingConnection(self._url, timeout_s=self._options.close_ms / 1000) as connection:
                while self.inbox.busy() and time.monotonic() < until:
                    for request_id in set(self.inbox.outstanding(admitted_only=True)) - told:  # some only now admitted
                        told.add(request_id)
                        self._cancel(connection, request_id, "the client was closed")
                    time.sleep(_CLOSE_POLL_S)
        except DispatchError as error:
            _log.warning("requests_not_cancelled", producer_id=self.session.producer_id, reason=str(error))

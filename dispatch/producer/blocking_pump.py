"""The reply pump of the blocking client: one thread, the same rules as the asynchronous one (see `pump`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from dispatch.errors import FabricUnavailable
from dispatch.fabric import functions
from dispatch.fabric.sync import BlockingConnection, BlockingWaiter
from dispatch.producer.inbox import Inbox
from dispatch.producer.pump import FRAMES_MAX, WAIT_S, retry_pause_s
from dispatch.producer.recovery import conclusion, pages, state_of
from dispatch.producer.session import Session

_log = structlog.get_logger(__name__)

JOIN_S = 1.0


class BlockingPump:
    """Moves frames from the producer's reply list into the inbox, in a daemon thread."""

    def __init__(
        self, connection: BlockingConnection, session: Session, inbox: Inbox, taken_over: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._session = session
        self._inbox = inbox
        self._taken_over = taken_over
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._doubtful = threading.Event()
        self._untrimmed = False
        self.retired = False
        self._thread = threading.Thread(target=self._run, name=f"replies-{session.producer_id}", daemon=True)
        self.last_contact = time.monotonic()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Say that a reply is due."""
        self._wanted.set()

    def look_after(self) -> None:
        """Say that some requests may never be answered; the thread finds out which."""
        self._doubtful.set()

    def retire(self) -> None:
        """Read no more: the list is another session's, and so are the tokens."""
        self.retired = True

    def stop(self) -> None:
        """End after what is under way."""
        self._stopped.set()
        self._wanted.set()

    def join(self) -> None:
        """Wait until the thread has ended, at most a second (it may stand in a call to a frozen server)."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        waiter = self._connection.waiter()
        failures = 0
        try:
            while True:
                self._wanted.clear()  # before looking, so that what comes after it is not slept over
                if self._stopped.is_set():
                    return
                if self.retired or not (self._inbox.busy() or self._untrimmed):
                    self._wanted.wait()
                    continue
                try:
                    self._round(waiter)
                    if self._doubtful.is_set():
                        self._doubtful.clear()
                        self._conclude()
                except Exception as error:  # noqa: BLE001 - a pump that died of an error would leave every caller waiting
                    failures += 1
                    self._doubtful.set()
                    if failures == 1:
                        _log.warning("reply_pump_interrupted", producer_id=self._session.producer_id, error=str(error))
                    self._stopped.wait(retry_pause_s(failures))
                    continue
                if failures:
                    _log.info("reply_pump_restored", producer_id=self._session.producer_id, failures=failures)
                    failures = 0
        finally:
            waiter.close()

    def _round(self, waiter: BlockingWaiter) -> None:
        session = self._session
        try:
            raws = waiter.wait_then_read(session.wake_key, WAIT_S, session.replies_key, FRAMES_MAX)
        except FabricUnavailable:
            # The list may still be readable: a reply must not wait for the waiter's connection.
            self._drain()
            raise
        self._drain(raws)

    def _drain(self, raws: list[bytes] | None = None) -> None:
        session = self._session
        if raws is None:
            raws = self._connection.read_frames(session.replies_key, FRAMES_MAX)
        while True:
            self.last_contact = time.monotonic()
            upto = self._inbox.receive(raws)
            self._untrimmed = upto is not None  # until the server has said that it trimmed them
            if upto is None:
                return
            call = functions.reply_ack(session.producer_id, session.session_id, upto=upto)
            answer, raws = self._connection.run_then_read(session.group, call, session.replies_key, FRAMES_MAX)
            self._untrimmed = False
            if not answer.owner:
                self._taken_over()
                return

    def _conclude(self) -> None:
        """Tell callers whose request the group has dropped or lost while server or process stood still."""
        outcomes = {}
        for page in pages(self._inbox.outstanding(admitted_only=True)):
            # In one round trip: while this thread asks, nobody reads replies.
            answers = self._connection.run_many(self._session.group, [state_of(request_id) for request_id in page])
            for request_id, answer in zip(page, answers, strict=True):
                if (outcome := conclusion(request_id, answer)) is not None:
                    outcomes[request_id] = outcome
        self._drain()  # a frame goes before what is concluded here
        for request_id, outcome in outcomes.items():
            self._inbox.settle(request_id, outcome)

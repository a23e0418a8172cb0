"""The producer's sign of life, from a thread of its own: a busy event loop or a slow callback cannot stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from dispatch.fabric.sync import BlockingConnection
from dispatch.producer.session import Session

_log = structlog.get_logger(__name__)

_RETRY_MIN_S, _RETRY_MAX_S = 0.05, 1.0
_DOUBLINGS_MAX = 10
_TIMEOUT_MAX_S = 2.0
JOIN_S = 1.0


class Beat(Protocol):
    """The part of a blocking connection that a sign of life needs."""

    def get(self, key: str) -> bytes | None:
        """Read a string."""
        ...

    def keep_alive(self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int) -> None:
        """Write the liveness marker and renew the expiry of the reply list."""
        ...

    def renew_alive(self, alive_key: str, replies_key: str, *, alive_ms: int, replies_ms: int) -> bool:
        """Renew the expiry of both; returns whether the marker was there."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class Listener:
    """What is called, in the liveness thread, when the session's standing changed.

    `lapsed`: a gap longer than the TTL, the group may have taken the producer for gone. `taken_over`: another session
    owns the producer now; no further sign is given.
    """

    lapsed: Callable[[], None]
    taken_over: Callable[[], None]


class Liveness:
    """Refreshes a session's liveness every third of its TTL until stopped; an error only makes it try sooner."""

    def __init__(self, session: Session, connect: Callable[[], Beat], listener: Listener) -> None:
        self._session = session
        self._connect = connect
        self._listener = listener
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"liveness-{session.producer_id}", daemon=True)
        self.last_beat = time.monotonic()

    def start(self) -> None:
        """Start the thread. The caller has just given a sign of life itself."""
        self.last_beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Give no further sign. Returns at once; repeatable, from any thread."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the thread has ended, at most a second (it may stand in a call to a frozen server)."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        interval = self._session.liveness_ms / 3000
        retry = min(_RETRY_MIN_S, interval)
        pause, failures, beat = interval, 0, None
        try:
            while not self._stopped.wait(pause):
                try:
                    beat = beat or self._connect()
                    self._give_sign(beat)
                except Exception as error:  # noqa: BLE001 - a thread that died of an error would let the producer die
                    failures += 1
                    pause = min(retry * 2.0 ** min(failures, _DOUBLINGS_MAX), _RETRY_MAX_S, interval)
                    if failures == 1:
                        _log.warning("liveness_interrupted", producer_id=self._session.producer_id, error=str(error))
                else:
                    if failures:
                        _log.info("liveness_restored", producer_id=self._session.producer_id, failures=failures)
                    pause, failures = interval, 0
        finally:
            if beat is not None:
                beat.close()

    def _give_sign(self, beat: Beat) -> None:
        session = self._session
        owner = beat.get(session.alive_key)
        if owner is not None and owner != session.session_id.encode():
            # The newest session owns the producer. Writing here would take it away from that one.
            self._stopped.set()
            self._listener.taken_over()
            return
        times = {"alive_ms": session.liveness_ms, "replies_ms": session.replies_ttl_ms}
        # The marker is written only when it is missing: a server whose memory is full takes no write.
        there = owner is not None and beat.renew_alive(session.alive_key, session.replies_key, **times)
        if not there:
            beat.keep_alive(session.alive_key, session.session_id, session.replies_key, **times)
        now = time.monotonic()
        # A marker can be missing without a pause on our side: evicted, deleted, or lost with a server.
        lapsed = not there or now - self.last_beat > session.liveness_ms / 1000
        self.last_beat = now
        if lapsed:
            self._listener.lapsed()


def beat_connection(url: str, session: Session) -> BlockingConnection:
    """Open the connection for signs of life; it gives a frozen server up in time for the next attempt."""
    return BlockingConnection(url, timeout_s=min(_TIMEOUT_MAX_S, session.liveness_ms / 3000))

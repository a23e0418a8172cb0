"""What no blocking caller should stand still for, in a thread of its own: there a silent server holds nobody up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import structlog

from dispatch.errors import DispatchError

_log = structlog.get_logger(__name__)

_JOIN_S = 1.0


class Background:
    """Does one thing after the other. The thread starts with the first one; an error of one is no reason to stop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._starting = threading.RLock()
        self._started = False
        self._thread: threading.Thread | None = None

    def soon(self, work: Callable[[], object]) -> None:
        """Do `work` when what came before it is done. Returns at once.

        From any place, also from a finaliser: those run wherever a thread stands, in the middle of this, too.
        """
        self._work.put(work)
        with self._starting:
            if self._started:
                return
            self._started = True
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End after what is under way; waits for that at most a second."""
        self._work.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except DispatchError as error:
                _log.debug("background_work_failed", error=str(error))

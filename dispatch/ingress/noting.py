"""What is noted of the answers to calls: counts for the observer, and a line of the log for some of the refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus

import structlog

from dispatch.contract.answers import Answer
from dispatch.fabric.observing import NOBODY, Observer

log = structlog.get_logger(__name__)

EVERY_S = 1.0
"""A reason is logged at most so often: refusals come by the thousand, and nobody reads them one by one."""

_REASONS_MAX = 200
_REASON, _ENDED = "x-dispatch-reason", "ended-"


class Noting:
    """Notes how calls were answered."""

    def __init__(self, observer: Observer = NOBODY, clock: Callable[[], float] = time.monotonic) -> None:
        self._observer = observer
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}

    def answer(self, operation: str, answer: Answer) -> None:
        """Note an answer that goes out."""
        reason = "" if answer.status < HTTPStatus.BAD_REQUEST else dict(answer.fields).get(_REASON, "")
        if reason:
            # An endpoint's own answer passes its headers on, so the word is not sure to be one of ours.
            if reason not in self._logged and len(self._logged) >= _REASONS_MAX:
                reason = "other"
            self._log(operation, answer.status, reason)
        self._observer.answered(operation, answer.status, reason)

    def stream(self, operation: str) -> None:
        """Note a stream whose head went out."""
        self._observer.answered(operation, HTTPStatus.OK, "")

    def _log(self, operation: str, status: int, reason: str) -> None:
        at, left_out = self._logged.get(reason, (float("-inf"), 0))
        now = self._clock()
        if now - at < EVERY_S or reason.startswith(_ENDED):  # how it ended is the gateway's to log
            self._logged[reason] = (at, left_out + 1)
            return
        self._logged[reason] = (now, 0)
        log.info("call_refused", operation=operation, status=int(status), reason=reason, left_out=left_out)

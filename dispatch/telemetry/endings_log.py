"""Lines about requests that ended on this gateway: each that succeeded at debug, some of those that did not at info."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import structlog

from dispatch.fabric.observing import Observer
from dispatch.fabric.records import Lease, Outcome, Settlement

log = structlog.get_logger(__name__)

_LEVEL = logging.getLogger(__name__)

EVERY_S = 1.0
"""Of requests that end in the same way in the same pool one is logged at info so often; metrics count all of them."""

_KINDS_MAX = 10_000


class EndingsLog(Observer):
    """Logs what became of results."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def settled(self, lease: Lease, item: Settlement, word: str, server_ms: int) -> None:
        """Log one result."""
        if item.outcome is Outcome.SUCCEEDED and not _LEVEL.isEnabledFor(logging.DEBUG):
            return  # the usual case, on the hot path: not even the line's members are gathered
        left_out = self._left_out(lease.pool_id, item)
        write = log.debug if left_out is None else log.info
        write(
            "attempt_settled",
            request_id=lease.request_id,
            pool=lease.pool_id,
            endpoint=lease.endpoint_id,
            outcome=item.outcome.value,
            answer=word,
            attempt=lease.attempt,
            status=item.status,
            error_type=item.error_type or None,
            queue_ms=lease.claimed_ms - lease.submitted_ms,
            execution_ms=server_ms - lease.claimed_ms,
            left_out=left_out or None,
        )

    def _left_out(self, pool: str, item: Settlement) -> int | None:
        """Return how many of its kind were left out before it, None if it is to be left out itself."""
        if item.outcome is Outcome.SUCCEEDED:
            return None
        kind = (pool, item.error_type or item.outcome.value)
        at, left_out = self._logged.get(kind, (float("-inf"), 0))
        now = self._clock()
        if now - at < EVERY_S or (kind not in self._logged and len(self._logged) >= _KINDS_MAX):
            self._logged[kind] = (at, left_out + 1)
            return None
        self._logged[kind] = (now, 0)
        return left_out

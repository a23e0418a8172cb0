"""The history as a place where the recorder takes its spans to."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread
from opentelemetry.sdk.trace import ReadableSpan

from dispatch.telemetry.history.store import HistoryStore


class HistorySink:
    """Writes spans, one batch at a time, beside the event loop.

    It raises `HistoryUnavailable` while the history is away: whoever brings the spans keeps them and comes again.
    """

    name = "history"
    patience_s: float | None = None
    """What is not taken stays in the stream."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._one = anyio.CapacityLimiter(1)

    async def take(self, spans: Sequence[ReadableSpan]) -> None:
        """Write the spans; returns when they are in the history. Cancelling gives up waiting, not the write.

        Raises:
            HistoryUnavailable: not all of them were written, or it is not known; all may be brought again.
        """
        await anyio.to_thread.run_sync(self._store.write, spans, limiter=self._one, abandon_on_cancel=True)

    async def aclose(self) -> None:
        """Close the history."""
        await anyio.to_thread.run_sync(self._store.close)

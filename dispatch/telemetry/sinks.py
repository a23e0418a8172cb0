"""Where spans go that a recorder makes: a database of history, a collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio.to_thread
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from dispatch.errors import DispatchError

_CLOSE_S = 0.5


class SinkAway(DispatchError):
    """A sink cannot take spans now: they are offered again later."""


class Sink(Protocol):
    """Takes spans, a batch at a time.

    Duties:

    1. Return when the whole batch is kept where it is meant to be, however often it is offered (spans keep their ids).
    2. Raise `SinkAway` where a later attempt may help; any other error means that this batch will never be taken.
    3. Let a cancellation through.
    """

    name: str
    """A word: it labels metrics and names the sink's reader (consumer group)."""
    patience_s: float | None
    """How long a batch is offered while the sink is away; then it is counted as dropped. None = for ever."""

    async def take(self, spans: Sequence[ReadableSpan]) -> None:
        """Keep these spans."""
        ...

    async def aclose(self) -> None:
        """End; nothing is taken any more. Repeatable."""
        ...


class ThreadSink:
    """A sink made of a blocking function: `write` keeps the spans, in a thread.

    `away` are the errors by which it says that it cannot be reached. Offered for ever: what is not taken stays in the
    stream, which is bounded, and what is trimmed from it unread is counted.
    """

    patience_s: float | None = None

    def __init__(
        self,
        name: str,
        write: Callable[[Sequence[ReadableSpan]], None],
        *,
        away: type[Exception] | tuple[type[Exception], ...],
        close: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._write = write
        self._away = away
        self._close = close

    async def take(self, spans: Sequence[ReadableSpan]) -> None:
        """Keep these spans."""
        try:
            # Abandoned on cancel: a database that does not answer must not hold up the end of the process.
            await anyio.to_thread.run_sync(self._write, spans, abandon_on_cancel=True)
        except self._away as error:
            raise SinkAway(str(error)) from error

    async def aclose(self) -> None:
        """Close what is behind it."""
        close, self._close = self._close, None
        if close is not None:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await anyio.to_thread.run_sync(close, abandon_on_cancel=True)


class ExporterSink:
    """A sink made of an OpenTelemetry exporter: it gets the spans of sampled traces only."""

    def __init__(self, name: str, exporter: SpanExporter, *, patience_s: float = 30.0) -> None:
        self.name = name
        self.patience_s: float | None = patience_s
        self._exporter = exporter
        self._closed = False

    async def take(self, spans: Sequence[ReadableSpan]) -> None:
        """Keep the sampled ones of these spans."""
        sampled = [span for span in spans if span.context is not None and span.context.trace_flags.sampled]
        if not sampled:
            return
        result = await anyio.to_thread.run_sync(self._exporter.export, sampled, abandon_on_cancel=True)
        if result is not SpanExportResult.SUCCESS:
            raise SinkAway("the collector did not take the spans")

    async def aclose(self) -> None:
        """End the exporter."""
        if not self._closed:
            self._closed = True
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await anyio.to_thread.run_sync(self._exporter.shutdown, abandon_on_cancel=True)

"""The recorders of one process: one for each sink, over a connection of their own."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio
import structlog

from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.telemetry.recorder import Recorder, RecorderOptions, unnoticed
from dispatch.telemetry.sinks import Sink

log = structlog.get_logger(__name__)

FLUSH_S = 0.5
"""How long the end may take: what is not recorded by then stands in Valkey, for another process or the next start."""

_CLOSE_S = 0.1
_CLIENT = "redis"  # it takes a third of the time to read records: its parser is in C, and there is one reader


class Recording:
    """Records while it is entered. With no sink it does nothing and connects to nothing.

    It may be entered and left in different tasks of one event loop.
    """

    def __init__(self, url: str, options: RecorderOptions, sinks: Sequence[Sink]) -> None:
        self._url = url
        self._options = options
        self._sinks = tuple(sinks)
        self._recorders: list[Recorder] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        """Start; Valkey need not answer yet.

        Raises:
            ConfigurationError: the URL is wrong.
        """
        if self._sinks:
            self._connection = connection = await connect(self._url, client=_CLIENT)
            quiet = replace(self._options, on_delivery=unnoticed)  # the first tells of deliveries: once is enough
            choices = [self._options, *[quiet] * (len(self._sinks) - 1)]
            self._recorders = [Recorder(connection, *each) for each in zip(choices, self._sinks, strict=True)]
            # Tasks of their own, awaited at the end: a task group could not be left elsewhere.
            self._tasks = [asyncio.create_task(self._record(recorder)) for recorder in self._recorders]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record what is there, at most for `FLUSH_S`, and close the sinks."""
        with anyio.CancelScope(shield=True):
            for recorder in self._recorders:
                recorder.stop(FLUSH_S)
            if self._tasks:
                await asyncio.wait(self._tasks)
            for sink in self._sinks:
                await sink.aclose()
            connection, self._connection = self._connection, None
            if connection is not None:
                with anyio.move_on_after(_CLOSE_S):
                    await connection.aclose()

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """Those that run, one for each sink; none before it is entered."""
        return tuple(self._recorders)

    async def _record(self, recorder: Recorder) -> None:
        try:
            await recorder.run()
        except Exception:  # noqa: BLE001 - a fault of ours ends the recording, never the gateway
            # As text: where logging is not set up, structlog would show local variables.
            trace = traceback.format_exc()
            log.error("recorder_failed", sink=recorder.stats().sink, trace=trace)  # noqa: TRY400 - see above

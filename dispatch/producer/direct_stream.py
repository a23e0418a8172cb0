"""A stream straight from an endpoint."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from dispatch.backend.streaming import BackendStream
from dispatch.contract import Reply
from dispatch.contract.chunk import Chunk
from dispatch.errors import StateConflict
from dispatch.producer.whereabouts import Whereabouts

if TYPE_CHECKING:  # it opens the streams
    from dispatch.backend.execution import Execution
    from dispatch.producer.direct import DirectPath

HELD_BYTES = 256 * 1024
"""How much is read ahead of the reader; then the endpoint has to wait, and its idle bound with it."""


class DirectStream:
    """One stream. A task of its own reads it, so that a wait of the reader's can end without ending the stream."""

    def __init__(self, path: DirectPath, stream: BackendStream, request_id: str, pool_id: str) -> None:
        self.request_id = request_id
        self.reply: Reply | None = None
        self._path = path
        self._stream = stream
        self._pool_id = pool_id
        self._ready: deque[Chunk] = deque()
        self._held_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[Execution] | None = None
        self._began = 0.0

    async def open(self) -> None:
        """Make the call.

        Raises:
            StateConflict: the client is closed.
        """
        self._began = time.monotonic()
        self._task = self._path.start(self._run())
        self._task.add_done_callback(lambda _: self._news.set())

    async def read(self, within_s: float) -> list[Chunk]:
        """Return the chunks that are there; waits for one. None come: the time is over, or the stream (`reply`).

        Raises:
            StateConflict: the client was closed.
        """
        if self._task is None:
            raise StateConflict("the stream was not opened")
        if not self._ready and not self._task.done():
            self._news.clear()
            try:
                async with asyncio.timeout(None if within_s == float("inf") else within_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        if self._ready:
            chunks = list(self._ready)
            self._ready.clear()
            self._held_bytes = 0
            self._room.set()
            return chunks
        if self._task.cancelled():
            raise StateConflict("the client was closed while the stream ran")
        if self._task.done():
            self._end(self._task.result())
        return []

    async def whereabouts(self) -> Whereabouts:
        """Say since when it runs."""
        return Whereabouts(running_ms=int((time.monotonic() - self._began) * 1000))

    def leave(self) -> None:
        """Stop reading: the connection is closed, so that the endpoint stops. Repeatable."""
        if self._task is not None:
            self._task.cancel()

    def leave_soon(self) -> None:
        """The same from any place, also from a finaliser."""
        if self._task is not None:
            with suppress(RuntimeError):  # the loop has ended, and the stream with it
                self._task.get_loop().call_soon_threadsafe(self.leave)

    async def _run(self) -> Execution:
        async with self._stream as stream:
            async for payload in stream:
                while self._held_bytes > HELD_BYTES:
                    self._room.clear()
                    await self._room.wait()
                self._ready.append(Chunk(payload.data, payload.event))
                self._held_bytes += len(payload.data)
                self._news.set()
            return stream.execution

    def _end(self, execution: Execution) -> None:
        self.reply = Reply(
            request_id=self.request_id,
            pool_id=self._pool_id,
            ending=execution.outcome,
            head=execution.head,
            body=execution.body,
            queue_ms=None,
            execution_ms=execution.execution_ms,
        )

"""Streams as an asynchronous program reads them."""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from dispatch.contract import Reply
from dispatch.contract.chunk import Chunk
from dispatch.errors import DispatchError, StateConflict, StreamTooSlow
from dispatch.producer.whereabouts import Whereabouts

SLOW_CONSUMER = "slow_consumer"
"""What the group calls a stream that was not taken as fast as it came."""


class StreamSource(Protocol):
    """How a stream gets here: through the queue, or directly."""

    @property
    def reply(self) -> Reply | None:
        """How it ended, None until then."""
        ...

    @property
    def request_id(self) -> str:
        """The request's id."""
        ...

    async def open(self) -> None:
        """Make the call."""
        ...

    async def read(self, within_s: float) -> list[Chunk]:
        """Return the chunks that are there; waits for one. None come: the time is over, or the stream (`reply`)."""
        ...

    async def whereabouts(self) -> Whereabouts | None:
        """Say where the request is; None = that cannot be learnt now."""
        ...

    def leave(self) -> None:
        """Let go of it, and stop the request if it has not ended. Repeatable."""
        ...


class ChunkStream:
    """The chunks of one call as they come.

        async for chunk in client.stream(model="m", messages=[...]):
            print(chunk.text, end="")

    The request is queued when the first chunk is asked for; what `complete()` raises before it has a reply is raised
    then. It is cancelled in the background when the loop is left early, when a task that waits for a chunk is
    cancelled, and when the object is forgotten before its end. Whoever keeps the object leaves by `aclose()`, or uses
    it as a context manager:

        async with client.stream(model="m", messages=[...]) as stream:
            async for chunk in stream:
                ...
        print(stream.reply.usage)

    `reply` is there when the chunks are over: usage, finish reasons, attempt, times. Its body is empty, unless an
    endpoint answered with an error and no chunk. A stream is read by one task at a time; chunks that wait for it are
    bounded (`stream_unread_bytes`).
    """

    def __init__(self, source: StreamSource, raising: Callable[[Reply], DispatchError] | None) -> None:
        """Read `source`. `raising` makes what is raised for an ending other than `succeeded`; None: nothing is."""
        self._source = source
        self._raising = raising
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._ready: deque[Chunk] = deque()
        self._over = False

    @property
    def request_id(self) -> str:
        """The id by which the group knows the request."""
        return self._source.request_id

    @property
    def ended(self) -> bool:
        """Whether all chunks were read and `reply` is there."""
        return self._source.reply is not None and not self._ready

    @property
    def reply(self) -> Reply:
        """How the request ended.

        Raises:
            StateConflict: it has not, or that cannot be known.
        """
        reply = self._source.reply
        if reply is None or self._ready:
            raise StateConflict(f"the stream of request {self.request_id} has not ended: read its chunks to the end")
        return reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk.

        Raises:
            RequestRefused, FabricUnavailable, ...: as of `complete()`, before the first chunk.
            RequestEnded: it ended otherwise than `succeeded`; `BackendError` for a direct call.
            StreamTooSlow: it was not read as fast as it came.
            StreamBroken, OutcomeUnknown: chunks, or how it ended, are not known.
        """
        if not self._ready:
            self._ready.extend(await self.read())
            if not self._ready:
                raise StopAsyncIteration
        return self._ready.popleft()

    async def read(self, within_s: float = math.inf) -> list[Chunk]:
        """Return the chunks that are there, about 64 KiB at most; waits up to `within_s` for the first of them.

        An empty list says that the time is over, or the stream (`ended`). Raises as iterating does.
        """
        if self._ready:
            chunks = list(self._ready)
            self._ready.clear()
            return chunks
        if self._over:
            return []
        try:
            if self._loop is None:
                self._check_process()
                self._loop = asyncio.get_running_loop()
                await self._source.open()
            chunks = await self._source.read(within_s)
        except BaseException:
            self._leave()
            raise
        if self._source.reply is not None and not chunks:
            self._over = True
            if (problem := problem_of_end(self._source.reply, self._raising)) is not None:
                raise problem
        return chunks

    async def whereabouts(self) -> Whereabouts | None:
        """Say whether the request waits or runs, and since when; None = that cannot be learnt now."""
        return await self._source.whereabouts()

    async def aclose(self) -> None:
        """Let go of the stream; a request that has not ended is cancelled, in the background. Repeatable."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A loop that was left by `break` forgets the stream; nothing else says that nobody reads it any more.
        loop = self._loop
        if self._over or loop is None or self._pid != os.getpid():
            return
        try:
            loop.call_soon_threadsafe(self._source.leave)  # wherever the object was collected
        except RuntimeError:
            return  # the loop is closed, and the client with it

    def _leave(self) -> None:
        self._over = True
        self._ready.clear()
        self._source.leave()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateConflict("this stream was made in another process; make it in the one that reads it")


def problem_of_end(reply: Reply, raising: Callable[[Reply], DispatchError] | None) -> DispatchError | None:
    """Return what a stream that ended so raises, None if nothing."""
    if raising is None or reply.succeeded:
        return None
    error = reply.error
    if error is not None and error.type == SLOW_CONSUMER:
        return StreamTooSlow(f"request {reply.request_id}: {error.message}", request_id=reply.request_id)
    return raising(reply)

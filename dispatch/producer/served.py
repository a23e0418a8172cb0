"""A stream as a server gives it out: when its head goes, what is written, and what ends it.

For the HTTP front and the SDK's transports, blocking or not. The head goes out with the first chunk, so that an early
error keeps its status, or when the request has been running for `head_s`, so that a long wait for the first token does
not look dead. As long as the request waits, the status stays open for a refusal. From the head on, something is written
at least every `keep_alive_s`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from dispatch.contract.answers import Answer, answer_of_reply, problem_of
from dispatch.contract.chunk import Chunk
from dispatch.contract.envelope import Operation
from dispatch.contract.event_stream import KEEP_ALIVE, EventStream
from dispatch.errors import DispatchError
from dispatch.producer.blocking_stream import BlockingChunkStream
from dispatch.producer.streaming import ChunkStream
from dispatch.producer.whereabouts import Whereabouts

_ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTimes:
    """When a stream's head goes out at the latest, and how long nothing may be written after it."""

    head_s: float = 15.0
    keep_alive_s: float = 12.0


@dataclass(slots=True)
class _Served:
    """What both kinds have in common; no I/O. `over`: nothing more is to be written."""

    operation: Operation
    pool_id: str
    times: ServingTimes
    events: EventStream = field(init=False)
    first: list[Chunk] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self.events = EventStream(self.operation)

    def head(self, whereabouts: Whereabouts | None) -> Answer:
        """Return the head of a stream; its body follows in pieces."""
        return self.events.head(self.pool_id, None if whereabouts is None else whereabouts.queue_ms)

    def begin(self, stream: ChunkStream | BlockingChunkStream) -> Answer:
        """Return the head of a stream that has begun, or has ended; then, if no chunk came, what it came to."""
        if self.first or stream.reply.succeeded:
            return self.head(None)
        self.over = True
        return answer_of_reply(stream.reply)

    def head_in_s(self, whereabouts: Whereabouts | None) -> float:
        """Return in how many seconds the head is due for a request that is there; 0 = now."""
        if whereabouts is None:
            return min(_ASK_AGAIN_S, self.times.head_s)
        if whereabouts.running_ms is None:
            return self.times.head_s  # if it begins now, the head is due then; it is asked again before that
        return max(0.0, self.times.head_s - whereabouts.running_ms / 1000)

    def piece(self, chunks: list[Chunk], stream: ChunkStream | BlockingChunkStream) -> bytes:
        """Return what is written of what was read."""
        if chunks:
            return self.events.chunks(chunks)
        if not stream.ended:
            return KEEP_ALIVE
        self.over = True
        return self.events.end(stream.reply)

    def broken(self, error: DispatchError) -> bytes:
        """Return what is written of an error in the middle of the stream."""
        self.over = True
        return self.events.broken(problem_of(error))

    def first_piece(self) -> bytes:
        """Return what is written right after the head."""
        first, self.first = self.first, []
        return self.events.chunks(first)


class ServedStream(_Served):
    """A stream of the asynchronous client: `open` it, then take `next_piece` until it is over."""

    async def open(self, stream: ChunkStream) -> Answer:
        """Return the head; or, of a stream that is `over`, the whole answer.

        Raises:
            DispatchError: nothing was queued, or how it ended is not known.
        """
        wait_s = self.times.head_s
        while True:
            self.first = await stream.read(within_s=wait_s)
            if self.first or stream.ended:
                return self.begin(stream)
            whereabouts = await stream.whereabouts()
            wait_s = self.head_in_s(whereabouts)
            if wait_s <= 0:
                return self.head(whereabouts)

    async def next_piece(self, stream: ChunkStream) -> bytes:
        """Return the next bytes of the body, maybe none; the last ones when it is `over` then."""
        if self.first:
            return self.first_piece()
        try:
            return self.piece(await stream.read(within_s=self.times.keep_alive_s), stream)
        except DispatchError as error:
            return self.broken(error)


class BlockingServedStream(_Served):
    """The same for a stream of the blocking client; `within_s` bounds each wait."""

    def open(self, stream: BlockingChunkStream, within_s: float = math.inf) -> Answer:
        """Return the head; or, of a stream that is `over`, the whole answer.

        Raises:
            DispatchError: nothing was queued, or how it ended is not known.
            TimeoutError: neither came in time.
        """
        until = time.monotonic() + within_s
        wait_s = self.times.head_s
        while True:
            self.first = stream.read(within_s=min(wait_s, max(0.0, until - time.monotonic())))
            if self.first or stream.ended:
                return self.begin(stream)
            if time.monotonic() >= until:
                raise TimeoutError
            whereabouts = stream.whereabouts()
            wait_s = self.head_in_s(whereabouts)
            if wait_s <= 0:
                return self.head(whereabouts)

    def next_piece(self, stream: BlockingChunkStream, within_s: float = math.inf) -> bytes:
        """Return the next bytes of the body, maybe none; the last ones when it is `over` then.

        Raises:
            TimeoutError: none came in time.
        """
        if self.first:
            return self.first_piece()
        try:
            chunks = stream.read(within_s=min(within_s, self.times.keep_alive_s))
        except DispatchError as error:
            return self.broken(error)
        if not chunks and not stream.ended and within_s < self.times.keep_alive_s:
            raise TimeoutError
        return self.piece(chunks, stream)

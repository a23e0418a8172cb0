"""Streams for blocking code."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from dispatch.contract import Call, Reply
from dispatch.contract.chunk import Chunk
from dispatch.errors import DispatchError, StateConflict
from dispatch.producer.errand import GRACE_S, LATE_S
from dispatch.producer.inbox import Outcome
from dispatch.producer.intake import Intake
from dispatch.producer.options import CallOptions
from dispatch.producer.streaming import problem_of_end
from dispatch.producer.whereabouts import Whereabouts, whereabouts_in

if TYPE_CHECKING:  # it opens the streams
    from dispatch.producer.blocking import BlockingQueuedPath

_LAST_ROUND_S = 1.0


class BlockingSlot(Future[Outcome], Intake):
    """Where the pump's thread puts the chunks and the outcome of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Event()

    def set_result(self, result: Outcome) -> None:
        """Put the outcome; only the first one counts."""
        try:
            super().set_result(result)
        except InvalidStateError:
            return
        self.wake()

    def wake(self) -> None:
        """End the reader's wait."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Wait until something may have come since the last wait, at most `seconds`."""
        self._news.wait(min(max(0.0, seconds), threading.TIMEOUT_MAX))
        self._news.clear()


class BlockingSource(Protocol):
    """How a stream gets here: through the queue, or directly."""

    @property
    def reply(self) -> Reply | None:
        """How it ended, None until then."""
        ...

    @property
    def request_id(self) -> str:
        """The request's id."""
        ...

    def open(self) -> None:
        """Make the call."""
        ...

    def read(self, within_s: float) -> list[Chunk]:
        """Return the chunks that are there; waits for one. None come: the time is over, or the stream (`reply`)."""
        ...

    def whereabouts(self) -> Whereabouts | None:
        """Say where the request is; None = that cannot be learnt now."""
        ...

    def leave(self) -> None:
        """Let go of it, and stop the request if it has not ended: one attempt in this thread. Repeatable."""
        ...

    def leave_soon(self) -> None:
        """The same in the background; from any place, also from a finaliser."""
        ...


class BlockingQueuedStream:
    """One stream through the queue; read by one thread at a time."""

    def __init__(self, path: BlockingQueuedPath, call: Call, options: CallOptions) -> None:
        self._path = path
        self._slot = BlockingSlot()
        self._waiting = path.waiting(call, options, self._slot)
        self._begun = False
        self.reply: Reply | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._waiting.errand.request_id

    def open(self) -> None:
        """Queue the request.

        Raises:
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of the path's `begin`.
        """
        self._slot.begin(self.request_id, self._path.reservoir, self.leave_soon)
        self._begun = True
        self._path.begin(self._waiting)

    def read(self, within_s: float) -> list[Chunk]:
        """Return the chunks that are there; waits for one. None come: the time is over, or the stream (`reply`).

        Raises:
            DispatchError: the stream failed on this side, or how it ended is not known.
        """
        slot, waiting = self._slot, self._waiting
        until = time.monotonic() + within_s
        while True:
            # An outcome goes behind the chunks: look for it first, or chunks may come in between.
            over = slot.done() or time.monotonic() >= waiting.end
            if chunks := slot.take():
                return chunks
            if slot.failure is not None:
                raise slot.failure
            if over:
                return self._end()
            now = time.monotonic()
            errand = waiting.errand
            if now >= errand.ask_at:
                self._path.ask_after_overdue()
                errand.asked_now()
            if now >= until:
                return []
            slot.wait(min(until, errand.ask_at, waiting.end) - now)

    def whereabouts(self) -> Whereabouts | None:
        """Ask where the request is; None = that cannot be learnt now."""
        try:
            return whereabouts_in(self._path.state_of(self.request_id))
        except DispatchError:
            return None

    def leave(self) -> None:
        """Let go of the stream; a request that has not ended is cancelled, in one attempt. Repeatable."""
        if self._begun:
            self._slot.close()
            self._path.leave(self._waiting)

    def leave_soon(self) -> None:
        """The same in the background; from any place, also from a finaliser, which must not wait for any lock."""
        if self._begun:
            self._path.soon(self.leave)

    def _end(self) -> list[Chunk]:
        slot = self._slot
        late = time.monotonic() > self._waiting.end + LATE_S
        if late and not slot.done():  # a process that stood still goes on with all threads: first the pump's turn
            slot.wait(_LAST_ROUND_S)
        outcome = slot.result() if slot.done() else None
        if chunks := slot.take():
            return chunks
        if slot.failure is not None:
            raise slot.failure
        self._waiting.end = max(self._waiting.end, time.monotonic() + GRACE_S)  # a slow reader reads the body later
        self.reply = self._path.conclude(self._waiting, outcome)
        self._slot.close()
        return []


class BlockingChunkStream:
    """The chunks of one call as they come, for blocking code.

        for chunk in client.stream(model="m", messages=[...]):
            print(chunk.text, end="")

    What the asynchronous `ChunkStream` promises, with these differences: leaving by `close()`, at the end of `with`, or
    by an exception in the waiting thread (Ctrl-C) cancels the request before it goes on, in one attempt; a stream that
    is forgotten is cancelled in the background.
    """

    def __init__(self, source: BlockingSource, raising: Callable[[Reply], DispatchError] | None) -> None:
        """Read `source`. `raising` makes what is raised for an ending other than `succeeded`; None: nothing is."""
        self._source = source
        self._raising = raising
        self._ready: deque[Chunk] = deque()
        self._pid = os.getpid()
        self._begun = False
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

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """Return the next chunk; raises as the asynchronous client's streams do."""
        if not self._ready:
            self._ready.extend(self.read())
            if not self._ready:
                raise StopIteration
        return self._ready.popleft()

    def read(self, within_s: float = math.inf) -> list[Chunk]:
        """Return the chunks that are there, about 64 KiB at most; waits up to `within_s` for the first of them.

        An empty list says that the time is over, or the stream (`ended`). Raises as iterating does.
        """
        if self._ready:
            chunks = list(self._ready)
            self._ready.clear()
            return chunks
        if self._over:
            return []
        if self._pid != os.getpid():
            raise StateConflict("this stream was made in another process; make it in the one that reads it")
        try:
            if not self._begun:
                self._begun = True
                self._source.open()
            chunks = self._source.read(within_s)
        except BaseException:
            self.close()
            raise
        if self._source.reply is not None and not chunks:
            self._over = True
            if (problem := problem_of_end(self._source.reply, self._raising)) is not None:
                raise problem
        return chunks

    def whereabouts(self) -> Whereabouts | None:
        """Say whether the request waits or runs, and since when; None = that cannot be learnt now."""
        return self._source.whereabouts()

    def close(self) -> None:
        """Let go of the stream; a request that has not ended is cancelled. Repeatable."""
        over, self._over = self._over, True
        self._ready.clear()
        if not over and self._begun and self._pid == os.getpid():
            self._source.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that was left by `break` forgets the stream; nothing else says that nobody reads it any more.
        if self._begun and not self._over and self._pid == os.getpid():
            self._source.leave_soon()

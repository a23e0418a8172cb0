"""The chunks of streams on their way from the pump to their readers: in order, each once, and bounded. No I/O.

A reader that does not keep up must cost neither the pump, nor other streams, nor memory: its stream is given up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import structlog

from dispatch.contract.chunk import Chunk
from dispatch.errors import DispatchError, StreamBroken, StreamTooSlow
from dispatch.fabric.frames import ChunkFrame
from dispatch.producer.options import ClientOptions

_log = structlog.get_logger(__name__)

FRAME_BYTES = 256
"""What a frame takes beside its payload, about."""

TAKE_BYTES = 64 * 1024
"""How much a reader takes at once, about: what it holds itself is not counted."""


class Reservoir:
    """What all streams of a client hold unread, in bytes. Usable from several threads."""

    def __init__(self, options: ClientOptions) -> None:
        self.stream_bytes = options.stream_unread_bytes
        self._limit = options.streams_unread_bytes
        self._bytes = 0
        self._intakes: set[Intake] = set()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """How much they hold now."""
        return self._bytes

    def enter(self, intake: Intake) -> None:
        """Count what `intake` holds from now on."""
        with self._lock:
            self._intakes.add(intake)

    def leave(self, intake: Intake, size: int) -> None:
        """Count no more what `intake` holds, which is `size` bytes."""
        with self._lock:
            self._intakes.discard(intake)
            self._bytes -= size

    def move(self, size: int) -> None:
        """Add `size` bytes, which may be less than none."""
        with self._lock:
            self._bytes += size

    def make_room(self) -> None:
        """Give up the stream that is furthest behind, if all together hold too much; also one that has ended."""
        if self._bytes <= self._limit:
            return
        with self._lock:
            furthest = max(self._intakes, key=lambda intake: intake.unread_bytes, default=None)
        if furthest is None:
            return
        furthest.give_up(
            StreamTooSlow(
                f"the stream of request {furthest.request_id} was not read as fast as it came: of all streams of this "
                f"client it had most waiting, and together they had more than {self._limit} bytes "
                "(streams_unread_bytes); it was stopped",
                request_id=furthest.request_id,
            )
        )


class Intake:
    """Where the pump puts the chunks of one stream, and a reader takes them. One of each, in any threads.

    A slot for a stream is one of these as well as a place for an outcome. `given_up` is called, by the pump, when the
    stream fails on this side (`failure` says why, and goes before any outcome), so that its request is stopped though
    nobody reads.
    """

    def begin(self, request_id: str, reservoir: Reservoir, given_up: Callable[[], None]) -> None:
        """Be ready for the chunks of `request_id`."""
        self.request_id = request_id
        self.failure: DispatchError | None = None
        self._reservoir = reservoir
        self._given_up = given_up
        self._frames: deque[ChunkFrame] = deque()
        self._next_number = 0
        self._closed = False
        self._guard = threading.Lock()
        self.unread_bytes = 0
        reservoir.enter(self)

    def wake(self) -> None:
        """Tell the reader that there is something to take."""
        raise NotImplementedError

    def feed(self, frame: ChunkFrame) -> None:
        """Take a frame in. One that came before is dropped; one that leaves a gap, or is too much, ends the stream."""
        problem: DispatchError | None = None
        with self._guard:
            following = frame.number + frame.count
            if self._closed or following <= self._next_number:
                return
            if frame.number < self._next_number:
                frame = frame.without(self._next_number - frame.number)
            size = len(frame.payload) + FRAME_BYTES
            if frame.number > self._next_number:
                problem = self._gap(frame)
            elif self._frames and self.unread_bytes + size > self._reservoir.stream_bytes:
                problem = self._too_slow()
            else:
                self._frames.append(frame)
                self._next_number = following
                self.unread_bytes += size
                self._reservoir.move(size)
        if problem is not None:
            self.give_up(problem)
            return
        self.wake()
        self._reservoir.make_room()

    def take(self) -> list[Chunk]:
        """Return the next chunks, some `TAKE_BYTES` of them if so many are there; none if there are none.

        Raises:
            ContractError: a frame is damaged.
        """
        taken: list[ChunkFrame] = []
        with self._guard:
            size = 0
            while self._frames and size < TAKE_BYTES:
                frame = self._frames.popleft()
                size += len(frame.payload) + FRAME_BYTES
                taken.append(frame)
            self.unread_bytes -= size
        if not taken:
            return []
        self._reservoir.move(-size)
        if len(taken) == 1:
            return taken[0].chunks()
        return [chunk for frame in taken for chunk in frame.chunks()]

    def give_up(self, problem: DispatchError) -> None:
        """End the stream with `problem`, which is a fault on this side; the request is told to stop."""
        _log.warning("stream_given_up", request_id=self.request_id, reason=type(problem).__name__)
        self.failure = problem
        self.close()
        self.wake()
        self._given_up()

    def close(self) -> None:
        """Take nothing more in, and let go of what was not taken."""
        with self._guard:
            self._closed = True
            self._frames.clear()
            size, self.unread_bytes = self.unread_bytes, 0
        self._reservoir.leave(self, size)

    def _gap(self, frame: ChunkFrame) -> StreamBroken:
        return StreamBroken(
            f"chunks {self._next_number} to {frame.number - 1} of request {self.request_id} are missing: Valkey has "
            "lost data; the request was told to stop"
        )

    def _too_slow(self) -> StreamTooSlow:
        return StreamTooSlow(
            f"the stream of request {self.request_id} was not read as fast as it came: more than "
            f"{self._reservoir.stream_bytes} bytes waited (stream_unread_bytes); it was stopped",
            request_id=self.request_id,
        )

"""A stream through the queue, for the asynchronous client."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from dispatch.contract import Call, Reply
from dispatch.contract.chunk import Chunk
from dispatch.errors import DispatchError
from dispatch.producer.errand import GRACE_S, LATE_S
from dispatch.producer.inbox import Outcome
from dispatch.producer.intake import Intake
from dispatch.producer.options import CallOptions
from dispatch.producer.promise import Promise
from dispatch.producer.whereabouts import Whereabouts, whereabouts_in

if TYPE_CHECKING:  # it opens the streams
    from dispatch.producer.queued import QueuedPath


class StreamSlot(Promise[Outcome], Intake):
    """Where the pump puts the chunks and the outcome of one stream."""


class QueuedStream:
    """One stream; read by one task at a time. A wait that is cancelled leaves it: the request is cancelled."""

    def __init__(self, path: QueuedPath, call: Call, options: CallOptions) -> None:
        self._path = path
        self._slot = StreamSlot()
        self._errand = path.errand(call, options, self._slot)
        self._until = math.inf
        self._begun = False
        self._left = False
        self.reply: Reply | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._errand.request_id

    async def open(self) -> None:
        """Queue the request.

        Raises:
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of `QueuedPath.call`.
        """
        self._slot.begin(self.request_id, self._path.reservoir, self.leave)
        self._begun = True
        try:
            reply_s = await self._path.begin(self._errand)
        except BaseException:
            self.leave()
            raise
        self._until = time.monotonic() + reply_s
        self._errand.expect(reply_s)

    async def read(self, within_s: float) -> list[Chunk]:
        """Return the chunks that are there; waits for one. None come: the time is over, or the stream (`reply`).

        Raises:
            DispatchError: the stream failed on this side, or how it ended is not known.
        """
        try:
            return await self._read(time.monotonic() + within_s)
        except BaseException:
            self.leave()
            raise

    async def whereabouts(self) -> Whereabouts | None:
        """Ask where the request is; None = that cannot be learnt now."""
        try:
            return whereabouts_in(await self._path.state_of(self.request_id))
        except DispatchError:
            return None

    def leave(self) -> None:
        """Let go of the stream; a request that has not ended is cancelled in the background. Repeatable."""
        if self._left or not self._begun:
            return
        self._left = True
        self._slot.close()
        self._path.leave(self._errand)

    async def _read(self, until: float) -> list[Chunk]:
        while True:
            if chunks := self._slot.take():
                return chunks
            if self._slot.failure is not None:
                raise self._slot.failure
            now = time.monotonic()
            if self._slot.done() or now >= self._until:
                return await self._end()
            if now >= self._errand.ask_at:
                self._path.ask_after_overdue()
                self._errand.asked_now()
            if now >= until:
                return []
            await self._slot.within(min(until, self._errand.ask_at, self._until) - now)

    async def _end(self) -> list[Chunk]:
        late = time.monotonic() > self._until + LATE_S
        if late and not self._slot.done():  # the reader may have been late, and the event loop with it
            await self._path.catch_up()
            if chunks := self._slot.take():
                return chunks
            if self._slot.failure is not None:
                raise self._slot.failure
        body_until = max(self._until, time.monotonic() + GRACE_S)
        self.reply = await self._path.conclude(self._errand, body_until)
        self._slot.close()
        return []

"""The reply pump of the asynchronous client: one per client, for all its requests.

Frames are read without removing them, handed over, then acknowledged up to their sequence: a reply that was read by
somebody who vanished is still there. What blocks is only the wait for wake tokens, on a connection of its own; tokens
may be lost, so each wait is bounded. While nothing is outstanding nothing is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import structlog

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric import functions
from dispatch.fabric.connection import Connection, Waiter
from dispatch.producer.inbox import Inbox
from dispatch.producer.session import Session

_log = structlog.get_logger(__name__)

WAIT_S = 0.5
"""Longest wait for a wake token: how late a reply can be whose token was lost."""

FRAMES_MAX = 100
"""Frames per read; at most about 6.5 MB, unless single chunks of streams are larger than 64 KiB."""

_RETRY_MIN_S, _RETRY_MAX_S = 0.02, 0.5
_DOUBLINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class PumpEvents:
    """What the pump tells its client.

    `recovered`: the server answers again after a failure. `taken_over`: another session owns the producer.
    """

    recovered: Callable[[], None]
    taken_over: Callable[[], None]


class Pump:
    """Moves frames from the producer's reply list into the inbox."""

    def __init__(self, connection: Connection, session: Session, inbox: Inbox, events: PumpEvents) -> None:
        self._connection = connection
        self._session = session
        self._inbox = inbox
        self._events = events
        self._wanted = asyncio.Event()
        self._draining = anyio.Lock()
        self._drains = 0
        self._untrimmed = False
        self.retired = False
        self.last_contact = time.monotonic()

    def wake(self) -> None:
        """Say that a reply is due."""
        self._wanted.set()

    def retire(self) -> None:
        """Read no more: the list is another session's, and so are the tokens."""
        self.retired = True

    async def run(self) -> None:
        """Pump until cancelled."""
        waiter = self._connection.waiter()
        failures = 0
        try:
            while True:
                if self.retired or not (self._inbox.busy() or self._untrimmed):
                    self._wanted.clear()
                    await self._wanted.wait()
                try:
                    await self._round(waiter)
                except DispatchError as error:
                    failures += 1
                    if failures == 1:
                        _log.warning("reply_pump_interrupted", producer_id=self._session.producer_id, error=str(error))
                    await anyio.sleep(retry_pause_s(failures))
                    continue
                if failures:
                    _log.info("reply_pump_restored", producer_id=self._session.producer_id, failures=failures)
                    failures = 0
                    self._events.recovered()
        finally:
            with anyio.CancelScope(shield=True):
                await waiter.aclose()

    async def _round(self, waiter: Waiter) -> None:
        session, drains = self._session, self._drains
        try:
            raws = await waiter.wait_then_read(session.wake_key, WAIT_S, session.replies_key, FRAMES_MAX)
        except FabricUnavailable:
            # The list may still be readable: a reply must not wait for the waiter's connection.
            await self.drain()
            raise
        read_meanwhile = self._draining.locked() or drains != self._drains
        await self.drain(None if read_meanwhile else raws)

    async def drain(self, raws: list[bytes] | None = None) -> None:
        """Hand over and acknowledge every frame that is there; what came meanwhile is read with the acknowledgement.

        `raws`: the first of them, where they were read just now and nothing was handed over since.

        Raises:
            FabricError: the server did not answer or refused; what was read is handed over already.
        """
        async with self._draining:
            self._drains += 1
            if raws is None:
                raws = await self._connection.read_frames(self._session.replies_key, FRAMES_MAX)
            while True:
                self.last_contact = time.monotonic()
                upto = self._inbox.receive(raws)
                self._untrimmed = upto is not None  # until the server has said that it trimmed them
                if upto is None:
                    return
                raws = await self._acknowledge(upto)
                self._untrimmed = False

    async def _acknowledge(self, upto: int) -> list[bytes]:
        """Trim what was handed over; returns the frames that are left, none if the list is another session's."""
        session = self._session
        call = functions.reply_ack(session.producer_id, session.session_id, upto=upto)
        answer, raws = await self._connection.run_then_read(session.group, call, session.replies_key, FRAMES_MAX)
        if not answer.owner:
            self._events.taken_over()
            return []
        return raws


def retry_pause_s(failures: int) -> float:
    """Return how long to pause after `failures` failures in a row."""
    return min(_RETRY_MIN_S * 2.0 ** min(failures, _DOUBLINGS_MAX), _RETRY_MAX_S)

"""Chunks of running streams on their way to their producers.

One call is in flight at a time and carries what all streams have by then, so the busier the gateway, the more chunks
share a call, and a lone chunk waits for nothing. Chunks are numbered: a call whose answer was lost is repeated as it is
and sends nothing twice.
"""

from __future__ import annotations

import asyncio
from collections import deque

import structlog

from dispatch.errors import BadArgument, DispatchError, ScriptFault
from dispatch.fabric import functions
from dispatch.fabric.frames import chunk_line
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.fabric.records import Chunks, Lease
from dispatch.fabric.schema import LIMITS
from dispatch.gateway.link import Link

log = structlog.get_logger(__name__)

_CALL_BYTES = 1 << 20  # about a millisecond of the server, which serves others too
_ITEM_BYTES = 64 * 1024
_FULL_BYTES = 256 * 1024  # a stream that has so much waiting is not read on until the fabric has taken some
_REFUSALS: tuple[type[DispatchError], ...] = (BadArgument, ScriptFault)
_OK = "OK"
_REFUSED = "GAP"
_CLOSED = "CLOSED"


class Channel:
    """The chunks of one run. `refused` is the server's word when it takes no more of them, "" until then."""

    def __init__(self, lease: Lease, ready: deque[Channel], wanted: asyncio.Event) -> None:
        self.lease = lease
        self.refused = ""
        self._ready = ready
        self._wanted = wanted
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._sent = 0
        self._queued = False
        self._moved = asyncio.Event()

    async def put(self, event: str, data: bytes) -> bool:
        """Hand over a chunk; waits while too much is on its way. False: nobody wants it."""
        while self._waiting_bytes >= _FULL_BYTES and not self.refused:
            await self._move()
        if self.refused:
            return False
        line = chunk_line(event, data)
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if not self._queued:
            self._queued = True
            self._ready.append(self)
            self._wanted.set()
        return True

    async def flushed(self) -> bool:
        """Wait until all that was handed over has been taken. False: it was refused."""
        while self._lines and not self.refused:
            await self._move()
        return not self.refused

    def close(self) -> None:
        """Send no more: the run is over, and what it came to may be told already."""
        self.refused = self.refused or _CLOSED
        self._lines.clear()

    @property
    def waiting(self) -> bool:
        """Whether there is something to send."""
        return bool(self._lines)

    def take(self) -> Chunks:
        """Make an item of what waits, bounded; it stays here until `answered`."""
        payload, size = list[bytes](), 0
        for line in self._lines:
            if payload and size + len(line) > _ITEM_BYTES:
                break
            payload.append(line)
            size += len(line)
        return Chunks(
            request_id=self.lease.request_id,
            fence=self.lease.fence,
            number=self._sent,
            count=len(payload),
            payload=b"\n".join(payload),
        )

    def answered(self, item: Chunks, word: str) -> bool:
        """Note what became of an item. True if more waits."""
        if self.refused:
            return False
        if word == _OK:
            for _ in range(item.count):
                self._waiting_bytes -= len(self._lines.popleft())
            self._sent += item.count
        else:
            self.refused = word
            self._lines.clear()
        self._moved.set()
        self._queued = bool(self._lines)
        return self._queued

    async def _move(self) -> None:
        self._moved.clear()
        await self._moved.wait()


class Appender:
    """Sends the chunks of all streams of one gateway."""

    def __init__(self, link: Link, gateway_id: str) -> None:
        self.observer: Observer = NOBODY
        self._link = link
        self._gateway_id = gateway_id
        self._ready: deque[Channel] = deque()
        self._wanted = asyncio.Event()

    def open(self, lease: Lease) -> Channel:
        """Begin the stream of a run."""
        return Channel(lease, self._ready, self._wanted)

    async def run(self) -> None:
        """Send until cancelled, whatever the server does."""
        while True:
            await self._wanted.wait()
            channels, items = self._gather()
            if not items:
                self._wanted.clear()
                continue
            try:
                words = (
                    await self._link.insist(functions.reply_append(self._gateway_id, items), refused=_REFUSALS)
                ).value
            except _REFUSALS as error:
                log.error("chunks_refused", count=len(items), problem=str(error))  # noqa: TRY400 - its text is all there is
                words = (_REFUSED,) * len(items)
            for channel, item, word in zip(channels, items, words, strict=True):
                if word == _OK:
                    self.observer.streamed(item.count, len(item.payload))
                if channel.answered(item, word):
                    self._ready.append(channel)
            if not self._ready:
                self._wanted.clear()

    def _gather(self) -> tuple[list[Channel], list[Chunks]]:
        channels, items, size = list[Channel](), list[Chunks](), 0
        while self._ready and len(items) < LIMITS["append_max"] and size < _CALL_BYTES:
            channel = self._ready.popleft()
            if not channel.waiting:
                continue
            channels.append(channel)
            items.append(channel.take())
            size += len(items[-1].payload)
        return channels, items

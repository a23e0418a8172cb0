"""The body of an open answer as it comes: decoded, within bounds, and closed whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import anyio
import httpx

from dispatch.backend.exchange import NETWORK_ERRORS, close, pieces_of
from dispatch.backend.inflating import Inflater
from dispatch.backend.watch import Watch

DRAIN_S = 0.1
"""How long the body's end is waited for after the last event that counts, so that the connection can be used again."""

_DRAIN_BYTES = 64 * 1024


class Overdue(TimeoutError):
    """A wait for bytes took too long; raised and caught inside this package."""


class StreamedBody:
    """One answer's body, for one reader. `more_time` is asked when a wait is due: a later time, or None to end it."""

    def __init__(
        self, response: httpx.Response, inflater: Inflater | None, more_time: Callable[[], float | None]
    ) -> None:
        self._response = response
        self._inflater = inflater
        self._more_time = more_time
        self._pieces = pieces_of(response)
        self._watch = Watch(self._on_due)
        self._closing: asyncio.Task[None] | None = None
        self._closed = False

    async def piece(self, due: float) -> bytes | None:
        """Return the next bytes, b"" when what came in gives none yet, None at the body's end.

        Raises:
            Overdue: none came until `due` (event loop time).
            anyio.ClosedResourceError: the body was closed, or a wait was cancelled: that ends it.
            Exception: one of `NETWORK_ERRORS`.
        """
        if self._inflater is not None and (held := self._inflater.take()):
            return held
        if self._closed:
            raise anyio.ClosedResourceError
        self._watch.begin(due)
        try:
            piece = await self._pieces.__anext__()
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            self._closed = True
            raise
        except NETWORK_ERRORS as error:
            if self._watch.fired:
                raise Overdue from error
            raise
        finally:
            self._watch.rest()
        if self._inflater is None:
            return piece
        self._inflater.feed(piece)
        return self._inflater.take()

    async def drain(self) -> None:
        """Read to the body's end if it comes soon; a connection read to the end is kept for the next call."""
        self._more_time = lambda: None
        due, read_bytes = anyio.current_time() + DRAIN_S, 0
        try:
            self._watch.begin(due)
            async for piece in self._pieces:
                read_bytes += len(piece)
                if read_bytes > _DRAIN_BYTES:
                    return
        except NETWORK_ERRORS:
            return

    async def close(self) -> None:
        """Close; the connection is reset unless the body was read to its end. Not cut short by cancellation."""
        self._closed = True
        self._watch.close()
        with anyio.CancelScope(shield=True):
            await close(self._response)
            if self._closing is not None:
                await self._closing
            if isinstance(self._pieces, AsyncGenerator):
                await self._pieces.aclose()

    def _on_due(self) -> float | None:
        later = self._more_time()
        if later is None:
            self._closing = asyncio.ensure_future(close(self._response))  # wakes who waits for a piece
        return later

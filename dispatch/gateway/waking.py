"""Listening for wake tokens on a connection of its own. A token carries nothing and may be lost: it says "look now"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import structlog

from dispatch.fabric.connection import Waiter
from dispatch.gateway.link import PROBLEMS, Link

log = structlog.get_logger(__name__)

_WAIT_S = 20.0
_PROBE_S = 0.05
_RETRY_S = 0.25
_CLOSE_S = 0.2


class TokenListener:
    """Waits for one token each time it is armed, and tells.

    A wait under way is never broken off but by `close` and `restart`, which throw its connection away: an abandoned pop
    would swallow the next token. So a token may come when nobody has a use for it any more; `give_back` hands it on.
    """

    def __init__(self, link: Link, key: str, on_token: Callable[[bool], None]) -> None:
        """`on_token` gets True for a token, and False when the connection was lost and is back (tokens may be gone)."""
        self._link = link
        self._key = key
        self._on_token = on_token
        self._work = asyncio.Event()
        self._armed = False
        self._owed = 0
        self._scope = anyio.CancelScope()
        self._wait: anyio.CancelScope | None = None

    def arm(self) -> None:
        """Wait for the next token."""
        self._armed = True
        self._work.set()

    def give_back(self, count: int) -> None:
        """Hand tokens on that cannot be used here; `run` does it at once."""
        self._owed += count
        self._work.set()

    def restart(self) -> None:
        """Wait on a new connection: the one of the wait under way may be dead without having said so."""
        if self._wait is not None:
            self._wait.cancel()

    def close(self) -> None:
        """Listen no more; `run` returns when the connection is closed and tokens are given back."""
        self._scope.cancel()

    async def run(self) -> None:
        """Listen until closed or cancelled."""
        waiter = self._link.connection.waiter()
        try:
            with self._scope:
                while True:
                    await self._work.wait()
                    self._work.clear()
                    await self._pay_back()
                    while self._armed and not self._owed:
                        await self._listen(waiter)
        finally:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await waiter.aclose()
                await self._pay_back()

    async def _listen(self, waiter: Waiter) -> None:
        token = False
        try:
            with anyio.CancelScope() as self._wait:
                token = await waiter.wait(self._key, _WAIT_S)
        except PROBLEMS as error:
            # A call would wait for its own timeout. What follows is one that says how it stands.
            self._link.lost(error)
            self._tell(token=False)
            self._tell(token=await self._reconnect(waiter))
            return
        if token or self._wait.cancelled_caught:
            self._tell(token=token)

    async def _reconnect(self, waiter: Waiter) -> bool:
        while True:
            await anyio.sleep(_RETRY_S)
            try:
                return await waiter.wait(self._key, _PROBE_S)
            except PROBLEMS:
                continue

    def _tell(self, *, token: bool) -> None:
        self._armed = False
        self._on_token(token)

    async def _pay_back(self) -> None:
        while self._owed:
            self._owed -= 1
            try:
                await self._link.connection.push_token(self._key)
            except PROBLEMS as error:  # a token may be lost: whoever sleeps has a bound on its sleep
                log.debug("tokens_not_given_back", key=self._key, count=self._owed + 1, error=str(error))
                self._owed = 0

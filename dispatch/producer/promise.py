"""A value that comes once, for one event loop."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """A one-shot value. Unlike a future, a cancelled wait leaves it whole: somebody else can still wait for it.

    Waiting with a bound costs a timer of the event loop, a fraction of an anyio cancel scope; every request does it.
    """

    __slots__ = ("_done", "_value", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._value: T
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        """Whether the value is there."""
        return self._done

    def set_result(self, result: T, /) -> None:
        """Put the value; only the first one counts."""
        if not self._done:
            self._value = result
            self._done = True
            self.wake()

    def wake(self) -> None:
        """End the waits under way, with a value or without: they look whether it is there."""
        for waiter in self._waiters:
            _wake(waiter)

    def result(self) -> T:
        """Return the value; only after `done()`."""
        return self._value

    async def wait(self) -> T:
        """Wait for the value. Can be cancelled and repeated."""
        if not self._done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        return self._value

    async def within(self, seconds: float) -> bool:
        """Wait for the value at most `seconds`, or until somebody calls `wake`; returns whether it is there.

        Can be cancelled and repeated.
        """
        if not self._done:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(max(0.0, seconds), _wake, waiter)
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
                timer.cancel()
        return self._done


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # its task was cancelled, or it is awake already
        waiter.set_result(None)

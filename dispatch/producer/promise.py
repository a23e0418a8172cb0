"""A value that comes once, for one event loop."""

from __future__ import annotations

from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Promise(Generic[T]):
    """A one-shot value. Unlike a future, a cancelled wait leaves it whole: somebody else can still wait for it."""

    __slots__ = ("_event", "_value")

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._value: T

    def done(self) -> bool:
        """Whether the value is there."""
        return self._event.is_set()

    def set_result(self, result: T, /) -> None:
        """Put the value; only the first one counts."""
        if not self._event.is_set():
            self._value = result
            self._event.set()

    def result(self) -> T:
        """Return the value; only after `done()`."""
        return self._value

    async def wait(self) -> T:
        """Wait for the value. Can be cancelled and repeated."""
        await self._event.wait()
        return self._value

"""A connection that tells an observer how long its function calls take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from dispatch.errors import DispatchError
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection, Subscriber, Waiter
from dispatch.fabric.observing import Observer

T = TypeVar("T")


class TimedConnection:
    """`Connection` around another one. Measured is what the caller waits: network, queueing and the function itself.

    Calls that share a round trip share its time. Closing closes the other one.
    """

    def __init__(self, connection: Connection, observer: Observer) -> None:
        self._inner = connection
        self._observer = observer
        self.get = connection.get
        self.put = connection.put
        self.read_frames = connection.read_frames
        self.keep_alive = connection.keep_alive
        self.push_token = connection.push_token
        self.read_records = connection.read_records
        self.claim_records = connection.claim_records
        self.ack_records = connection.ack_records
        self.primaries = connection.primaries
        self.aclose = connection.aclose

    async def run(self, group: str, call: FunctionCall[T]) -> T:
        """Run one function for `group` and decode its answer."""
        with _Clock(self._observer, (call.function,)):
            return await self._inner.run(group, call)

    async def run_many(self, group: str, calls: Sequence[FunctionCall[T]]) -> list[T | DispatchError]:
        """Run calls in one round trip, in order, not atomically; a call's own error stands at its place."""
        with _Clock(self._observer, tuple({call.function for call in calls})):
            return await self._inner.run_many(group, calls)

    async def run_then_read(self, group: str, call: FunctionCall[T], key: str, count: int) -> tuple[T, list[bytes]]:
        """Run one function, then read the first `count` elements of a list of `group`, in one round trip."""
        with _Clock(self._observer, (call.function,)):
            return await self._inner.run_then_read(group, call, key, count)

    def waiter(self) -> Waiter:
        """Return a waiter of the other connection's."""
        return self._inner.waiter()

    def subscriber(self, channel: str) -> Subscriber:
        """Return a subscriber of the other connection's."""
        return self._inner.subscriber(channel)


class _Clock:
    """Times what is inside it. A class: a generator's context manager takes three times as long to make."""

    __slots__ = ("_functions", "_observer", "_started")

    def __init__(self, observer: Observer, functions: tuple[str, ...]) -> None:
        self._observer = observer
        self._functions = functions

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._started
        self._observer.called(self._functions, seconds, "" if kind is None else kind.__name__)

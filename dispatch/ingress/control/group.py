"""The fabric group as the control API reads and changes it: every answer within a bound, whatever the server does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from dispatch.errors import DispatchError, FabricUnavailable, LibraryProblem
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.faults import LOAD_COMMAND

T = TypeVar("T")


class Group:
    """One fabric group. Each method raises what the connection says, `FabricUnavailable` when the time is over."""

    def __init__(self, connection: Connection, name: str, within_s: float) -> None:
        self.connection = connection
        self.name = name
        self._within_s = within_s

    async def run(self, call: FunctionCall[T]) -> T:
        """Run one function."""
        return await self.within(lambda: self.connection.run(self.name, call))

    async def run_many(self, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        """Run functions in one round trip, not atomically; the first error of any is raised."""
        answers = await self.attempt_many(calls)
        for answer in answers:
            if isinstance(answer, DispatchError):
                raise answer
        return answers

    async def attempt_many(self, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        """Run functions in one round trip, not atomically; a call's own error stands at its place."""
        return await self.within(lambda: self.connection.run_many(self.name, calls))

    async def get(self, key: str) -> bytes | None:
        """Read a string."""
        return await self.within(lambda: self.connection.get(key))

    async def within(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with the connection within the bound. Whether a change was made that was cut off is unknown."""
        try:
            with anyio.fail_after(self._within_s):
                return await work()
        except TimeoutError:
            raise FabricUnavailable(f"Valkey has not answered for {self._within_s:g} s") from None
        except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise LibraryProblem(
                f"the function library on the server answers in another form; run: {LOAD_COMMAND}"
            ) from error

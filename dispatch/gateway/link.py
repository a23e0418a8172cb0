"""This gateway's line to its fabric group: calls, whether they get through, and asking until answered."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
import structlog

from dispatch.contract import CONTRACT_VERSION
from dispatch.errors import (
    BadArgument,
    ConfigurationError,
    DispatchError,
    FabricError,
    FabricFull,
    GroupUnknown,
    LibraryProblem,
)
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.faults import LOAD_COMMAND
from dispatch.fabric.functions import library_version
from dispatch.fabric.verifying import require_same

T = TypeVar("T")

log = structlog.get_logger(__name__)

_FIRST_DELAY_S = 0.02
_LAST_DELAY_S = 0.5  # the first submit after an outage is dispatched well within two seconds

PROBLEMS = (FabricError, ConfigurationError)
"""What a call may raise while a gateway runs: no answer, no library, no right. None of it ends the gateway."""

_ANSWERS = (BadArgument, GroupUnknown, FabricFull)
"""Errors that a working fabric answers with."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """An answer, and when (event loop's clock) the call it answers was sent."""

    value: T
    sent_at: float


class Link:
    """Runs calls for one group and knows since when they get through (or not, and why)."""

    def __init__(self, connection: Connection, group: str) -> None:
        self.connection = connection
        self.group = group
        self.reachable = True
        self.since = time.time()
        self.problem = ""
        self._kind: type[DispatchError] | None = None
        self._other_contract = False
        self.on_group_unknown: Callable[[], Awaitable[None]] | None = None
        self.on_found: Callable[[], None] = lambda: None
        """Told when a call gets through again."""

    async def once(self, call: FunctionCall[T]) -> Answer[T]:
        """Run one call.

        Raises:
            FabricError, ConfigurationError: what the connection says.
        """
        return await self._watched(lambda: self.connection.run(self.group, call))

    async def insist(self, call: FunctionCall[T], *, refused: tuple[type[DispatchError], ...] = ()) -> Answer[T]:
        """Repeat the very same call until it is answered (its nonce makes that safe), with growing pauses.

        Ends only with an answer, by cancellation, or with one of the errors named by `refused`.
        """
        return await self._insist(lambda: self.connection.run(self.group, call), refused)

    async def fetch(self, key: str) -> bytes | None:
        """Read a string; repeated until answered."""
        return (await self._insist(lambda: self.connection.get(key), ())).value

    async def store(self, key: str, value: bytes, *, ttl_ms: int) -> None:
        """Store a string; repeated until answered.

        Raises:
            FabricFull: the server has no memory for it.
        """
        await self._insist(lambda: self.connection.put(key, value, ttl_ms=ttl_ms), (FabricFull,))

    async def configure(self, unknown: GroupUnknown) -> None:
        """Make the group's config, which is gone (another server, or flushed), again as at the first start, if we may.

        Where that cannot be, `unknown` is this line's problem until somebody configures the group.
        """
        try:
            if self.on_group_unknown is not None:
                await self.on_group_unknown()
        except ConfigurationError:
            self.lost(unknown)
        except FabricError as error:
            self.lost(error)

    def lost(self, error: DispatchError) -> None:
        """Note that something did not get through; the next call that does takes it back."""
        if self.reachable or type(error) is not self._kind:
            log.warning("fabric_unusable", group=self.group, problem=str(error), kind=type(error).__name__)
        if self.reachable:
            self.reachable, self.since = False, time.time()
        self.problem, self._kind = str(error), type(error)

    async def _insist(self, send: Callable[[], Awaitable[T]], refused: tuple[type[DispatchError], ...]) -> Answer[T]:
        delay = _FIRST_DELAY_S
        while True:
            try:
                return await self._watched(send)
            except refused as error:
                # Another library may refuse what this version's takes: then it is no answer.
                if isinstance(error, FabricFull) or not await self._foreign():
                    raise
            except GroupUnknown as error:
                await self.configure(error)
            except PROBLEMS as error:
                log.debug("call_not_answered", group=self.group, error=str(error))
            # Jitter: gateways that lost the same server do not come back in step.
            await anyio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            delay = min(delay * 2, _LAST_DELAY_S)

    async def _watched(self, send: Callable[[], Awaitable[T]]) -> Answer[T]:
        sent_at = anyio.current_time()
        try:
            value = await send()
        except _ANSWERS:
            raise
        except PROBLEMS as error:
            self.lost(error)
            raise
        except (LookupError, TypeError, ValueError) as error:
            problem = LibraryProblem(f"the function library on the server answers in another form; run: {LOAD_COMMAND}")
            self.lost(problem)
            raise problem from error
        if not self.reachable and not (self._other_contract and await self._foreign()):
            self._found()
        return Answer(value, sent_at)

    async def _foreign(self) -> bool:
        """Say whether the server's library speaks another contract (then it is noted), or cannot be asked."""
        try:
            found = await self.connection.run(self.group, library_version())
            self._other_contract = found.contract != CONTRACT_VERSION
            if not self._other_contract:
                return False
            require_same(found)
        except PROBLEMS as error:
            self.lost(error)
        return True

    def _found(self) -> None:
        log.info("fabric_usable", group=self.group, away_s=round(time.time() - self.since, 3))
        self.reachable, self.since, self.problem = True, time.time(), ""
        self.on_found()

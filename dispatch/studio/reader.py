"""The one reader of a group in this process: looks at the group, keeps its last 15 minutes, and tells all pages.

However many pages look, the group is read once a second (once in 5 seconds while none does), or sooner when `wake` says
that something changed. What pages are told is what changed since the last time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import structlog

from dispatch.errors import ContractMismatch, DispatchError, GroupUnknown, LibraryProblem
from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.fabric.schema import key
from dispatch.fabric.verifying import verify_library
from dispatch.fabric.view import FabricView, Wanted, read_view
from dispatch.studio.board import Memory, note_gone, tables_of
from dispatch.studio.findings import HistoryFacts
from dispatch.studio.patches import patch_between
from dispatch.studio.redacting import address_of
from dispatch.studio.strip import Strip
from dispatch.studio.trend import trend_of

log = structlog.get_logger(__name__)

LOOKED_AT_S = 1.0
UNWATCHED_S = 5.0
_GATHER_S = 0.25
_ANSWER_S = 4.0
_MANY_POOLS = 80
_SHORT_MS, _LONG_MS = 10_000, 300_000
_STEP_MS = 5_000

Listener = Callable[[str], None]
"""Is told a patch as JSON."""


class Reader:
    """Reads one group until `run` is cancelled. Belongs to one event loop."""

    def __init__(self, url: str, group: str, *, client: str = "glide") -> None:
        self.group = group
        self.connection: Connection | None = None
        self.tables: dict[str, dict[str, dict[str, Any]]] = {"one": {"status": {"state": "loading"}}}
        self.memory = Memory()
        self.strip = Strip()
        self.history: HistoryFacts | None = None
        self.view: FabricView | None = None
        self._url = url
        self._client = client
        self._listeners: set[Listener] = set()
        self._recent: deque[FabricView] = deque()
        self._steps: deque[FabricView] = deque()
        self._wake = asyncio.Event()
        self.tried = asyncio.Event()
        """The group was read once, or could not be."""
        self._answered_ms: int | None = None
        self._verified = False

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` everything now and every change from now on; returns what ends that."""
        self._listeners.add(listener)
        listener(self._everything())
        self.wake()
        return lambda: self._listeners.discard(listener)

    def wake(self) -> None:
        """Read soon: something has changed."""
        self._wake.set()

    def require(self) -> Connection:
        """Return the connection.

        Raises:
            DispatchError: there is none now.
        """
        if self.connection is None:
            raise DispatchError("Valkey does not answer; nothing was changed")
        return self.connection

    async def run(self) -> None:
        """Read until cancelled; what goes wrong is told to the pages and tried again."""
        hearing: asyncio.Task[None] | None = None
        try:
            while True:
                began = time.monotonic()
                await self._read()
                self.tried.set()
                if hearing is None and self.connection is not None:
                    hearing = asyncio.create_task(self._hear(self.connection), name="channel")
                await self._pause(began)
        finally:
            if hearing is not None:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
            if self.connection is not None:
                await self.connection.aclose()

    async def _hear(self, connection: Connection) -> None:
        """Be woken by the group's channel, whatever the server does. Without it the group is read once a second."""
        subscriber = connection.subscriber(key(self.group, "snapshot_channel"))
        try:
            while True:
                try:
                    message = await subscriber.next(UNWATCHED_S)
                except DispatchError:
                    await asyncio.sleep(LOOKED_AT_S)
                    continue
                if message is not None and self._listeners:
                    self.wake()
        finally:
            with anyio.CancelScope(shield=True):
                await subscriber.aclose()

    async def _pause(self, began: float) -> None:
        """Wait for the next time: what wakes it is gathered for a moment, and large groups are read once a second."""
        many = self.view is not None and len(self.view.pools or ()) > _MANY_POOLS
        least = LOOKED_AT_S if many else _GATHER_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKED_AT_S if self._listeners else UNWATCHED_S):
                await self._wake.wait()
        await asyncio.sleep(max(0.0, began + least - time.monotonic()))
        self._wake.clear()

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                connection = await self._connected()
                view = await read_view(connection, self.group, Wanted(running=1_000, endings=200, events=200))
        except TimeoutError:
            self._away(f"no answer within {_ANSWER_S:.0f} s")
        except GroupUnknown:
            nothing: dict[str, dict[str, Any]] = {name: {} for name in self.tables if name != "one"}
            self._tell({**nothing, "one": {"status": {"state": "unconfigured"}}}, keep=False)
        except (LibraryProblem, ContractMismatch) as error:
            self._verified = False
            self._tell({"one": {"status": {"state": "mismatch", "problem": str(error)}}}, keep=True)
        except DispatchError as error:
            self._away(str(error))
        else:
            self._take(view)

    async def _connected(self) -> Connection:
        if self.connection is None:
            self.connection = await connect(self._url, client=self._client)
        if not self._verified:
            await verify_library(self.connection, self.group)
            self._verified = True
        return self.connection

    def _away(self, problem: str) -> None:
        before = self.tables["one"]["status"]
        since = before.get("since_ms") if before.get("state") == "away" else int(time.time() * 1000)
        status = {
            "state": "away", "since_ms": since, "seen_ms": self._answered_ms,
            "problem": problem, "address": address_of(self._url),
        }  # fmt: skip
        if before.get("state") != "away":
            self._verified = False  # what comes back may be another server
            log.warning("fabric_unusable", group=self.group, problem=problem)
        self._tell({"one": {"status": status}}, keep=True)

    def _take(self, view: FabricView) -> None:
        memory = self.memory
        note_gone(self.view, view, memory)
        ticked = memory.lines.take(view)
        memory.recent.take(view)
        self._keep(view)
        memory.short = trend_of([*self._recent])
        if ticked or memory.long is None:
            memory.long = trend_of([*self._steps, view])
        self.view = view
        self._answered_ms = view.server_ms
        tables = tables_of(view, memory)
        tables["one"]["status"] = {"state": "fresh", "unknown": dict(view.unknown)}
        tables["attention"] = self.strip.rows(view, memory, self.history)
        if ticked:
            tables["one"]["lines"] = {name: list(line) for name, line in memory.lines.group.items()}
        elif "lines" in self.tables["one"]:
            tables["one"]["lines"] = self.tables["one"]["lines"]
        self._tell(tables, keep=False, at=view.server_ms, tick=ticked)

    def _keep(self, view: FabricView) -> None:
        """Keep views to compare with: all of the last 10 s, and one in 5 s of the last 5 min."""
        self._recent.append(view)
        while view.server_ms - self._recent[0].server_ms > _SHORT_MS:
            self._recent.popleft()
        if not self._steps or view.server_ms - self._steps[-1].server_ms >= _STEP_MS:
            self._steps.append(view)
        while view.server_ms - self._steps[0].server_ms > _LONG_MS:
            self._steps.popleft()

    def _tell(
        self, tables: dict[str, dict[str, dict[str, Any]]], *, keep: bool, at: int | None = None, tick: bool = False
    ) -> None:
        """Take in new tables (`keep`: and leave the others as they are), and tell what changed."""
        before = self.tables
        if keep:
            tables = {**before, **tables, "one": {**before["one"], **tables["one"]}}
        self.tables = tables
        patch = patch_between(before, tables)
        if at is not None:
            patch["at"] = at
        if tick:
            patch["tick"] = True
        if self._listeners:
            text = msgspec.json.encode(patch).decode()
            for listener in list(self._listeners):
                listener(text)

    def _everything(self) -> str:
        lines = self.memory.lines.pools
        sparks = {name: list(line) for name, line in lines.items()} if len(lines) <= _MANY_POOLS else {}
        patch: dict[str, Any] = {"full": True, "set": self.tables, "sparks": sparks}
        if self.view is not None:
            patch["at"] = self._answered_ms
        return msgspec.json.encode(patch).decode()

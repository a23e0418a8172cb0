"""Executors for gateway tests: scripted work instead of a backend."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable

from dispatch.backend.execution import Execution
from dispatch.contract.envelope import RequestEnvelope
from dispatch.contract.reply import ReplyHead
from dispatch.fabric.records import Lease

DONE = Execution(outcome="succeeded", head=ReplyHead(status=200), body=b'{"done":true}', verdict="good")


class HeldExecutor:
    """Begins each request and answers when it is released. Counts what began, ended and was broken off."""

    def __init__(self, *, held: bool = True, answer: Execution = DONE) -> None:
        self.answer = answer
        self.error: Exception | None = None
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.broken_off: Counter[str] = Counter()
        self.bodies: dict[str, bytes] = {}
        self.running = 0
        self.most = 0
        self._held = held
        self._gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._changed = asyncio.Event()

    def release(self, *request_ids: str) -> None:
        """Let these requests end; without names all, also those to come."""
        if not request_ids:
            self._held = False
        for request_id in request_ids or tuple(self._gates):
            self._gates[request_id].set()

    async def execute(self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float) -> Execution:
        assert envelope.request_id == lease.request_id
        assert deadline_s > 0
        self.begun[lease.request_id] += 1
        self.bodies[lease.request_id] = body
        self.running += 1
        self.most = max(self.most, self.running)
        self._changed.set()
        try:
            if self._held:
                await self._gates[lease.request_id].wait()
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.broken_off[lease.request_id] += 1
            raise
        finally:
            self.running -= 1
            self._changed.set()
        self.ended[lease.request_id] += 1
        return self.answer

    async def until_begun(self, count: int, seconds: float = 5) -> None:
        """Wait until `count` requests have begun."""
        await self._until(lambda: self.begun.total() >= count, seconds)

    async def until_idle(self, seconds: float = 5) -> None:
        """Wait until nothing runs."""
        await self._until(lambda: self.running == 0, seconds)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def aclose(self) -> None:
        pass

"""A tiny gateway for producer tests: claims, asks a script what to answer, settles. No HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import msgspec

from dispatch.contract import ReplyError, ReplyHead
from dispatch.errors import FabricUnavailable
from dispatch.fabric import functions
from dispatch.fabric.calls import FunctionCall, T
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Claim, Heartbeat, Lease, Outcome, Settled, Settlement
from dispatch.fabric.schema import LIMITS, key

SLEEP_S = 0.5
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Scripted:
    """What a script answers for one lease."""

    body: bytes = b"{}"
    outcome: Outcome = Outcome.SUCCEEDED
    status: int | None = 200
    error: ReplyError | None = None


Script = Callable[[Lease, bytes], Awaitable[Scripted]]


async def echo(_lease: Lease, body: bytes) -> Scripted:
    """Answer with the request's own body."""
    return Scripted(body=body)


@dataclass(slots=True)
class EchoGateway:
    """`async with EchoGateway(connection, group, script):` serves the group until left.

    `bodies` are the request bodies it got, by request id; `settled_at` says when each request's settle was answered;
    `runs` counts executions by request id; `cancelled` are the ids it was told to stop.
    """

    connection: Connection
    group: str
    script: Script = echo
    slots: int = 256
    gateway_id: str = field(default_factory=lambda: f"echo-{uuid.uuid4().hex[:8]}")
    bodies: dict[str, bytes] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    settled_at: dict[str, float] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    _running: dict[str, tuple[int, anyio.CancelScope]] = field(default_factory=dict)
    _done: list[Settlement] = field(default_factory=list)
    _turn: anyio.Event = field(default_factory=anyio.Event)
    _tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        for loop in (self._settle_and_claim, self._wake, self._beat):
            self._tasks.start_soon(loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _settle_and_claim(self) -> None:
        while True:
            items, self._done = self._done[: LIMITS["settle_max"]], self._done[LIMITS["settle_max"] :]
            want = min(self.slots - len(self._running), LIMITS["claim_max"])
            nonce = uuid.uuid4().hex
            claim = await self._call(nonce, want, items)
            now = time.monotonic()
            self.settled_at.update((item.request_id, now) for item in items)
            for lease in claim.leases:
                self._start(lease)
            if not (claim.again or self._done):
                await self._turn.wait()
            self._turn = anyio.Event()

    async def _call(self, nonce: str, want: int, items: list[Settlement]) -> Claim:
        dispatcher = f"{self.gateway_id}/{self.group}"
        if items:
            settle = functions.lease_settle(self.gateway_id, dispatcher, nonce=nonce, want=want, items=items)
            answer: Settled = await self._until_answered(settle)
            return answer.claim
        return await self._until_answered(functions.lease_claim(self.gateway_id, dispatcher, nonce=nonce, want=want))

    async def _until_answered(self, call: FunctionCall[T]) -> T:
        while True:
            try:
                return await self.connection.run(self.group, call)
            except FabricUnavailable:
                await anyio.sleep(0.05)

    def _start(self, lease: Lease) -> None:
        if lease.request_id not in self._running:
            assert self._tasks is not None
            scope = anyio.CancelScope()
            self._running[lease.request_id] = (lease.fence, scope)
            self._tasks.start_soon(self._run, lease, scope)

    async def _run(self, lease: Lease, scope: anyio.CancelScope) -> None:
        request_id = lease.request_id
        answer = Scripted(outcome=Outcome.CANCELLED, body=b"", status=None)
        with scope:
            body = lease.body or await self._read_body(lease)
            self.leases[request_id], self.bodies[request_id] = lease, body
            self.runs[request_id] = self.runs.get(request_id, 0) + 1
            answer = await self.script(lease, body)
        head = ReplyHead(status=answer.status, error=answer.error, gateway_id=self.gateway_id)
        settlement = Settlement(
            request_id=request_id, fence=lease.fence, outcome=answer.outcome, status=answer.status,
            head=msgspec.json.encode(head), body=answer.body,
        )  # fmt: skip
        if len(answer.body) > LIMITS["inline_reply_bytes"]:
            await self.connection.put(key(self.group, "reply_body", id=request_id), answer.body, ttl_ms=300_000)
            settlement = msgspec.structs.replace(settlement, body=b"", by_reference=True)
        del self._running[request_id]
        self._done.append(settlement)
        self._turn.set()

    async def _read_body(self, lease: Lease) -> bytes:
        body_key = key(self.group, "request_body", id=lease.request_id, nonce=lease.nonce)
        while True:
            try:
                body = await self.connection.get(body_key)
            except FabricUnavailable:
                await anyio.sleep(0.05)
            else:
                assert body is not None
                return body

    async def _wake(self) -> None:
        waiter = self.connection.waiter()
        try:
            while True:
                try:
                    await waiter.wait(key(self.group, "wake"), SLEEP_S)
                except FabricUnavailable:
                    await anyio.sleep(0.05)
                self._turn.set()
        finally:
            with anyio.CancelScope(shield=True):
                await waiter.aclose()

    async def _beat(self) -> None:
        waiter = self.connection.waiter()
        try:
            while True:
                held = tuple((name, fence) for name, (fence, _) in self._running.items())
                beat = Heartbeat(
                    gateway_id=self.gateway_id, host="test", pid=1, version="0", slots=self.slots, held=held
                )
                try:
                    renewal = await self.connection.run(self.group, functions.lease_renew(beat))
                    for request_id in renewal.cancelled:
                        if request_id in self._running:
                            self.cancelled.append(request_id)
                            self._running[request_id][1].cancel()
                    await waiter.wait(key(self.group, "wake_gateway", gateway=self.gateway_id), BEAT_S)
                except FabricUnavailable:
                    await anyio.sleep(0.05)
        finally:
            with anyio.CancelScope(shield=True):
                await waiter.aclose()

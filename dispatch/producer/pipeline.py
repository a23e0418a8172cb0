"""Many callers, one round trip: calls that arrive while one is under way ride together in the next."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from typing import Any, Generic, TypeVar

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import submit_together
from dispatch.producer.promise import Promise

T = TypeVar("T")

CALLS_MAX = 32
"""Most calls in one round trip. More saves little, and makes all callers go through each stage as one convoy."""

SENDERS = 3
"""Round trips under way at one time: the server works on one while the next is made and the last one is read."""


class Ticket(Generic[T]):
    """One call on its way. `sent` (since `sent_at`): from now on it may be done, whatever becomes of the answer."""

    __slots__ = ("answer", "call", "sent", "sent_at", "withdrawn")

    def __init__(self, call: FunctionCall[T]) -> None:
        self.call = call
        self.answer: Promise[T | DispatchError] = Promise()
        self.sent = False
        self.sent_at = 0.0
        self.withdrawn = False

    def withdraw(self) -> bool:
        """Take the call back if it was not sent yet; returns whether it was in time."""
        self.withdrawn = not self.sent
        return self.withdrawn

    def answered(self) -> T | DispatchError | None:
        """Return the answer, None while there is none."""
        return self.answer.result() if self.answer.done() else None


class Pipeline:
    """Sends calls of one group in the order they came; each `run` has one batch under way at a time.

    With several of them batches may overtake each other: who depends on an earlier call awaits its answer first.
    """

    def __init__(self, connection: Connection, group: str) -> None:
        self._connection = connection
        self._group = group
        self._waiting: deque[Ticket[Any]] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def enter(self, call: FunctionCall[T]) -> Ticket[T]:
        """Put `call` into the next batch. Its ticket's `answer` becomes what it returned or the error it met."""
        ticket = Ticket(call)
        if self._closed:
            ticket.answer.set_result(_closed())
            return ticket
        self._waiting.append(ticket)
        self._arrived.set()
        return ticket

    async def run(self) -> None:
        """Send batches until cancelled; then whoever still waits is answered `FabricUnavailable`."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                while batch := self._next_batch():
                    await self._send(batch)
        finally:
            self._closed = True
            for ticket in self._waiting:
                ticket.answer.set_result(_closed())
            self._waiting.clear()

    def _next_batch(self) -> list[Ticket[Any]]:
        batch: list[Ticket[Any]] = []
        now = time.monotonic()
        while self._waiting and len(batch) < CALLS_MAX:
            ticket = self._waiting.popleft()
            if ticket.withdrawn:
                ticket.answer.set_result(FabricUnavailable("the call was taken back before it was sent"))
                continue
            ticket.sent, ticket.sent_at = True, now
            batch.append(ticket)
        return batch

    async def _send(self, batch: list[Ticket[Any]]) -> None:
        answers: list[Any] = []
        try:
            answers = await self._ask(batch)
        finally:
            if not answers:
                answers = [_closed() for _ in batch]
            for ticket, answer in zip(batch, answers, strict=True):
                ticket.answer.set_result(answer)

    async def _ask(self, batch: list[Ticket[Any]]) -> list[Any]:
        try:
            return await self._run([ticket.call for ticket in batch])
        except FabricUnavailable as error:
            # One for each: an exception that several tasks raise collects the tracebacks of all of them.
            return [copy.copy(error) for _ in batch]
        except DispatchError as error:
            if len(batch) == 1:
                return [error]
        # One call's error hid what the others came to. Every call answers the same when it is repeated.
        return [await self._ask_one(ticket) for ticket in batch]

    async def _run(self, calls: list[FunctionCall[Any]]) -> list[Any]:
        # Submits go first: whatever else is asked about a request comes after its submit anyway.
        submits = [call for call in calls if call.function == "request_submit"]
        others = [call for call in calls if call.function != "request_submit"]
        if not submits:
            return list(await self._connection.run_many(self._group, calls))
        answers = await self._connection.run_many(self._group, [submit_together(submits), *others])
        admissions = iter(answers[0] if isinstance(answers[0], list) else [copy.copy(answers[0]) for _ in submits])
        rest = iter(answers[1:])
        return [next(admissions) if call.function == "request_submit" else next(rest) for call in calls]

    async def _ask_one(self, ticket: Ticket[Any]) -> Any:
        try:
            return await self._connection.run(self._group, ticket.call)
        except DispatchError as error:
            return error


def _closed() -> FabricUnavailable:
    return FabricUnavailable("the connection was closed before the server answered")

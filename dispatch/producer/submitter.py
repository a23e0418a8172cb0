"""From a draft to an admitted request: store the body, submit, and submit again while answers are lost."""

from __future__ import annotations

import time
from typing import TypeVar

import anyio

from dispatch.errors import DispatchError, FabricUnavailable, RequestRefused
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import Admission
from dispatch.producer.bodies import BODIES_AT_ONCE
from dispatch.producer.draft import BODY_TTL_MS
from dispatch.producer.errand import RETRY_MAX_S, RETRY_MIN_S, Errand
from dispatch.producer.inbox import Outcome
from dispatch.producer.pipeline import Pipeline, Ticket
from dispatch.producer.promise import Promise

T = TypeVar("T")

_LATE_S = 0.05


class AsyncErrand(Errand[Promise[Outcome], Ticket[Admission]]):
    """The errand of a task."""

    __slots__ = ()


class Submitter:
    """Gets requests admitted, each once."""

    def __init__(self, connection: Connection, pipeline: Pipeline) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._bodies = anyio.CapacityLimiter(BODIES_AT_ONCE)
        self._heard = 0.0

    async def admit(self, errand: AsyncErrand) -> float:
        """Submit until the group has answered. Returns how many seconds the reply may take from now.

        The same id and nonce travel with every attempt, so however many of them were done there is one request.

        Raises:
            RequestRefused, StateConflict, PoolUnknown, ...: nothing was queued.
            FabricUnavailable: no answer within the bound; the request may or may not be queued.
        """
        with errand.draft.span:
            return await self._admit(errand)

    async def _admit(self, errand: AsyncErrand) -> float:
        pause = RETRY_MIN_S
        while True:
            answer = await self._attempt(errand)
            try:
                reply_s = errand.judge(answer)
            except RequestRefused as refusal:
                await errand.slot.within(errand.room_in_s(refusal))
                errand.check()
                continue
            if reply_s is not None:
                return reply_s
            if errand.admission_left_s() <= pause:
                raise errand.unanswered(answer)
            await anyio.sleep(pause)
            pause = min(pause * 2, RETRY_MAX_S)

    async def _attempt(self, errand: AsyncErrand) -> Admission | DispatchError:
        draft = errand.draft
        if errand.must_store and draft.body_key is not None:
            failure = await self._store(errand, draft.body_key)
            if failure is not None:
                return failure
        errand.attempt = self._pipeline.enter(draft.submit(errand.timeout_left_ms()))
        answer = await self._unless_silent(errand, errand.attempt.answer)
        if answer is None:
            return FabricUnavailable("Valkey did not answer in time")
        if not isinstance(answer, FabricUnavailable):
            self._heard = time.monotonic()
        return answer

    async def _store(self, errand: AsyncErrand, body_key: str) -> DispatchError | None:
        """Store the body when it is its turn; returns why it could not be done."""
        stored: Promise[DispatchError | None] = Promise()

        async def put() -> None:
            async with self._bodies:
                if self._heard > errand.asked:  # those in front were answered: from now on it is our turn to be
                    errand.asked = time.monotonic()
                try:
                    await self._connection.put(body_key, errand.draft.body, ttl_ms=BODY_TTL_MS)
                except DispatchError as error:  # as itself, not inside a group of errors
                    stored.set_result(error)
                    return
            errand.stored = True
            self._heard = time.monotonic()
            stored.set_result(None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put)  # a server that does not answer those in front answers nobody: the wait counts
            await self._unless_silent(errand, stored)
            tasks.cancel_scope.cancel()
        return stored.result() if stored.done() else FabricUnavailable("Valkey did not answer in time")

    async def _unless_silent(self, errand: AsyncErrand, answer: Promise[T]) -> T | None:
        """Wait for `answer` until the server has been silent, to everybody, for longer than the errand's bound."""
        while True:
            # A busy event loop looks like a silent server: see first what has come meanwhile.
            if await answer.within(errand.admission_left_s()) or await answer.within(_LATE_S):
                return answer.result()
            if errand.overdue():
                return None
            if errand.admission_left_s() > 0:  # its turn has come meanwhile
                continue
            if self._heard <= errand.asked:
                return None
            errand.asked = self._heard

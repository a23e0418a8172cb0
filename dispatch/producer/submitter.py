"""From a draft to an admitted request: store the body, submit, and submit again while answers are lost."""

from __future__ import annotations

import anyio

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric.connection import Connection
from dispatch.producer.bodies import BODIES_AT_ONCE
from dispatch.producer.draft import BODY_TTL_MS, Admission
from dispatch.producer.errand import RETRY_MAX_S, RETRY_MIN_S, Errand
from dispatch.producer.inbox import Outcome
from dispatch.producer.pipeline import Pipeline, Ticket
from dispatch.producer.promise import Promise

AsyncErrand = Errand[Promise[Outcome], Ticket[Admission]]


class Submitter:
    """Gets requests admitted, each once."""

    def __init__(self, connection: Connection, pipeline: Pipeline) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._bodies = anyio.CapacityLimiter(BODIES_AT_ONCE)

    async def admit(self, errand: AsyncErrand) -> float:
        """Submit until the group has answered. Returns how many seconds the reply may take from now.

        The same id and nonce travel with every attempt, so however many of them were done there is one request.

        Raises:
            RequestRefused, StateConflict, PoolUnknown, ...: nothing was queued.
            FabricUnavailable: no answer within the bound; the request may or may not be queued.
        """
        pause = RETRY_MIN_S
        while True:
            answer = await self._attempt(errand)
            if (reply_s := errand.judge(answer)) is not None:
                return reply_s
            if errand.admission_left_s() <= pause:
                raise errand.unanswered(answer)
            await anyio.sleep(pause)
            pause = min(pause * 2, RETRY_MAX_S)

    async def _attempt(self, errand: AsyncErrand) -> Admission | DispatchError:
        draft = errand.draft
        with anyio.move_on_after(max(0, errand.admission_left_s())):
            if errand.must_store and draft.body_key is not None:
                try:
                    async with self._bodies:
                        await self._connection.put(draft.body_key, draft.body, ttl_ms=BODY_TTL_MS)
                except FabricUnavailable as error:
                    return error
                errand.stored = True
            errand.attempt = self._pipeline.enter(draft.submit(errand.timeout_left_ms()))
            return await errand.attempt.answer.wait()
        return FabricUnavailable("Valkey did not answer in time")

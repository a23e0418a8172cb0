"""From a draft to an admitted request: store the body, submit, and submit again while answers are lost."""

from __future__ import annotations

import anyio

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Admitted, Refused
from dispatch.producer.draft import BODY_TTL_MS, Admission, refusal
from dispatch.producer.errand import GRACE_S, Errand
from dispatch.producer.pipeline import Pipeline

BODIES_AT_ONCE = 4
"""Large bodies on their way to or from the server at one time: more would hold up the small calls behind them."""

_RETRY_MIN_S, _RETRY_MAX_S = 0.02, 0.5


class Submitter:
    """Gets requests admitted, each once."""

    def __init__(self, connection: Connection, pipeline: Pipeline) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._bodies = anyio.CapacityLimiter(BODIES_AT_ONCE)

    async def admit(self, errand: Errand) -> float:
        """Submit until the group has answered. Returns how many seconds the reply may take from now.

        The same id and nonce travel with every attempt, so however many of them were done there is one request.

        Raises:
            RequestRefused, StateConflict, PoolUnknown, ...: nothing was queued.
            FabricUnavailable: no answer within the bound; the request may or may not be queued.
        """
        pause = _RETRY_MIN_S
        while True:
            answer = await self._attempt(errand)
            if isinstance(answer, Admitted):
                return max(0, answer.deadline_ms - answer.server_ms) / 1000 + GRACE_S
            if isinstance(answer, FabricUnavailable):
                errand.uncertain = errand.uncertain or (errand.ticket is not None and errand.ticket.sent)
                if errand.slot.done():  # the reply was faster than the answer
                    return 0
            elif isinstance(answer, DispatchError):
                raise answer
            elif errand.stored and isinstance(answer, Refused) and answer.reason == "body_missing":
                errand.stored = False  # it expired before the submit came through
            else:
                raise refusal(errand.draft, answer)
            if errand.admission_left_s() <= pause:
                raise _unanswered(errand, answer)
            await anyio.sleep(pause)
            pause = min(pause * 2, _RETRY_MAX_S)

    async def _attempt(self, errand: Errand) -> Admission | DispatchError:
        draft = errand.draft
        with anyio.move_on_after(max(0, errand.admission_left_s())):
            # Never stored again once a submit may have been done (admission has set the body's expiry, and this would
            # shorten it), unless the server says that it has no body, hence no such request.
            if draft.body_key is not None and not errand.stored:
                try:
                    async with self._bodies:
                        await self._connection.put(draft.body_key, draft.body, ttl_ms=BODY_TTL_MS)
                except FabricUnavailable as error:
                    return error
                errand.stored = True
            errand.ticket = self._pipeline.enter(draft.submit(errand.timeout_left_ms()))
            return await errand.ticket.answer.wait()
        return FabricUnavailable("Valkey did not answer in time")


def _unanswered(errand: Errand, answer: Admission | DispatchError) -> DispatchError:
    known = "it is not queued"
    if errand.uncertain:
        known = "it is not known whether it was queued; if it was, it is cancelled"
    cause = answer if isinstance(answer, DispatchError) else "its body could not be stored"
    return FabricUnavailable(
        f"request {errand.request_id} was not admitted in {errand.admission_s:g} s: {cause}; {known}"
    )

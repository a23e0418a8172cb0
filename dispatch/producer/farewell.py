"""What happens to a request whose caller has left: it is cancelled, so that nobody works for nobody."""

from __future__ import annotations

import time

import anyio
import structlog

from dispatch.errors import FabricError, FabricUnavailable, LibraryProblem
from dispatch.fabric import functions
from dispatch.fabric.connection import Connection
from dispatch.producer.inbox import Inbox
from dispatch.producer.pipeline import Pipeline
from dispatch.producer.recovery import row_of, state_of
from dispatch.producer.session import Session
from dispatch.producer.submitter import AsyncErrand

_log = structlog.get_logger(__name__)

FAREWELL_S = 5.0
"""How long a cancel is attempted. After that the request runs out its deadline and its reply is dropped."""

REPLY_DUE_S = 10.0
"""How long the reply of a cancelled request is looked for, to take it out of the list."""

_RETRY_S = 0.1

_PASSING = (FabricUnavailable, LibraryProblem)
"""What may be over in a moment: the server is away, or its library is being loaded."""


class Farewell:
    """Cancels requests in the background, within a bound."""

    def __init__(self, connection: Connection, pipeline: Pipeline, session: Session, inbox: Inbox) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._session = session
        self._inbox = inbox

    async def retire(self, errand: AsyncErrand) -> None:
        """Cancel the request of `errand`, whose caller is gone, if the group has it. Never raises an error."""
        with anyio.move_on_after(FAREWELL_S):
            if errand.attempt is not None:
                await errand.attempt.answer.wait()
            if errand.surely_not_queued() or not (errand.surely_ours() or await self._is_ours(errand)):
                self._inbox.forget(errand.request_id)
                return
            await self.cancel(errand.request_id, "the caller left")
            return
        _log.warning("request_not_cancelled", request_id=errand.request_id, reason="no answer in time")

    async def cancel(self, request_id: str, reason: str) -> None:
        """Cancel `request_id`; repeated until the server has answered (the caller sets a bound)."""
        while True:
            call = functions.request_cancel(request_id, actor=self._session.producer_id, reason=reason)
            answer = await self._pipeline.enter(call).answer.wait()
            if isinstance(answer, _PASSING):
                await anyio.sleep(_RETRY_S)
                continue
            if isinstance(answer, Exception):
                _log.warning("request_not_cancelled", request_id=request_id, reason=str(answer))
            elif answer.status == "UNKNOWN":
                self._inbox.forget(request_id)
            return

    async def _is_ours(self, errand: AsyncErrand) -> bool:
        """Whether the request under an id that the caller chose is this client's, or another's of the same id."""
        while True:
            try:
                answer = await self._connection.run(self._session.group, state_of(errand.request_id))
            except _PASSING:
                await anyio.sleep(_RETRY_S)
            except FabricError as error:
                _log.warning("request_not_cancelled", request_id=errand.request_id, reason=str(error))
                return False
            else:
                row = row_of(answer)
                return row is not None and row["producer_id"] == self._session.producer_id


def reply_due() -> float:
    """Return until when the reply of a request that is being cancelled is looked for."""
    return time.monotonic() + REPLY_DUE_S

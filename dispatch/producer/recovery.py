"""After an outage or a lapse of liveness: which outstanding requests will never be answered, and what to tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dispatch.contract.reply import Reply, ReplyError, ReplyHead
from dispatch.errors import DispatchError, FabricError, GroupUnknown, OutcomeUnknown
from dispatch.fabric import functions
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.schema import document
from dispatch.producer.inbox import Outcome

PAGE = 128
"""Requests whose state is asked for in one round trip."""

_WHY_UNTOLD = {
    "producer_gone": "the group took this producer for gone: its liveness ran out while process or server stood still",
    "reply_dropped": "it ran, but its reply was dropped: the producer's liveness had run out",
}


async def unanswerable(connection: Connection, group: str, ids: Sequence[str]) -> dict[str, Outcome]:
    """Ask for the state of each admitted request; return the outcome of those of which no frame will come.

    Requests that wait, run, or ended with a frame that is on its way are not in the answer. A request whose frame is
    read after this was called counts as answered: its caller goes by the frame.

    Raises:
        FabricUnavailable, LibraryProblem: nothing is known.
    """
    outcomes: dict[str, Outcome] = {}
    for page in pages(ids):
        answers = await connection.run_many(group, [state_of(request_id) for request_id in page])
        for request_id, answer in zip(page, answers, strict=True):
            if (outcome := conclusion(request_id, answer)) is not None:
                outcomes[request_id] = outcome
    return outcomes


def state_of(request_id: str) -> FunctionCall[Any]:
    """Make the call that reads one request's state."""
    return functions.fabric_snapshot("request", subject=request_id)


def row_of(answer: Any) -> dict[str, Any] | None:
    """Return the request's row in the answer to `state_of`, None when there is no such request."""
    rows: list[dict[str, Any]] = answer["rows"]
    return rows[0] if rows else None


def conclusion(request_id: str, answer: Any) -> Outcome | None:
    """Judge the answer to `state_of`: what the caller has to be told without a frame, None = wait on.

    Raises:
        DispatchError: the answer is an error that says nothing about the request.
    """
    if isinstance(answer, GroupUnknown):
        return _vanished(request_id)
    if isinstance(answer, DispatchError):
        raise answer
    row = row_of(answer)
    if row is None:
        return _vanished(request_id)
    ending: str = row.get("ending", "")
    if row["state"] != "ended" or document()["endings"][ending]["told"]:
        return None
    error = ReplyError(type=ending, message=_WHY_UNTOLD.get(ending, "it ended untold"), source="dispatch")
    return Reply(
        request_id=request_id,
        pool_id=row["pool_id"],
        ending=ending,
        attempt=row["attempt"],
        head=ReplyHead(error=error),
    )


def _vanished(request_id: str) -> FabricError:
    return OutcomeUnknown(
        f"the group does not know request {request_id} any more, although it was admitted: Valkey has lost data, or "
        "the request ended and its reply expired unread; it is not known whether it ran"
    )


def pages(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Part `ids` into what is asked for in one round trip."""
    rest = iter(ids)
    while page := list(itertools.islice(rest, PAGE)):
        yield page

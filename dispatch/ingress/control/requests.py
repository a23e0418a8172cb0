"""Requests: where they are, what came of them, and stopping them."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from dispatch.contract.answer_fields import Ids
from dispatch.contract.answers import Meaning, Problem, answer_of_reply
from dispatch.contract.reply import Reply
from dispatch.errors import PoolUnknown
from dispatch.fabric.functions import fabric_snapshot, pool_estimate, request_cancel
from dispatch.fabric.records import Cancellation
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import (
    Admin,
    Anyone,
    Control,
    Here,
    Observer,
    actor_of,
    allows_all_pools,
    changes,
    sees,
)
from dispatch.ingress.control.answering import ControlRoute, Refusal, as_response
from dispatch.ingress.control.bodies import Change, documented, read_change
from dispatch.ingress.control.documenting import BODY, errors
from dispatch.ingress.control.listing import Filter, Listing
from dispatch.ingress.control.paging import NAME, RequestId
from dispatch.ingress.control.shapes import EstimateFacts, RequestRow, RequestsPage, Shape
from dispatch.producer.call_headers import caller_request_id, collect
from dispatch.producer.detached import Found, look, unknown, whole_reply
from dispatch.producer.recovery import row_of

router = APIRouter(prefix="/requests", tags=["requests"], route_class=ControlRoute)

_AT_ONCE = 100
_NOT_ENDED = Meaning(HTTPStatus.CONFLICT, "rejected-not_ended", retry=True)


class ReplyUsage(Shape):
    """Tokens as the endpoint reported them."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_input_tokens: int | None = None
    reasoning_output_tokens: int | None = None


class ReplyErrorFacts(Shape):
    """Why it did not succeed."""

    type: str
    message: str
    source: str
    param: str | None = None
    code: str | None = None


class ReplyFacts(Shape):
    """A reply that is kept. Its body is there for who may read it, if it is JSON of at most 64 KiB; else see `href`."""

    ending: str
    status: int | None = Field(description="the endpoint's")
    attempt: int
    queue_ms: int | None
    execution_ms: int | None
    error: ReplyErrorFacts | None
    usage: ReplyUsage | None
    finish_reasons: list[str]
    response_model: str | None
    gateway_id: str | None
    endpoint_id: str | None
    body: Any = None
    href: str = Field(description="where the endpoint's answer is, byte for byte")


class RequestFacts(RequestRow):
    """Where a request is: its facts, how its pool stands while it waits, and its reply when it has ended."""

    server_ms: int
    attempt: int | None = None  # type: ignore[assignment] # not known when nothing but the reply is kept
    queue: EstimateFacts | None = Field(None, description="the request's pool: what a new request would meet there")
    reply: ReplyFacts | None = None


class Stop(Change):
    """Who stops a request, and why. `only_waiting`: one that runs is left alone."""

    only_waiting: bool = False


class StopMany(Stop):
    """Requests to stop."""

    request_ids: list[Annotated[str, Field(pattern=NAME)]] = Field(min_length=1, max_length=_AT_ONCE)


class Stopped(Shape):
    """What became of a request: it was waiting and is cancelled; its gateway was told to stop it; it was left alone."""

    request_id: str
    result: Literal["cancelled", "cancelling", "running", "ended", "unknown"]
    ending: str | None = Field(description="how it had ended before")
    gateway_id: str | None = Field(description="where it runs")


class StoppedMany(Shape):
    """What became of each, in the order given."""

    requests: list[Stopped]


@router.get("", response_model=RequestsPage, response_model_exclude_unset=True, responses=errors(404))
async def list_requests(principal: Observer, control: Here, wanted: Annotated[Filter, Query()]) -> Any:
    """List requests that run, that wait for their next attempt, and that wait for their turn, in this order."""
    if wanted.pool:
        principal.require_pool(wanted.pool)
    return await Listing(control.group, principal, wanted).page()


@router.get("/{request_id}", response_model=RequestFacts, response_model_exclude_unset=True, responses=errors(404))
async def read_request(principal: Anyone, control: Here, request_id: RequestId, request: Request) -> Any:
    """Say where a request is. Any key may ask after those that were made with it, an observer after all of its pools.

    The facts of one that has ended are kept for a minute (`retention_ms`), the reply of one that was submitted, or of a
    call with an idempotency key, for a day (`idempotency_ttl_ms`).
    """
    found = await _found(control, principal, request_id)
    facts: dict[str, Any] = {"server_ms": found.server_ms, **(found.row or _row_of_reply(found))}
    if found.frame is not None:
        facts["reply"] = _reply_facts(found, str(request.url.path), may_read=changes(principal, _owner(found)))
    if facts["state"] == "queued":
        with contextlib.suppress(PoolUnknown):  # its pool was taken out past the library
            estimate = await control.group.run(pool_estimate(facts["pool_id"]))
            known = msgspec.to_builtins(estimate)
            facts["queue"] = {"pool_id": facts["pool_id"], **known, "reason": estimate.reason or None}
    return facts


@router.get(
    "/{request_id}/reply",
    response_class=Response,
    responses=errors(404, 409)
    | {
        200: {"description": "the endpoint's answer, byte for byte", "content": {"application/json": {}}},
        "default": {"description": "what the call would have been answered", "content": {"application/json": {}}},
    },
)
async def read_reply(principal: Anyone, control: Here, request_id: RequestId, request: Request) -> Response:
    """Give the answer that the call would have got, with its status. It stays where it is.

    For the key that the request was made with, and admins: it has content. 409 while the request has not ended.
    """
    found = await _found(control, principal, request_id)
    if not changes(principal, _owner(found)):
        raise unknown(request_id)
    frame = found.kept()
    if frame is None:
        state = found.state().state
        message = f"request {request_id} has not ended: it is {state}; ask again later"
        raise Refusal(Problem(meaning=_NOT_ENDED, message=message, code="not_ended"))
    reply = await control.group.within(lambda: whole_reply(control.group.connection, control.group.name, frame))
    ids = Ids(caller_request_id(collect(request.scope["headers"])), request_id)
    return as_response(answer_of_reply(reply), ids)


@router.post(
    "/{request_id}/cancel",
    response_model=Stopped,
    responses=errors(404, *BODY),
    openapi_extra=documented(Stop, required=False),
)
async def cancel(request: Request, principal: Anyone, control: Here, request_id: RequestId) -> Any:
    """Stop a request: one that waits ends at once, the gateway of one that runs is told. Repeatable.

    For the key that it was made with, and admins.
    """
    stop = await read_change(request, control, Stop)
    [stopped] = await _stop(control, principal, [request_id], stop)
    if stopped["result"] == "unknown":
        raise unknown(request_id)
    return stopped


@router.post("/cancel", response_model=StoppedMany, responses=errors(*BODY), openapi_extra=documented(StopMany))
async def cancel_many(request: Request, principal: Admin, control: Here) -> Any:
    """Stop up to 100 requests."""
    stop = await read_change(request, control, StopMany)
    return {"requests": await _stop(control, principal, stop.request_ids, stop)}


async def _found(control: Control, principal: Principal, request_id: str) -> Found:
    """Look a request up.

    Raises:
        RequestUnknown: it is not there, or not for this key.
    """
    group = control.group
    found = await group.within(lambda: look(group.connection, group.name, request_id))
    if (found.row is None and found.frame is None) or not sees(principal, _owner(found)):
        raise unknown(request_id)
    return found


def _owner(found: Found) -> dict[str, Any]:
    """Return what decides who may see a request."""
    return found.row or _row_of_reply(found)


def _row_of_reply(found: Found) -> dict[str, Any]:
    state = found.state()
    return {
        "request_id": state.id, "state": state.state, "ending": state.ending, "pool_id": state.pool_id,
        "attempt": state.attempt,
    }  # fmt: skip


def _reply_facts(found: Found, path: str, *, may_read: bool) -> dict[str, Any]:
    assert found.frame is not None  # the caller has looked  # noqa: S101 - for the type checker
    reply = found.frame.reply
    facts: dict[str, Any] = {
        "ending": reply.ending, "status": reply.status, "attempt": reply.attempt, "queue_ms": reply.queue_ms,
        "execution_ms": reply.execution_ms, "error": _plain(reply.error), "usage": _plain(reply.usage),
        "finish_reasons": reply.head.finish_reasons, "response_model": reply.head.response_model,
        "gateway_id": reply.head.gateway_id, "endpoint_id": reply.head.endpoint_id, "href": f"{path}/reply",
    }  # fmt: skip
    if not may_read and facts["error"] is not None:
        facts["error"] |= {"param": None, "code": None}  # words of the endpoint's, for the caller alone
    if may_read and (body := _body(reply)) is not None:
        facts["body"] = body
    return facts


def _plain(value: Any) -> Any:
    return None if value is None else msgspec.to_builtins(value)


def _body(reply: Reply) -> Any:
    try:
        return reply.json() if reply.body else None
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


async def _stop(control: Control, principal: Principal, ids: list[str], stop: Stop) -> list[dict[str, Any]]:
    """Stop those of `ids` that the key may change; the others are answered as unknown."""
    group, actor = control.group, actor_of(principal, stop.actor)
    allowed = set(ids)
    if not (allows_all_pools(principal) and "admin" in principal.roles):
        pages = await group.run_many([fabric_snapshot("request", subject=request_id) for request_id in ids])
        rows = [row for page in pages if (row := row_of(page)) is not None]
        allowed = {row["request_id"] for row in rows if changes(principal, row)}
    calls = {
        request_id: request_cancel(request_id, actor=actor, reason=stop.reason, only_waiting=stop.only_waiting)
        for request_id in ids
        if request_id in allowed
    }
    answers = dict(zip(calls, await group.run_many(list(calls.values())), strict=True)) if calls else {}
    return [_stopped(request_id, answers.get(request_id)) for request_id in ids]


def _stopped(request_id: str, answer: Cancellation | None) -> dict[str, Any]:
    status = "UNKNOWN" if answer is None else answer.status
    said = None if answer is None else answer.ending or None
    return {
        "request_id": request_id,
        "result": status.lower(),
        "ending": said if status == "ENDED" else None,
        "gateway_id": said if status in {"CANCELLING", "RUNNING"} else None,
    }

"""The dead list: requests of at_least_once pools whose attempts are spent."""

from __future__ import annotations

import secrets
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from dispatch.contract.answers import Answer
from dispatch.errors import RequestRefused, RequestUnknown
from dispatch.fabric.api_keys import Role
from dispatch.fabric.functions import dead_change, dead_content, fabric_snapshot
from dispatch.fabric.schema import document, key
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import Admin, Control, Here, Observer, actor_of
from dispatch.ingress.control.answering import JSON_FIELDS, ControlRoute, as_response
from dispatch.ingress.control.bodies import Change, documented, read_change
from dispatch.ingress.control.documenting import BODY, errors
from dispatch.ingress.control.paging import Actor, Dead, RequestId, page_of
from dispatch.ingress.control.shapes import RequestRow, RequestsPage, Shape

router = APIRouter(prefix="/dead", tags=["dead"], route_class=ControlRoute)

WithContent = Annotated[bool, Query(description="what it says, too: prompts, and whatever they hold; for admins")]


class DeadFacts(RequestRow):
    """One dead request and each of its tries. `envelope` and `body` only where they were asked for, as text."""

    envelope: str | None = None
    body: str | None = Field(None, description="the call as it was sent; what is no UTF-8 in it is replaced")


class Retried(Shape):
    """A dead request was submitted anew, under a new id; its reply is kept to be fetched."""

    request_id: str
    new_id: str
    href: str


class Dropped(Shape):
    """A dead request is gone, with all that was kept of it."""

    request_id: str
    dropped: bool


@router.get("", response_model=RequestsPage, response_model_exclude_unset=True, responses=errors())
async def list_dead(principal: Observer, control: Here, page: Dead) -> Any:
    """List dead requests, the last that died first. A page of one pool may have fewer rows than asked for."""
    if page.pool:
        principal.require_pool(page.pool)
        call = fabric_snapshot("dead", cursor=page.cursor, limit=page.limit, subject=page.pool)
        return await control.group.run(call)
    return await page_of(control.group, principal, "dead", page, page.cursor)


@router.get("/{request_id}", response_model=DeadFacts, response_model_exclude_unset=True, responses=errors(404))
async def read_dead(principal: Observer, control: Here, request_id: RequestId, content: WithContent = False) -> Any:
    """Say all that is known of a dead request. What it says is for admins who ask for it."""
    if content:
        principal.require(Role.ADMIN)
    row = await _row(control, principal, request_id)
    if not content:
        return row
    found = await control.group.run(dead_content(request_id))
    if found is None:
        raise _absent(control, request_id)
    body: bytes | None = found.body
    if len(found.body) != found.body_bytes:
        body = await control.group.get(key(control.group.name, "request_body", id=request_id, nonce=found.nonce))
    said = {"envelope": found.envelope.decode(errors="replace"), "body": (body or b"").decode(errors="replace")}
    # Written here: a large text would be copied several times on its way through the framework's model.
    return as_response(Answer(HTTPStatus.OK, list(JSON_FIELDS), msgspec.json.encode(row | said)))


@router.post(
    "/{request_id}/retry",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Retried,
    responses=errors(404, 429, *BODY),
    openapi_extra=documented(Change, required=False),
)
async def retry(request: Request, response: Response, principal: Admin, control: Here, request_id: RequestId) -> Any:
    """Submit a dead request anew: fresh deadline, attempts counted from 0. Its pool may refuse it, as any submit."""
    change = await read_change(request, control, Change)
    row = await _row(control, principal, request_id)
    call = dead_change("retry", request_id, actor=actor_of(principal, change.actor), new_id=secrets.token_hex(16))
    done = await control.group.run(call)
    if done.status == "UNKNOWN":
        raise _absent(control, request_id)
    if done.status == "REFUSED":
        why = document()["refusals"].get(done.reason, "refused")
        message = f"not retried ({done.reason}): {why}; it stays in the list"
        raise RequestRefused(done.reason, pool_id=row["pool_id"], value=done.value, limit=done.limit, message=message)
    href = f"{request.url.path.rpartition('/dead/')[0]}/requests/{done.new_id}"
    response.headers["location"] = href
    return {"request_id": request_id, "new_id": done.new_id, "href": href}


@router.delete("/{request_id}", response_model=Dropped, responses=errors(404))
async def drop(principal: Admin, control: Here, request_id: RequestId, actor: Actor = "") -> Any:
    """Forget a dead request and all that is kept of it, at once."""
    await _row(control, principal, request_id)
    done = await control.group.run(dead_change("drop", request_id, actor=actor_of(principal, actor)))
    if done.status == "UNKNOWN":
        raise _absent(control, request_id)
    return {"request_id": request_id, "dropped": True}


async def _row(control: Control, principal: Principal, request_id: str) -> dict[str, Any]:
    """Return the row of a dead request.

    Raises:
        RequestUnknown: it is not in the list, or not for this key.
    """
    page = await control.group.run(fabric_snapshot("request", subject=request_id))
    for found in page["rows"]:
        row: dict[str, Any] = found
        if "died_ms" in row and principal.pool_allowed(row["pool_id"]):
            return row
    raise _absent(control, request_id)


def _absent(control: Control, request_id: str) -> RequestUnknown:
    return RequestUnknown(f"{request_id} is not in the dead list of group {control.group.name}")

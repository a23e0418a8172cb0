"""The config of the group: one document, applied as a whole if the expected generation is in force."""

from __future__ import annotations

import hashlib
import uuid
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from pydantic import Field

from dispatch.config import encode_document
from dispatch.contract.answers import rejected
from dispatch.errors import BadArgument, ConfigurationError, GroupUnknown, InvalidRequest
from dispatch.fabric.functions import fabric_snapshot, group_check, group_configure
from dispatch.fabric.records import Configured
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import Admin, Control, Here, Observer, actor_of, require_all_pools
from dispatch.ingress.control.answering import ControlRoute, Refusal
from dispatch.ingress.control.bodies import DOCUMENT_BYTES, Change, documented, read_change
from dispatch.ingress.control.documenting import BODY, errors
from dispatch.ingress.control.paging import Numbered
from dispatch.ingress.control.shapes import ErrorBody, Page, Shape

router = APIRouter(prefix="/config", tags=["config"], route_class=ControlRoute)

_WHAT = "the config"
_GENERATION_MAX = 2**53

Number = Annotated[int, Path(ge=1, le=_GENERATION_MAX, description="a generation")]


class GenerationRow(Shape):
    """One generation of the config: who made it, when and why, and how many fields it changed."""

    generation: int
    actor: str
    reason: str
    changed_ms: int
    changed: int


class GenerationsPage(Page):
    """Generations, the newest first."""

    rows: list[GenerationRow]


class ConfigInForce(Shape):
    """The config with every default filled in."""

    server_ms: int
    generation: int
    actor: str
    reason: str
    changed_ms: int
    document: dict[str, Any]


class FieldChange(Shape):
    """A difference in words."""

    field: str
    before: str
    after: str


class Generation(ConfigInForce):
    """A generation that is kept, and what it changed (`changes` are the first of `changed`)."""

    changed: int
    changes: list[FieldChange]


class FieldProblem(Shape):
    """One thing wrong in a document: where, what was found, and what is allowed."""

    field: str
    value: str
    message: str


class Outcome(Shape):
    """What became of a document. `valid` stands for `applied` where nothing was to be changed."""

    status: Literal["applied", "valid", "unchanged"]
    generation: int = Field(description="the one in force")
    actor: str | None = Field(None, description="who made that one")
    changed_ms: int | None = None
    changed: int = Field(description="how many fields differ")
    changes: list[FieldChange] = Field(description="the first of them")


class ConflictBody(ErrorBody):
    """Another generation is in force than the expected one: this one, since when and by whom."""

    generation: int
    actor: str | None
    changed_ms: int | None


class InvalidConfigBody(ConflictBody):
    """The document is refused, with everything that is wrong in it. The generation stays in force."""

    problems: list[FieldProblem]


class Check(Change):
    """A document that is to be compared. Without `expected_generation`, with whatever is in force."""

    document: dict[str, Any]
    expected_generation: int | None = Field(None, ge=0, le=_GENERATION_MAX)


class Apply(Change):
    """A document that is to be in force. What it leaves out has its default; a pool it leaves out is removed."""

    document: dict[str, Any]
    expected_generation: int = Field(ge=0, le=_GENERATION_MAX, description="the one in force; 0 = never configured")


class Rollback(Change):
    """A generation whose document is to be in force again, as a new one."""

    generation: int = Field(ge=1, le=_GENERATION_MAX)
    expected_generation: int = Field(ge=0, le=_GENERATION_MAX, description="the one in force")


_REFUSED = errors(*BODY, s409=ConflictBody, s422=InvalidConfigBody)


@router.get("", response_model=ConfigInForce, responses=errors())
async def read_config(principal: Observer, control: Here) -> Any:
    """Read the config in force. What is read can be edited and applied."""
    require_all_pools(principal, _WHAT)
    return await control.group.run(fabric_snapshot("config"))


@router.put("", response_model=Outcome, responses=_REFUSED, openapi_extra=documented(Apply))
async def apply_config(request: Request, principal: Admin, control: Here) -> Any:
    """Bring a document into force, all or nothing, if the expected generation is.

    With an `Idempotency-Key` a repeat is answered `applied` as the first time, without the changes.
    """
    require_all_pools(principal, _WHAT)
    change = await read_change(request, control, Apply, DOCUMENT_BYTES)
    return await _apply(control, _nonce(request, principal), change, actor_of(principal, change.actor))


@router.post("/check", response_model=Outcome, responses=_REFUSED, openapi_extra=documented(Check))
async def check_config(request: Request, principal: Admin, control: Here) -> Any:
    """Say what applying a document would change, field by field, and change nothing."""
    require_all_pools(principal, _WHAT)
    change = await read_change(request, control, Check, DOCUMENT_BYTES)
    expected = change.expected_generation
    if expected is None:
        expected = (await _in_force(control))["generation"]
    answer = await control.group.run(group_check(_encoded(change.document), expected_generation=expected))
    return await _outcome(control, answer, expected)


@router.post("/rollback", response_model=Outcome, responses=_REFUSED | errors(404), openapi_extra=documented(Rollback))
async def roll_back(request: Request, principal: Admin, control: Here) -> Any:
    """Apply the document of an earlier generation once more, as a new one."""
    require_all_pools(principal, _WHAT)
    change = await read_change(request, control, Rollback)
    earlier = await _generation(control, change.generation)
    again = Apply(
        document=earlier["document"],
        expected_generation=change.expected_generation,
        actor=change.actor,
        reason=change.reason or f"rollback to {change.generation}",
    )
    return await _apply(control, _nonce(request, principal), again, actor_of(principal, change.actor))


@router.get("/generations", response_model=GenerationsPage, responses=errors())
async def list_generations(principal: Observer, control: Here, page: Numbered) -> Any:
    """List the generations that are kept: when, by whom, why."""
    require_all_pools(principal, _WHAT)
    return await control.group.run(fabric_snapshot("generations", cursor=page.cursor, limit=page.limit))


@router.get("/generations/{generation}", response_model=Generation, responses=errors(404))
async def read_generation(principal: Observer, control: Here, generation: Number) -> Any:
    """Read a generation that is kept: its document, and what it changed."""
    require_all_pools(principal, _WHAT)
    found = await _generation(control, generation)
    return found | {"changes": [dict(zip(("field", "before", "after"), one, strict=True)) for one in found["changes"]]}


async def _apply(control: Control, nonce: str, change: Apply, actor: str) -> dict[str, Any]:
    expected = change.expected_generation
    call = group_configure(
        _encoded(change.document), expected_generation=expected, actor=actor, reason=change.reason, nonce=nonce
    )
    return await _outcome(control, await control.group.run(call), expected)


async def _outcome(control: Control, answer: Configured, expected: int) -> dict[str, Any]:
    """Return what came of a document.

    Raises:
        Refusal: it was refused; says which generation is in force, since when and by whom.
    """
    if answer.status == "CONFLICT":
        message = f"generation {answer.generation} is in force, not {expected}: nothing was changed; look and repeat"
        problem = rejected(HTTPStatus.CONFLICT, "generation_conflict", message, "expected_generation")
        raise Refusal(problem, **_who(answer.generation, answer.actor, answer.changed_ms))
    if answer.status == "INVALID":
        first = answer.problems[0]
        message = f"nothing was changed: {first.field} is {first.value}: {first.message}"
        problem = rejected(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_config", message, f"document.{first.field}")
        found = await _in_force(control)
        who = _who(found["generation"], found.get("actor", ""), found.get("changed_ms", 0))
        listed = [{"field": one.field, "value": one.value, "message": one.message} for one in answer.problems]
        raise Refusal(problem, **who, problems=listed)
    return {
        "status": answer.status.lower(),
        "changed": answer.changed,
        "changes": [{"field": one.field, "before": one.before, "after": one.after} for one in answer.changes],
        **_who(answer.generation, answer.actor, answer.changed_ms),
    }


def _who(generation: int, actor: str, changed_ms: int) -> dict[str, Any]:
    return {"generation": generation, "actor": actor or None, "changed_ms": changed_ms or None}


async def _in_force(control: Control) -> dict[str, Any]:
    """Return which generation is in force; 0 = the group was never configured."""
    try:
        page = await control.group.run(fabric_snapshot("generations", limit=1))
    except GroupUnknown:
        return {"generation": 0}
    for row in page["rows"]:
        found: dict[str, Any] = row
        return found
    return {"generation": 0}


async def _generation(control: Control, number: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = await control.group.run(fabric_snapshot("generation", subject=str(number)))
    except BadArgument:
        message = f"generation {number} is not kept"
        raise Refusal(rejected(HTTPStatus.NOT_FOUND, "generation_unknown", message, "generation")) from None
    return found


def _encoded(document: dict[str, Any]) -> bytes:
    try:
        return encode_document(document)
    except ConfigurationError as error:
        raise InvalidRequest(str(error), param="document", code="invalid_value") from None


def _nonce(request: Request, principal: Principal) -> str:
    """Return what makes a repeat of this change the same change."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return uuid.uuid4().hex
    return hashlib.sha256(f"{principal.key_id}\0{key}".encode()).hexdigest()

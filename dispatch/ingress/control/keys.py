"""Bearer keys of the group's callers. A token is shown once, when its key is made; nobody can show it again."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dispatch.contract.answers import rejected
from dispatch.errors import DispatchError, GroupUnknown
from dispatch.fabric.api_keys import NAME_MAX, POOLS_MAX, Grant, KeyRecord, Role, new_key, read_record
from dispatch.fabric.functions import fabric_snapshot, key_change, key_read
from dispatch.fabric.schema import LIMITS
from dispatch.ingress.control.access import Admin, Here, actor_of, require_all_pools
from dispatch.ingress.control.answering import ControlRoute, Refusal
from dispatch.ingress.control.bodies import documented, read_change
from dispatch.ingress.control.documenting import BODY, errors
from dispatch.ingress.control.group import Group
from dispatch.ingress.control.paging import NAME, Actor
from dispatch.ingress.control.shapes import Shape

router = APIRouter(prefix="/keys", tags=["keys"], route_class=ControlRoute)

_WHAT = "keys"
_COST_MAX = 2**31 - 1

KeyId = Annotated[str, Path(pattern=NAME, description="the id of a key")]
PoolText = Annotated[str, Field(pattern=NAME)]


class KeyFacts(Shape):
    """What a key allows. `pools` null = all; `pool`, `fairness_key` and `cost` hold for every call made with it."""

    key_id: str
    name: str
    roles: list[str]
    pools: list[str] | None
    pool: str | None
    fairness_key: str | None
    cost: int | None
    created_ms: int | None
    readable: bool = Field(description="false: its record cannot be read, and no gateway takes it")


class Keys(Shape):
    """All keys of the group, the oldest first; there is a bounded number of them."""

    keys: list[KeyFacts]


class Made(Shape):
    """A key that was just made. `token` is for its holder alone, and is shown only now."""

    key: KeyFacts
    token: str
    notes: list[str] = Field(description="what is probably not meant: a pool that is not configured")


class Revoked(Shape):
    """A key is gone: within 2 s no gateway takes it any more."""

    key_id: str
    revoked: bool


class NewKey(BaseModel):
    """What a new key is to allow."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"additionalProperties": False})

    name: str = Field(min_length=1, max_length=NAME_MAX, description="for people: whose it is")
    roles: list[Literal["submit", "observe", "admin"]] = Field(["submit"], min_length=1, max_length=3)
    pools: list[PoolText] | None = Field(None, min_length=1, max_length=POOLS_MAX, description="null = all")
    pool: PoolText | None = Field(None, description="where all its calls go")
    fairness_key: PoolText | None = None
    cost: int | None = Field(None, ge=1, le=_COST_MAX)
    actor: str = Field("", max_length=200)


@router.get("", response_model=Keys, responses=errors())
async def list_keys(principal: Admin, control: Here) -> Any:
    """List all keys, without their hashes."""
    require_all_pools(principal, _WHAT)
    records = await control.group.run(key_read())
    found = [_facts(key_id, record) for key_id, record in records.items()]
    return {"keys": sorted(found, key=lambda one: (one["created_ms"] or 0, one["key_id"]))}


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=Made,
    responses=errors(409, *BODY),
    openapi_extra=documented(NewKey),
)
async def create_key(request: Request, response: Response, principal: Admin, control: Here) -> Any:
    """Make a key. Its token is in this answer and nowhere else."""
    require_all_pools(principal, _WHAT)
    asked = await read_change(request, control, NewKey)
    grant = Grant(
        name=asked.name,
        roles=tuple(dict.fromkeys(Role(role) for role in asked.roles)),
        pools=None if asked.pools is None else tuple(asked.pools),
        pool=asked.pool,
        fairness_key=asked.fairness_key,
        cost=asked.cost,
    )
    notes = await _notes(control.group, grant)
    made = new_key(grant)
    call = key_change("create", made.key_id, made.record, actor=actor_of(principal, asked.actor))
    word = await control.group.run(call)
    if word != "CREATED":
        why = f"the group has {LIMITS['keys_max']} keys, which is its bound" if word == "FULL" else "try again"
        raise Refusal(rejected(HTTPStatus.CONFLICT, "keys_full", f"no key was made: {why}"))
    response.headers["location"] = f"{request.url.path}/{made.key_id}"
    return {"key": _facts(made.key_id, made.record), "token": made.token, "notes": notes}


@router.get("/{key_id}", response_model=KeyFacts, responses=errors(404))
async def read_key(principal: Admin, control: Here, key_id: KeyId) -> Any:
    """Say what a key allows."""
    require_all_pools(principal, _WHAT)
    records = await control.group.run(key_read(key_id))
    if key_id not in records:
        raise _unknown(key_id)
    return _facts(key_id, records[key_id])


@router.delete("/{key_id}", response_model=Revoked, responses=errors(404))
async def revoke_key(principal: Admin, control: Here, key_id: KeyId, actor: Actor = "") -> Any:
    """Revoke a key. Within 2 s no gateway takes it any more; what it has queued goes on."""
    require_all_pools(principal, _WHAT)
    word = await control.group.run(key_change("revoke", key_id, actor=actor_of(principal, actor)))
    if word != "REVOKED":
        raise _unknown(key_id)
    return {"key_id": key_id, "revoked": True}


async def _notes(group: Group, grant: Grant) -> list[str]:
    """Say which pools of a key are not there. No error: a key may be made before its pool."""
    named = list(dict.fromkeys([*(grant.pools or ()), *([grant.pool] if grant.pool else [])]))
    pages = await group.attempt_many([fabric_snapshot("pools", subject=pool) for pool in named])
    missing = []
    for pool, page in zip(named, pages, strict=True):
        if isinstance(page, DispatchError) and not isinstance(page, GroupUnknown):
            raise page
        if isinstance(page, GroupUnknown) or not page["rows"]:
            missing.append(pool)
    return [f"pool {pool!r} is not configured in group {group.name}" for pool in missing]


def _facts(key_id: str, encoded: bytes) -> dict[str, Any]:
    try:
        record = read_record(encoded)
    except msgspec.MsgspecError:
        return KeyRecord(hash="", roles=()).shown(key_id) | {"created_ms": None, "readable": False}
    return record.shown(key_id) | {"created_ms": record.created_ms or None, "readable": True}


def _unknown(key_id: str) -> Refusal:
    return Refusal(rejected(HTTPStatus.NOT_FOUND, "key_unknown", f"there is no key {key_id!r}", "key_id"))

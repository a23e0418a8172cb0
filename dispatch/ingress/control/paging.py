"""Parts of lists: what a caller may ask for, and what a key of certain pools gets to see of them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from dispatch.errors import InvalidRequest
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import LIMITS
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import allowed_pools, allows_all_pools
from dispatch.ingress.control.group import Group

ROWS_MAX = LIMITS["snapshot_page_max"]
NAME = r"^[A-Za-z0-9._-]{1,128}$"
EVENT_ID = r"^[1-9][0-9]{0,14}-[0-9]{1,15}$"
_NUMBER = r"^([0-9]{1,12})?$"
_DEAD = r"^([0-9]{1,15}:[A-Za-z0-9._-]{1,128})?$"
_EVENT = rf"^({EVENT_ID[1:-1]})?$"

CURSORS = {
    "pools": _NUMBER,
    "endpoints": _NUMBER,
    "gateways": _NUMBER,
    "leases": _NUMBER,
    "delayed": _NUMBER,
    "dead": _DEAD,
    "endings": _EVENT,
    "events": _EVENT,
}
"""By section: what its cursors look like. Others would not all be understood by the function that reads it."""

_POOL_OF = {"leases": "pool_id", "delayed": "pool_id", "dead": "pool_id", "endings": "pool", "events": "pool"}
"""By section: which member of a row says whose it is. Rows without it belong to the whole group."""

_FROM = 'the cursor of the answer before; "" = from the start'

PoolName = Annotated[str, Path(pattern=NAME, description="a pool")]
Actor = Annotated[str, Query(max_length=200, description='who does it, for the record; "" = the key alone says so')]
RequestId = Annotated[str, Path(pattern=NAME, description="the id of a request")]


class Limited(BaseModel):
    """How much of a list is wanted."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=ROWS_MAX, description="rows of one answer")


class NumberPage(Limited):
    """Which part of a list is wanted."""

    cursor: str = Field("", pattern=_NUMBER, description=_FROM)


class DeadPage(Limited):
    """Which part of the dead list is wanted."""

    pool: str = Field("", pattern=NAME.replace("{1,128}", "{0,128}"), description="only those of this pool")
    cursor: str = Field("", pattern=_DEAD, description=_FROM)


Numbered = Annotated[NumberPage, Query()]
Dead = Annotated[DeadPage, Query()]


def check_cursor(section: str, cursor: str) -> None:
    """Make sure that a section understands a cursor.

    Raises:
        InvalidRequest: it does not.
    """
    if re.fullmatch(CURSORS.get(section, "^$"), cursor) is None:
        message = f"cursor {cursor[:60]!r} is none of section {section!r}: take it from the answer before"
        raise InvalidRequest(message, param="cursor", code="invalid_value")


async def page_of(group: Group, principal: Principal, section: str, part: Limited, cursor: str = "") -> dict[str, Any]:
    """Read a part of a section, of which only what the key allows is in the answer.

    Raises:
        DispatchError: what the connection says.
    """
    if section == "pools" and not allows_all_pools(principal):
        return await _pools_one_by_one(group, allowed_pools(principal))
    page: dict[str, Any] = await group.run(fabric_snapshot(section, cursor=cursor, limit=part.limit))
    return only_allowed(principal, section, page)


def only_allowed(principal: Principal, section: str, page: dict[str, Any]) -> dict[str, Any]:
    """Return the page without the rows that the key does not allow."""
    member = _POOL_OF.get(section)
    if member is None or allows_all_pools(principal):
        return page
    return page | {"rows": [row for row in page["rows"] if member in row and principal.pool_allowed(row[member])]}


async def _pools_one_by_one(group: Group, pools: list[str]) -> dict[str, Any]:
    pages: list[dict[str, Any]] = await group.run_many([fabric_snapshot("pools", subject=pool) for pool in pools])
    return pages[-1] | {"rows": [row for page in pages for row in page["rows"]]}

"""One document with the group's state, section by section: what a page of an operator shows first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from dispatch.errors import InvalidRequest
from dispatch.fabric.functions import fabric_snapshot
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import Here, Observer, allows_all_pools, require_all_pools
from dispatch.ingress.control.answering import ControlRoute
from dispatch.ingress.control.documenting import errors
from dispatch.ingress.control.paging import Limited, check_cursor, only_allowed, page_of
from dispatch.ingress.control.shapes import (
    EndingsPage,
    EndpointsPage,
    EventsPage,
    GatewaysPage,
    GroupFacts,
    PoolsPage,
    RequestsPage,
    Shape,
)

router = APIRouter(tags=["snapshot"], route_class=ControlRoute)

Section = Literal["group", "pools", "endpoints", "gateways", "leases", "delayed", "dead", "endings", "events"]

_USUAL: tuple[Section, ...] = ("group", "pools", "endpoints", "gateways")
_OF_THE_GROUP = {"group", "endpoints", "gateways"}


class Snapshot(Shape):
    """The sections that were asked for, each as of its own moment; all were read in one round trip."""

    server_ms: int
    group: GroupFacts | None = None
    pools: PoolsPage | None = None
    endpoints: EndpointsPage | None = None
    gateways: GatewaysPage | None = None
    leases: RequestsPage | None = Field(None, description="requests that run, the one whose lease ends first in front")
    delayed: RequestsPage | None = Field(None, description="requests that wait for their next attempt")
    dead: RequestsPage | None = Field(
        None, description="requests whose attempts are spent, the last that died in front"
    )
    endings: EndingsPage | None = None
    events: EventsPage | None = None


class Wanted(Limited):
    """Which sections are wanted, and how much of each."""

    section: list[Section] = Field([], description="none = group, pools, endpoints and gateways, as the key allows")
    cursor: str = Field("", max_length=160, description="where to go on in the only section that is asked for")


@router.get("/snapshot", response_model=Snapshot, response_model_exclude_unset=True, responses=errors())
async def read_snapshot(principal: Observer, control: Here, wanted: Annotated[Wanted, Query()]) -> Any:
    """Read sections of the group's state: totals, pools, endpoints, gateways, what runs, died, ended and changed."""
    sections = _sections(principal, wanted)
    pages = dict(zip(sections, await _read(control, principal, sections, wanted), strict=True))
    if "group" in pages:
        pages["group"]["fabric_group"] = control.group.name
    return {"server_ms": max(page["server_ms"] for page in pages.values()), **pages}


async def _read(control: Here, principal: Principal, sections: list[str], wanted: Wanted) -> list[dict[str, Any]]:
    group = control.group
    if "pools" in sections and not allows_all_pools(principal):
        return [await page_of(group, principal, section, wanted, wanted.cursor) for section in sections]
    calls = [fabric_snapshot(section, cursor=wanted.cursor, limit=wanted.limit) for section in sections]
    pages = await group.run_many(calls)
    return [only_allowed(principal, section, page) for section, page in zip(sections, pages, strict=True)]


def _sections(principal: Principal, wanted: Wanted) -> list[str]:
    """Return the sections to read.

    Raises:
        NotAllowed: one of them is not for this key.
        InvalidRequest: the cursor is none of the section.
    """
    asked = list(dict.fromkeys(wanted.section))
    for section in asked:
        if section in _OF_THE_GROUP:
            require_all_pools(principal, f"section {section!r}")
    if wanted.cursor:
        if len(asked) != 1:
            message = "a cursor goes on in one section: name that one"
            raise InvalidRequest(message, param="cursor", code="invalid_value")
        check_cursor(asked[0], wanted.cursor)
    usual = [section for section in _USUAL if allows_all_pools(principal) or section not in _OF_THE_GROUP]
    return [str(section) for section in asked or usual]

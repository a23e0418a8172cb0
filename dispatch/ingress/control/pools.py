"""Pools: what waits and runs, what holds them up, and pausing, resuming and draining them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request

from dispatch.errors import PoolUnknown
from dispatch.fabric.functions import fabric_snapshot, pool_estimate, pool_pause
from dispatch.ingress.control.access import Admin, Anyone, Here, Observer, actor_of, require_pool
from dispatch.ingress.control.answering import ControlRoute
from dispatch.ingress.control.bodies import Change, documented, read_change
from dispatch.ingress.control.documenting import BODY, errors
from dispatch.ingress.control.paging import Numbered, PoolName, page_of
from dispatch.ingress.control.shapes import EstimateFacts, PoolRow, PoolsPage, Shape

router = APIRouter(prefix="/pools", tags=["pools"], route_class=ControlRoute)

Action = Annotated[Literal["pause", "resume", "drain"], Path(description="pause: nothing launches; drain: nothing new")]


class PoolStanding(Shape):
    """How a pool stands now."""

    pool_id: str
    changed: bool
    state: Literal["active", "paused", "draining"]
    pending: int
    in_flight: int


@router.get("", response_model=PoolsPage, response_model_exclude_unset=True, responses=errors())
async def list_pools(principal: Observer, control: Here, page: Numbered) -> Any:
    """List pools in the order of the config; a key of certain pools gets those."""
    return await page_of(control.group, principal, "pools", page, page.cursor)


@router.get("/{pool}", response_model=PoolRow, response_model_exclude_unset=True, responses=errors(404))
async def read_pool(principal: Observer, control: Here, pool: PoolName) -> Any:
    """Say how one pool stands, and which request is its next."""
    require_pool(principal, pool)
    for row in (await control.group.run(fabric_snapshot("pools", subject=pool)))["rows"]:
        return row
    raise PoolUnknown(f"pool {pool!r} is not configured in group {control.group.name}")


@router.get("/{pool}/estimate", response_model=EstimateFacts, responses=errors(404))
async def estimate(principal: Anyone, control: Here, pool: PoolName) -> Any:
    """Say how long a request that is submitted to the pool now would wait. Any role will do."""
    require_pool(principal, pool)
    found = await control.group.run(pool_estimate(pool))
    return {
        "pool_id": pool, "pending": found.pending, "delayed": found.delayed, "in_flight": found.in_flight,
        "per_second": found.per_second, "wait_ms": found.wait_ms, "reason": found.reason or None,
    }  # fmt: skip


@router.post(
    "/{pool}/{action}",
    response_model=PoolStanding,
    responses=errors(404, *BODY),
    openapi_extra=documented(Change, required=False),
)
async def change_pool(request: Request, principal: Admin, control: Here, pool: PoolName, action: Action) -> Any:
    """Pause, resume or drain a pool. Repeatable."""
    require_pool(principal, pool)
    change = await read_change(request, control, Change)
    actor = actor_of(principal, change.actor)
    state = await control.group.run(pool_pause(pool, action, actor=actor, reason=change.reason))
    return {
        "pool_id": pool, "changed": state.changed, "state": state.state, "pending": state.waiting,
        "in_flight": state.in_flight,
    }  # fmt: skip

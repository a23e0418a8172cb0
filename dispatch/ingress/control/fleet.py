"""Gateways and endpoints of the group."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from dispatch.ingress.control.access import Here, Observer, require_all_pools
from dispatch.ingress.control.answering import ControlRoute
from dispatch.ingress.control.documenting import errors
from dispatch.ingress.control.paging import Numbered, page_of
from dispatch.ingress.control.shapes import EndpointsPage, GatewaysPage

router = APIRouter(tags=["fleet"], route_class=ControlRoute)


@router.get("/gateways", response_model=GatewaysPage, response_model_exclude_unset=True, responses=errors())
async def list_gateways(principal: Observer, control: Here, page: Numbered) -> Any:
    """List the gateways that are registered: where they run, their slots, and when they were last heard of."""
    require_all_pools(principal, "the list of gateways")
    return await page_of(control.group, principal, "gateways", page, page.cursor)


@router.get("/endpoints", response_model=EndpointsPage, response_model_exclude_unset=True, responses=errors())
async def list_endpoints(principal: Observer, control: Here, page: Numbered) -> Any:
    """List the endpoints: what runs there, the breaker, the gate and its last sample."""
    require_all_pools(principal, "the list of endpoints")
    return await page_of(control.group, principal, "endpoints", page, page.cursor)

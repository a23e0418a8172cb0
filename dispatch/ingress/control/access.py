"""Who may do what in the control API. Asked before anything of a request's body or of the group is read.

A key of certain pools sees and changes what belongs to these; what belongs to the whole group (config, endpoints,
gateways, keys, totals) needs a key of all pools. A request that a key may not see is answered as one that is not there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import anyio
from fastapi import Depends, Request

from dispatch.contract.answers import rejected
from dispatch.errors import NotAllowed
from dispatch.fabric.api_keys import Role
from dispatch.ingress.authority import Principal
from dispatch.ingress.body import Held
from dispatch.ingress.control.answering import GROUP_HEADER, ControlRoute, Refusal
from dispatch.ingress.control.group import Group
from dispatch.ingress.control.watching import Watch
from dispatch.ingress.sites import require_own_site
from dispatch.ingress.state import IngressState
from dispatch.producer.call_headers import collect
from dispatch.producer.request_ids import is_made_for
from dispatch.telemetry.history.queries import History

"""Says which group is meant. Optional: whoever knows gateways of several groups cannot change the wrong one with it."""


@dataclass(frozen=True, slots=True)
class Control:
    """What the routes work with. `questions` bounds those to the history, of which each has a thread."""

    state: IngressState
    group: Group
    held: Held
    watch: Watch
    history: History | None
    questions: anyio.CapacityLimiter


def control_of(request: Request) -> Control:
    """Return what the application was made with."""
    found: Control = request.app.state.control
    return found


async def principal_of(request: Request) -> Principal:
    """Say who makes the request.

    Raises:
        Refusal: it is meant for another group.
        DispatchError: nobody that is known, or it cannot be said now, or a parameter is unknown or given twice.
    """
    control = control_of(request)
    headers = collect(request.scope["headers"])
    principal = await control.state.authority.principal(headers)
    if not principal.key_id:
        require_own_site(headers, request.scope.get("server"))
    meant = request.headers.get(GROUP_HEADER, control.group.name)
    if meant != control.group.name:
        message = f"this gateway serves the fabric group {control.group.name!r}, and {meant[:128]!r} is meant"
        raise Refusal(rejected(HTTPStatus.MISDIRECTED_REQUEST, "another_group", message, GROUP_HEADER))
    if isinstance(route := request.scope.get("route"), ControlRoute):
        route.require_known_query(request)
    return principal


def _with(*roles: Role) -> Callable[[Principal], Awaitable[Principal]]:
    async def allowed(principal: Annotated[Principal, Depends(principal_of)]) -> Principal:
        principal.require(*roles)
        return principal

    return allowed


Observer = Annotated[Principal, Depends(_with(Role.OBSERVE))]
Admin = Annotated[Principal, Depends(_with(Role.ADMIN))]
Submitter = Annotated[Principal, Depends(_with(Role.SUBMIT))]
Anyone = Annotated[Principal, Depends(_with(*Role))]
Here = Annotated[Control, Depends(control_of)]


def allows_all_pools(principal: Principal) -> bool:
    """Say whether the key is for the whole group."""
    return principal.pools is None and principal.pool is None


def allowed_pools(principal: Principal) -> list[str]:
    """Return the pools of a key that is not for all, by name."""
    return [principal.pool] if principal.pool is not None else sorted(principal.pools or ())


def require_all_pools(principal: Principal, what: str) -> None:
    """Make sure that the key is for the whole group, to which `what` belongs.

    Raises:
        NotAllowed: it is for certain pools.
    """
    if not allows_all_pools(principal):
        allowed = ", ".join(allowed_pools(principal))
        message = f"{what} is for keys of all pools; this key allows: {allowed}"
        raise NotAllowed(message, param="pool", code="pool_not_allowed")


def require_pool(principal: Principal, pool_id: str) -> None:
    """Make sure that the key allows the pool.

    Raises:
        NotAllowed: it does not.
    """
    principal.require_pool(pool_id)


def owns(principal: Principal, request_id: str) -> bool:
    """Say whether the request was made with this key, by which it may be fetched and cancelled."""
    return Role.SUBMIT in principal.roles and is_made_for(principal.key_id, request_id)


def sees(principal: Principal, row: dict[str, Any]) -> bool:
    """Say whether the key may see the request of this row."""
    if owns(principal, row["request_id"]):
        return True
    return Role.OBSERVE in principal.roles and principal.pool_allowed(row["pool_id"])


def changes(principal: Principal, row: dict[str, Any]) -> bool:
    """Say whether the key may change the request of this row, and read what it says."""
    if owns(principal, row["request_id"]):
        return True
    return Role.ADMIN in principal.roles and principal.pool_allowed(row["pool_id"])


def actor_of(principal: Principal, given: str) -> str:
    """Return who does it, for the record: what is said, and the key that is known."""
    if not principal.key_id:
        return given or principal.name
    key = f"key {principal.name} ({principal.key_id})"
    return f"{given} with {key}" if given else key

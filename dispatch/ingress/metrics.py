"""`GET /metrics`: this gateway's metrics and the group's, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastapi import Response

from dispatch.errors import FabricUnavailable, NotAllowed
from dispatch.fabric.api_keys import Role
from dispatch.ingress.authority import Authority
from dispatch.ingress.sites import require_own_site
from dispatch.producer.call_headers import Headers


class MetricsPage(Protocol):
    """Where metrics come from."""

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, in the form that the `Accept` header prefers."""
        ...


async def require_reader(authority: Authority, headers: Headers, server: Sequence[object] | None) -> None:
    """Make sure that whoever asks may read metrics: the role `observe`, for all pools.

    While keys cannot be checked, a key that was right when they last could is let in: that is when metrics are needed,
    and they tell nothing of requests.

    Raises:
        DispatchError: he may not, or it cannot be said.
    """
    try:
        principal = await authority.principal(headers)
    except FabricUnavailable:
        remembered = authority.remembered(headers)
        if remembered is None:
            raise
        principal = remembered
    if not principal.key_id:
        require_own_site(headers, server)
    principal.require(Role.OBSERVE)
    if principal.pools is not None or principal.pool is not None:
        raise NotAllowed("metrics are for keys of all pools", code="pool_not_allowed")


async def metrics_response(page: MetricsPage, headers: Headers) -> Response:
    """Return the page."""
    accept = b",".join(headers.get(b"accept", ())).decode("latin-1")
    body, content_type = await page.page(accept)
    return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

"""Whether a gateway id is free: two processes under one id would take each other's leases for their own."""

from __future__ import annotations

import os
from typing import Any

import anyio
import structlog

from dispatch.errors import ConfigurationError
from dispatch.fabric import functions
from dispatch.fabric.schema import LIMITS
from dispatch.gateway.identity import Identity
from dispatch.gateway.link import Link

log = structlog.get_logger(__name__)

_PAGE = LIMITS["snapshot_page_max"]
_LOOK_S = 0.25
_BEATS = 1.5  # heartbeats in which a process that lives is surely heard of


async def require_free_id(link: Link, identity: Identity, beat_s: float) -> None:
    """Return when nobody else lives under this gateway's id.

    An entry of a process that has said good-bye, or that has died on this host, is no obstacle. Another one is watched
    for one and a half heartbeats: it is of a process that died (and is forgotten later), or it goes on beating.

    Raises:
        ConfigurationError: another process goes by the id; names it and the setting.
        FabricError: what the connection says.
    """
    first = await _entry(link, identity.gateway_id)
    if first is None or _has_left(first, identity):
        return
    log.warning("gateway_id_seen", gateway=identity.gateway_id, host=first["host"], pid=first["pid"])
    with anyio.move_on_after(_BEATS * beat_s):
        while True:
            await anyio.sleep(_LOOK_S)
            now = await _entry(link, identity.gateway_id)
            if now is None or _has_left(now, identity):
                return
            if now["beat_ms"] != first["beat_ms"]:
                raise ConfigurationError(
                    f"DISPATCH_GATEWAY_ID (--gateway-id): {identity.gateway_id!r} is in use in group {link.group!r} by "
                    f"process {now['pid']} on host {now['host']}; every gateway needs its own"
                )


def _has_left(entry: dict[str, Any], identity: Identity) -> bool:
    if entry["slots"] == 0:  # the last heartbeat of a gateway that stops
        return True
    if entry["host"] != identity.host:
        return False
    try:
        os.kill(entry["pid"], 0)  # signal 0 asks whether it is there
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


async def _entry(link: Link, gateway_id: str) -> dict[str, Any] | None:
    cursor = ""
    while True:
        page = (await link.once(functions.fabric_snapshot("gateways", cursor=cursor, limit=_PAGE))).value
        for row in page["rows"]:
            if row["gateway_id"] == gateway_id:
                return dict(row)
        cursor = page["cursor"]
        if not cursor:
            return None

"""The config of a group that has none yet."""

from __future__ import annotations

import secrets

import msgspec
import structlog

from dispatch.backend.endpoint import Endpoint
from dispatch.config import GatewaySettings, default_document
from dispatch.errors import ConfigurationError, GroupUnknown
from dispatch.fabric import functions
from dispatch.gateway.endpoints import Endpoints
from dispatch.gateway.link import Link

log = structlog.get_logger(__name__)


async def read_or_make_config(endpoints: Endpoints, link: Link, settings: GatewaySettings) -> None:
    """Read the group's config; a group that was never configured gets the default one first, in one step.

    The settings' endpoint counts only then; a log line tells who gave one for nothing.

    Raises:
        ConfigurationError: there is none and the settings name no (usable) endpoint to make one with.
        FabricError: what the connection says.
    """
    try:
        await endpoints.load()
    except GroupUnknown:
        await make_default_config(link, settings)
        await endpoints.load()
    else:
        if settings.endpoint_url:
            log.info("endpoint_url_unused", group=link.group, generation=endpoints.generation)


async def make_default_config(link: Link, settings: GatewaySettings) -> None:
    """Configure the group with the default pools and the settings' endpoint, unless somebody else was faster.

    Raises:
        ConfigurationError: the settings name no (usable) endpoint.
        FabricError: what the connection says.
    """
    document = default_document(settings.require_endpoint_url(), settings.endpoint_api_key_env)
    for row in document["endpoints"]:
        Endpoint.from_config(row)  # says what is wrong with it before the whole group runs on it
    call = functions.group_configure(
        msgspec.json.encode(document),
        expected_generation=0,
        actor=f"gateway {settings.gateway_id}",
        reason="the group was never configured",
        nonce=secrets.token_hex(16),
    )
    made = (await link.once(call)).value
    if made.status == "INVALID":
        problems = "; ".join(f"{one.field} {one.value!r}: {one.message}" for one in made.problems)
        raise ConfigurationError(f"the default config of group {link.group!r} is refused: {problems}")
    if made.status == "CONFLICT":
        log.info("group_configured_by_another", group=link.group, generation=made.generation, actor=made.actor)
        return
    pools = [row["pool_id"] for row in document["pools"]]
    log.info("group_configured_by_default", group=link.group, generation=made.generation, pools=pools)

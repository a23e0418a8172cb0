"""Whether a gateway asks for keys, and that none is open to other machines by accident."""

from __future__ import annotations

import structlog

from dispatch.config import GatewaySettings
from dispatch.errors import ConfigurationError
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import key_read
from dispatch.ingress.authority import KeysMode

log = structlog.get_logger(__name__)


def refuse_keys_off(settings: GatewaySettings, *, loopback: bool) -> None:
    """Make sure that keys are not off where other machines can connect (`loopback` False), unless that was told twice.

    Raises:
        ConfigurationError: they are; names both ways out.
    """
    if settings.keys == "off" and not (loopback or settings.insecure):
        why = "keys are off (DISPATCH_KEYS=off, --no-keys)"
        raise ConfigurationError(_open(settings, why, "leave that out and create"))


async def keys_mode(settings: GatewaySettings, connection: Connection, *, loopback: bool) -> KeysMode:
    """Return how the front asks for keys. `loopback`: only this machine can connect.

    Where others can, a group that has keys when the gateway starts is one whose keys are asked for until it ends.

    Raises:
        ConfigurationError: others can connect and no key would be asked for; names both ways out.
        FabricUnavailable, LibraryProblem: the group's keys cannot be read.
    """
    mode = settings.keys
    if loopback or mode == "required":
        return mode
    if mode == "auto":
        records = await connection.run(settings.fabric_group, key_read())
        if records:
            return "required"
    if not settings.insecure:
        raise ConfigurationError(_open(settings, f"the fabric group {settings.fabric_group!r} has no key", "create"))
    log.warning("no_key_is_asked_for", host=settings.host, group=settings.fabric_group)
    return mode


def _open(settings: GatewaySettings, why: str, first: str) -> str:
    command = f"dispatch keys create --name NAME --group {settings.fabric_group}"
    return (
        f"other machines can connect to {settings.host}, and {why}: {first} a key with '{command}', "
        "or let everybody in with --insecure (DISPATCH_INSECURE=true)"
    )

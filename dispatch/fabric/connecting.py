"""Opening a connection with either client."""

from __future__ import annotations

from typing import TypeVar

import anyio

from dispatch.errors import ConfigurationError
from dispatch.fabric.address import parse_url
from dispatch.fabric.connection import Connection
from dispatch.fabric.glide import GlideConnection
from dispatch.fabric.redis_client import RedisConnection

C = TypeVar("C", GlideConnection, RedisConnection)


async def connect(url: str, *, client: str = "glide") -> Connection:
    """Connect to the Valkey at `url` (forms: `dispatch.fabric.address`) with valkey-glide or redis-py.

    The server has answered once when this returns. Later outages are each call's `FabricUnavailable`; the connection
    comes back by itself.

    Raises:
        ConfigurationError: the URL is malformed, the login was refused, or `client` is unknown.
        FabricUnavailable: nothing answers there.
    """
    address = parse_url(url)
    if client not in ("glide", "redis"):
        raise ConfigurationError(f"Valkey client {client!r} is unknown; known: glide, redis")
    # redis-py says at once and precisely why it cannot connect; GLIDE tries for seconds and says "timed out".
    first = await _answering(RedisConnection(address))
    if client == "redis":
        return first
    await first.aclose()
    return await _answering(await GlideConnection.open(address))


async def _answering(connection: C) -> C:
    try:
        await connection.ping()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await connection.aclose()
        raise
    return connection

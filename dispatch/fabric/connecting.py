"""Opening a connection, and making sure that the library on the server is this version's."""

from __future__ import annotations

from typing import TypeVar

import anyio

from dispatch.contract.envelope import CONTRACT_VERSION
from dispatch.errors import ConfigurationError, LibraryProblem
from dispatch.fabric.address import parse_url
from dispatch.fabric.connection import Connection
from dispatch.fabric.faults import LOAD_COMMAND
from dispatch.fabric.functions import library_version
from dispatch.fabric.glide import GlideConnection
from dispatch.fabric.library import current_library
from dispatch.fabric.records import LibraryVersion
from dispatch.fabric.redis_client import RedisConnection
from dispatch.fabric.sync import BlockingConnection

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


async def verify_library(connection: Connection, group: str) -> None:
    """Make sure that the server which holds `group` runs this version's library.

    Raises:
        LibraryProblem: it is missing or another one; names the command to run.
        FabricUnavailable: the server did not answer.
    """
    require_same(await connection.run(group, library_version()))


def verify_library_blocking(connection: BlockingConnection, group: str) -> None:
    """Do what `verify_library` does, for blocking code.

    Raises:
        LibraryProblem: it is missing or another one; names the command to run.
        FabricUnavailable: the server did not answer.
    """
    require_same(connection.run(group, library_version()))


def require_same(found: LibraryVersion) -> None:
    """Raise unless `found` is this version's library.

    Raises:
        LibraryProblem: it speaks another contract or is another text.
    """
    if found.contract != CONTRACT_VERSION:
        raise LibraryProblem(
            f"the function library on the server (version {found.version}) speaks contract {found.contract}, "
            f"this version speaks {CONTRACT_VERSION}; run: {LOAD_COMMAND}"
        )
    if found.digest != current_library().digest:
        raise LibraryProblem(
            f"the function library on the server (version {found.version}, digest {found.digest[:16]}) is not this "
            f"version's (digest {current_library().digest[:16]}); run: {LOAD_COMMAND}"
        )


async def _answering(connection: C) -> C:
    try:
        await connection.ping()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await connection.aclose()
        raise
    return connection

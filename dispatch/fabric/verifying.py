"""Making sure that the library on the server is this version's. Knows no client, so tools start without one."""

from __future__ import annotations

from dispatch.contract.envelope import CONTRACT_VERSION
from dispatch.errors import LibraryProblem
from dispatch.fabric.connection import Connection
from dispatch.fabric.faults import LOAD_COMMAND
from dispatch.fabric.functions import library_version
from dispatch.fabric.library import current_library
from dispatch.fabric.records import LibraryVersion
from dispatch.fabric.sync import BlockingConnection


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

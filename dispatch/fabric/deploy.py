"""Writing the function library to servers, and comparing it with this version. Only the operator's tools do this."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dispatch.errors import DispatchError
from dispatch.fabric.library import LIBRARY_NAME, Library, digest_of, version_of
from dispatch.fabric.redis_shared import redis_errors
from dispatch.fabric.sync import BlockingConnection


class NodeState(StrEnum):
    """How one primary's library compares with this version's."""

    EQUAL = "equal"
    DIFFERENT = "different"
    MISSING = "missing"
    UNREACHABLE = "unreachable"


class Action(StrEnum):
    """What loading did at one primary."""

    LOADED = "loaded"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Installed:
    """The library as a server holds it."""

    text: str
    digest: str
    version: str
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One primary, compared with this version. `problem` says why it is unreachable, or could not be written."""

    address: str
    state: NodeState
    installed: Installed | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did at one primary; `before` is what it held until then."""

    address: str
    action: Action
    before: Installed | None = None
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problem: str = ""


def compare(connection: BlockingConnection, library: Library) -> list[NodeReport]:
    """Compare every primary's library with `library`. Changes nothing; an unreachable primary is a report, no error.

    Raises:
        ConfigurationError, FabricUnavailable: the primaries could not be found out.
    """
    return [_report(address, client, library) for address, client in _clients(connection)]


def load(connection: BlockingConnection, library: Library) -> list[LoadReport]:
    """Write `library` to every primary that holds another text. Repeatable; each primary switches in one step.

    A primary that cannot be written is a report with `problem`; it keeps what it had.

    Raises:
        ConfigurationError, FabricUnavailable: the primaries could not be found out.
    """
    return [_load(address, client, library) for address, client in _clients(connection)]


def unified_diff(report: NodeReport, library: Library) -> str:
    """Return what differs between a primary's text and `library`, as a unified diff; empty when nothing does."""
    before = report.installed.text if report.installed is not None else ""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        library.text.splitlines(keepends=True),
        fromfile=f"{report.address}/{LIBRARY_NAME}",
        tofile=f"version {library.version}/{LIBRARY_NAME}",
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _clients(connection: BlockingConnection) -> Iterator[tuple[str, Any]]:
    for address, client in connection.primary_clients():
        with client:
            yield address, client


def _report(address: str, client: Any, library: Library) -> NodeReport:
    try:
        installed = _installed(address, client)
    except DispatchError as error:
        return NodeReport(address, NodeState.UNREACHABLE, problem=str(error))
    if installed is None:
        return NodeReport(address, NodeState.MISSING)
    state = NodeState.EQUAL if installed.digest == library.digest else NodeState.DIFFERENT
    return NodeReport(address, state, installed)


def _load(address: str, client: Any, library: Library) -> LoadReport:
    before: Installed | None = None
    try:
        before = _installed(address, client)
        if before is not None and before.text == library.text:
            return LoadReport(address, Action.UNCHANGED, before)
        with redis_errors(address):
            client.function_load(library.text, replace=True)
    except DispatchError as error:
        return LoadReport(address, Action.FAILED, before, problem=str(error))
    had = set(before.functions) if before is not None else set()
    now = set(library.functions)
    return LoadReport(
        address,
        Action.LOADED if before is None else Action.REPLACED,
        before,
        added=tuple(sorted(now - had)),
        removed=tuple(sorted(had - now)),
    )


def _installed(address: str, client: Any) -> Installed | None:
    with redis_errors(address):
        found = client.execute_command("FUNCTION LIST", "LIBRARYNAME", LIBRARY_NAME, "WITHCODE")
    if not found:
        return None
    row = _members(found[0])
    text = row["library_code"].decode()
    functions = sorted(_members(function)["name"].decode() for function in row["functions"])
    return Installed(text, digest_of(text), version_of(text), tuple(functions))


def _members(flat: list[Any]) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}

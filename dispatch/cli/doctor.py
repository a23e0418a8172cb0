"""`dispatch doctor`: is the server fit for a fabric, and are the counters of a group true?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    TIMEOUT_S,
    Actor,
    Group,
    Json,
    ServerUrl,
    complain,
    trouble_as_exit_code,
    who,
    write_json,
)
from dispatch.errors import FabricUnavailable
from dispatch.fabric import audit, deploy
from dispatch.fabric.audit import Difference
from dispatch.fabric.deploy import NodeReport, NodeState
from dispatch.fabric.faults import LOAD_COMMAND
from dispatch.fabric.library import current_library
from dispatch.fabric.schema import check_group
from dispatch.fabric.server_settings import read_settings
from dispatch.fabric.sync import BlockingConnection

ILL = 1
"""Exit code: differences are left, or the library is missing or another one."""

_ROUNDS = 4
"""Audits and repairs in turn: a repaired counter can uncover a wrong place, a repaired place frees the next."""

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    url: ServerUrl = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what differs, and say what was done.")] = False,
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Look at the server's settings and library, and hold every counter of a group against what is there.

    A difference counts when two audits in a row find it with the same numbers: under traffic one alone may have looked
    between two steps. Repairs are compare-and-set and recorded in the group's events.

    Exit code: 0 no differences, 1 differences are left or the library is not this version's, 2 no answer.
    Advice about settings does not count.

    \b
    Example:
      dispatch doctor
      dispatch doctor --repair
    """
    found: list[Difference] = []
    repaired: list[Difference] = []
    with trouble_as_exit_code():
        check_group(group)
        with BlockingConnection(url, timeout_s=TIMEOUT_S) as connection:
            advice = _advice(connection)
            library = [_library_told(report) for report in deploy.compare(connection, current_library())]
            library = [told for told in library if told]
            if not library:
                found = audit.confirmed_differences(connection, group)
                if repair:
                    found, repaired = _repair(connection, group, found, who(actor))
    for sentence in (*advice, *library):
        complain(sentence)
    if json:
        write_json({"group": group, "advice": advice, "library": library, "repaired": _json_rows(repaired),
                    "differences": _json_rows(found)})  # fmt: skip
    elif not library:
        _say(group, found, repaired, asked=repair)
    if found or library:
        raise typer.Exit(ILL)


def _advice(connection: BlockingConnection) -> list[str]:
    """Return what should be set otherwise.

    Raises:
        FabricUnavailable: a server does not answer.
    """
    sentences = []
    for settings in read_settings(connection):
        if settings.problem:
            raise FabricUnavailable(settings.problem)
        sentences += settings.advice()
    return sentences


def _library_told(report: NodeReport) -> str:
    """Return what is wrong with a primary's library, "" when nothing is."""
    if report.state is NodeState.UNREACHABLE:
        raise FabricUnavailable(report.problem)
    if report.state is NodeState.EQUAL:
        return ""
    return f"{report.address}: the function library is {report.state}, so nothing was audited; run: {LOAD_COMMAND}"


def _repair(
    connection: BlockingConnection, group: str, found: list[Difference], actor: str
) -> tuple[list[Difference], list[Difference]]:
    """Repair and audit in turn. Returns the differences that are left and those that were repaired."""
    repaired: list[Difference] = []
    for _ in range(_ROUNDS):
        done = audit.repair(connection, group, found, actor=actor)
        repaired += done
        found = audit.confirmed_differences(connection, group)
        if not done or not found:
            break
    return found, repaired


def _say(group: str, found: Sequence[Difference], repaired: Sequence[Difference], *, asked: bool) -> None:
    for difference in repaired:
        typer.echo(f"repaired: {difference}")
    for difference in found:
        later = "" if difference.repair else " (goes when the lease ends)"
        typer.echo(f"{difference}{later}")
    if not found:
        typer.echo(f"group {group}: every counter is true")
    elif not asked:
        typer.echo(f"group {group}: {len(found)} differ; dispatch doctor --repair sets them right")


def _json_rows(rows: Sequence[Difference]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(row) for row in rows]

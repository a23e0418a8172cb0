"""`dispatch doctor`: is the server fit for a fabric, are the counters of a group true, and what is wrong in it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from dispatch.cli.history.options import HistoryUrl, PasswordEnv
from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    TIMEOUT_S,
    TROUBLE,
    Actor,
    Group,
    Json,
    Url,
    complain,
    trouble_as_exit_code,
    who,
    write_json,
)
from dispatch.cli.past import Past
from dispatch.cli.remote import RemoteConnection, is_gateway
from dispatch.cli.signs import Signs, look_twice
from dispatch.errors import FabricUnavailable
from dispatch.fabric import audit, deploy
from dispatch.fabric.audit import Difference
from dispatch.fabric.deploy import NodeReport, NodeState
from dispatch.fabric.faults import LOAD_COMMAND
from dispatch.fabric.library import current_library
from dispatch.fabric.schema import check_group
from dispatch.fabric.server_settings import read_settings
from dispatch.fabric.sync import BlockingConnection

BROKEN = 3
"""Exit code with --strict: something is broken, as live state and history say."""

ILL = 1
"""Exit code: differences are left, or the library is missing or another one."""

_ROUNDS = 4
"""Audits and repairs in turn: a repaired counter can uncover a wrong place, a repaired place frees the next."""

app = typer.Typer(add_completion=False)


@app.command()
def doctor(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what differs, and say what was done.")] = False,
    actor: Actor = "",
    window: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks: what grows?")] = 1.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when something is broken.")] = False,
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    json: Json = False,
) -> None:
    r"""Say what is wrong in a group: its counters, and each symptom with its likely cause and the first place to look.

    First the server's settings and library, and every counter held against what is there. A difference counts when two
    audits in a row find it with the same numbers: under traffic one alone may have looked between two steps. Repairs
    are compare-and-set and recorded in the group's events. (Over a gateway there are no audits.)

    Then the symptoms: pending grows, in-flight sticks, requests vanish, the backend cannot be reached, fallback did not
    happen, history lacks something. What could not be read is unknown. With a history, runs are held against its last
    hour.

    Exit code: 0 no differences, 1 differences are left or the library is not this version's, 2 no answer, 3 (with
    --strict) a symptom's cause is something broken. Advice about settings does not count.

    \b
    Example:
      dispatch doctor
      dispatch doctor --repair
      dispatch doctor --strict --json
    """
    past = Past(history, password_env, group)
    if is_gateway(url):
        if repair:
            complain("--repair needs Valkey itself (--url valkey://...)")
            raise typer.Exit(TROUBLE)
        with trouble_as_exit_code():
            check_group(group)
            with RemoteConnection(url) as remote:
                signs = look_twice(remote, group, past, window_s=window)
        if json:
            write_json({"group": group, **signs.document()})
        else:
            signs.say()
        _end(bad=False, strict=strict, signs=signs)
        return
    found: list[Difference] = []
    repaired: list[Difference] = []
    signs = Signs()
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
                signs = look_twice(connection, group, past, window_s=window, differences=len(found))
    for sentence in (*advice, *library):
        complain(sentence)
    if json:
        write_json({"group": group, "advice": advice, "library": library, "repaired": _json_rows(repaired),
                    "differences": _json_rows(found), **signs.document()})  # fmt: skip
    elif not library:
        signs.say()
        _say(group, found, repaired, asked=repair)
    _end(bad=bool(found or library), strict=strict, signs=signs)


def _end(*, bad: bool, strict: bool, signs: Signs) -> None:
    if bad:
        raise typer.Exit(ILL)
    if strict and signs.broken:
        raise typer.Exit(BROKEN)


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

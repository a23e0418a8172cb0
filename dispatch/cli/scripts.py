"""`dispatch scripts`: the operator's tool for the function library. The only command that writes it to a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dispatch.cli.operating import (
    DEFAULT_URL,
    TIMEOUT_S,
    TROUBLE,
    Json,
    ServerUrl,
    complain,
    trouble_as_exit_code,
    write_json,
)
from dispatch.cli.tables import output, print_table
from dispatch.fabric import deploy
from dispatch.fabric.deploy import Action, Installed, LoadReport, NodeReport, NodeState
from dispatch.fabric.library import LIBRARY_NAME, Library, current_library
from dispatch.fabric.sync import BlockingConnection

DIFFERS = 1
"""Exit code: the library on the server is missing or another one. 2: no answer, or not every primary was written."""

_HELP = """Load the Lua function library into Valkey, and compare or print it.

\b
Example:
  dispatch scripts load --url valkey://127.0.0.1:6379
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)


@app.command("load")
def load_command(url: ServerUrl = DEFAULT_URL, json: Json = False) -> None:
    r"""Write this version's library to every primary that holds another text, and say what changed.

    Repeatable. Each primary switches in one step; one that cannot be written keeps what it had.

    Exit code: 0 all primaries hold this version, 2 not all could be written.

    \b
    Example:
      dispatch scripts load --url valkey://:password@valkey.internal:6379
    """
    with trouble_as_exit_code():
        library = current_library()
        with BlockingConnection(url, timeout_s=TIMEOUT_S) as connection:
            reports = deploy.load(connection, library)
    if json:
        _print_json(library, [_load_row(report) for report in reports])
    elif written := [report for report in reports if report.action is not Action.FAILED]:
        print_table(
            ("node", "result", "version", "functions", "before"),
            [_load_cells(report, library) for report in written],
        )
        for report in written:
            for change, names in (("added", report.added), ("removed", report.removed)):
                if report.action is Action.REPLACED and names:
                    typer.echo(f"{report.address} {change}: {', '.join(names)}")
    _say_problems(reports)
    if any(report.action is Action.FAILED for report in reports):
        raise typer.Exit(TROUBLE)


@app.command("status")
def status_command(url: ServerUrl = DEFAULT_URL, json: Json = False) -> None:
    r"""Compare the library of every primary with this version's.

    Exit code: 0 equal everywhere, 1 different or missing somewhere, 2 a primary gave no answer.

    \b
    Example:
      dispatch scripts status --json
    """
    library, reports = _compared(url)
    if json:
        _print_json(library, [_status_row(report, library) for report in reports])
    elif reached := [report for report in reports if report.state is not NodeState.UNREACHABLE]:
        here = ("this version", "", library.version, _short(library.digest), str(len(library.functions)))
        rows = [here, *(_status_cells(report) for report in reached)]
        print_table(("node", "state", "version", "digest", "functions"), rows)
    _say_problems(reports)
    _exit_by_state(reports)


@app.command("diff")
def diff_command(url: ServerUrl = DEFAULT_URL, json: Json = False) -> None:
    r"""Show how this version's text differs from the one on each primary, as a unified diff.

    Exit code: 0 no difference, 1 different or missing somewhere, 2 a primary gave no answer.

    \b
    Example:
      dispatch scripts diff | less
    """
    library, reports = _compared(url)
    reached = [report for report in reports if report.state is not NodeState.UNREACHABLE]
    if json:
        nodes = [_status_row(report, library) for report in reports]
        for row, report in zip(nodes, reports, strict=True):
            row["diff"] = deploy.unified_diff(report, library) if report in reached else None
        _print_json(library, nodes)
    else:
        for report in reached:
            _print_diff(deploy.unified_diff(report, library))
    _say_problems(reports)
    _exit_by_state(reports)


@app.command("print")
def print_command(
    line_map: Annotated[
        bool, typer.Option("--map", help="Print which file and line each line of the joined text comes from.")
    ] = False,
    json: Json = False,
) -> None:
    r"""Print the library as it is sent to the server: one text, joined from the files. Needs no server.

    \b
    Example:
      dispatch scripts print --map | grep lease_claim
    """
    with trouble_as_exit_code():
        library = current_library()
    places = list(enumerate(library.places, start=1))
    if json:
        lines = [{"line": line, "file": place.file, "file_line": place.line} for line, place in places if place]
        write_json({"library": _library_row(library), "text": library.text, "lines": lines})
    elif line_map:
        sys.stdout.writelines(f"{line:>6}  {place or '(joiner)'}\n" for line, place in places)
    else:
        sys.stdout.write(library.text)


def _compared(url: str) -> tuple[Library, list[NodeReport]]:
    with trouble_as_exit_code():
        library = current_library()
        with BlockingConnection(url, timeout_s=TIMEOUT_S) as connection:
            return library, deploy.compare(connection, library)


def _exit_by_state(reports: Sequence[NodeReport]) -> None:
    states = {report.state for report in reports}
    if NodeState.UNREACHABLE in states:
        raise typer.Exit(TROUBLE)
    if states != {NodeState.EQUAL}:
        raise typer.Exit(DIFFERS)


def _say_problems(reports: Sequence[NodeReport | LoadReport]) -> None:
    for report in reports:
        if report.problem:
            at = "" if report.address in report.problem else f"{report.address}: "
            complain(f"{at}{report.problem}")


def _short(digest: str) -> str:
    return digest[:16]


def _load_cells(report: LoadReport, library: Library) -> tuple[str, ...]:
    before = f"{report.before.version or '?'} ({_short(report.before.digest)})" if report.before else "-"
    return (report.address, report.action, library.version, str(len(library.functions)), before)


def _status_cells(report: NodeReport) -> tuple[str, ...]:
    found = report.installed
    if found is None:
        return (report.address, report.state, "-", "-", "-")
    return (report.address, report.state, found.version or "?", _short(found.digest), str(len(found.functions)))


def _library_row(library: Library) -> dict[str, Any]:
    return {
        "name": LIBRARY_NAME,
        "version": library.version,
        "contract": library.contract,
        "digest": library.digest,
        "functions": library.functions,
    }


def _installed_row(installed: Installed | None) -> dict[str, Any] | None:
    if installed is None:
        return None
    return {"version": installed.version, "digest": installed.digest, "functions": installed.functions}


def _load_row(report: LoadReport) -> dict[str, Any]:
    return {
        "address": report.address,
        "action": report.action,
        "before": _installed_row(report.before),
        "added": report.added,
        "removed": report.removed,
        "problem": report.problem or None,
    }


def _status_row(report: NodeReport, library: Library) -> dict[str, Any]:
    there = set(report.installed.functions) if report.installed else set()
    here = set(library.functions)
    return {
        "address": report.address,
        "state": report.state,
        "installed": _installed_row(report.installed),
        "functions_missing": sorted(here - there),
        "functions_extra": sorted(there - here),
        "problem": report.problem or None,
    }


def _print_json(library: Library, nodes: list[dict[str, Any]]) -> None:
    write_json({"library": _library_row(library), "nodes": nodes})


_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def _print_diff(text: str) -> None:
    console = output()
    if not console.is_terminal:
        sys.stdout.write(text)
        return
    for line in text.splitlines():
        console.print(line, style=_COLOURS.get(line[:1], ""))

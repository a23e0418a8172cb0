"""`dispatch top`: looks at the group once a second and takes keys between."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    Actor,
    FabricGroup,
    Group,
    Json,
    Url,
    fabric_group,
    one_line,
    who,
    write_json,
)
from dispatch.cli.remote import is_gateway
from dispatch.cli.tables import print_table
from dispatch.cli.top.drawing import document, drawn, headline, told
from dispatch.cli.top.keys import interactive, next_key, single_keys
from dispatch.cli.top.state import Ask, Screen
from dispatch.errors import DispatchError
from dispatch.fabric.functions import pool_pause
from dispatch.fabric.view import Wanted, read_view_blocking
from dispatch.studio.verdict import attention

app = typer.Typer(add_completion=False)

_ONCE_S = 0.5
_WANTED = Wanted(running=400)


@app.command()
def top(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    every: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end, as without a terminal.")] = False,
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Watch a group: what needs attention, pools and why they wait, endpoints, gateways, what has just ended.

    Keys: q quits, s sorts, j and k select a pool, p pauses or resumes it after a y. Without a terminal, with --once and
    with --json it prints once, after two looks half a second apart: rates need two.

    Exit code: 0 also when something needs attention (dispatch doctor --strict says that), 2 no answer.

    \b
    Example:
      dispatch top
      dispatch top --gateway http://127.0.0.1:8080
      dispatch top --once | grep vision
    """
    screen = Screen(group, compare_clocks=not is_gateway(url))
    with fabric_group(url, group) as fabric:
        console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto", markup=False, highlight=False)
        if once or json or not console.is_terminal or console.is_dumb_terminal or not interactive():
            _look(fabric, screen)
            time.sleep(_ONCE_S)
            _look(fabric, screen)
            _print(screen, json=json)
            return
        _watch(fabric, screen, console, (every, who(actor)))


def _look(fabric: FabricGroup, screen: Screen) -> None:
    screen.take(read_view_blocking(fabric.connection.run_many, fabric.name, _WANTED))


def _print(screen: Screen, *, json: bool) -> None:
    if json:
        write_json(document(screen))
        return
    view = screen.view
    assert view is not None  # noqa: S101 - it was looked at
    typer.echo(headline(view))
    rows, _ = attention(screen.found, len(screen.found))
    for each in rows:
        typer.echo(f"{each.kind}: {one_line(each.sentence)}")
    for headings, cells in told(screen):
        typer.echo()
        print_table(headings, cells)
    for section, problem in view.unknown.items():
        typer.echo(f"{section} unknown: {one_line(problem)}", err=True)


def _watch(fabric: FabricGroup, screen: Screen, console: Console, how: tuple[float, str]) -> None:
    every, actor = how
    with single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while not screen.over:
            try:
                _look(fabric, screen)
            except DispatchError as error:
                screen.problem = str(error)
            ends_at = time.monotonic() + every
            while not screen.over:
                live.update(drawn(screen, console.height), refresh=True)
                left = ends_at - time.monotonic()
                key = next_key(left)
                if not key:
                    break
                asked = screen.press(key)
                if asked is not None:
                    _do(fabric, screen, asked, actor)
                    break
    sys.stdout.flush()


def _do(fabric: FabricGroup, screen: Screen, asked: Ask, actor: str) -> None:
    try:
        state = fabric.run(pool_pause(asked.pool_id, asked.action, actor=actor, reason="dispatch top"))
    except DispatchError as error:
        screen.said = one_line(str(error))
        return
    screen.said = f"pool {asked.pool_id} is {'now' if state.changed else 'already'} {state.state}"

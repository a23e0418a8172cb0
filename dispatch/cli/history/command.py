"""`dispatch history`: making the history, serving an embedded one, and asking it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer

from dispatch.cli.history.options import Days, HistoryUrl, PasswordEnv
from dispatch.cli.history.questions import app as questions
from dispatch.cli.listening import listen, url_of
from dispatch.cli.operating import Json, trouble_as_exit_code, write_json
from dispatch.errors import ConfigurationError, HistoryOff
from dispatch.telemetry.history import schema
from dispatch.telemetry.history.engine import Engine
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.history.target import FORMS

_HELP = """What has ended: how long it waited and ran, how it ended, how many tokens it took.

It stands in ClickHouse (DISPATCH_HISTORY_URL), in the tables of the OpenTelemetry collector's exporter.

\b
Example:
  dispatch history init --history clickhouse://user@clickhouse.internal:8123/dispatch
  dispatch history stats --since 1h
  dispatch history list --failed --gateway http://127.0.0.1:8080
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)
app.registered_commands += questions.registered_commands

_OFF = f"no history is named: give --history (DISPATCH_HISTORY_URL): {FORMS}"


@app.command("init")
def init_command(
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    ttl_days: Days = 90,
    print_: Annotated[bool, typer.Option("--print", help="Print the statements; change nothing.")] = False,
    json: Json = False,
) -> None:
    r"""Make the tables and views of the history, and set how long rows are kept. Repeatable.

    Rows older than --ttl-days go. A table that a collector has made keeps its own time.

    \b
    Example:
      dispatch history init --history clickhouse://user@clickhouse.internal:8123/dispatch --password-env CH_PASSWORD
      dispatch history init --print
    """
    if print_:
        typer.echo(";\n\n".join(schema.statements(ttl_days)) + ";")
        return
    with trouble_as_exit_code(), opened(history, password_env) as store:
        done = store.init(ttl_days)
    if json:
        write_json({"history": store.address, "ttl_days": ttl_days, "changed": done})
        return
    for line in done or ["everything is there already"]:
        typer.echo(line)


@app.command("serve")
def serve_command(
    path: Annotated[Path, typer.Option(help="The folder that holds it; made if it is not there.")],
    password_env: PasswordEnv,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 = a free one.")] = 8123,
    ttl_days: Days = 90,
) -> None:
    r"""Serve an embedded history (chdb) until Ctrl-C, by the part of ClickHouse's HTTP interface that gateways use.

    For a machine or a test without a ClickHouse server. Its tables are made at the start. It has one user, whose
    password the variable named by --password-env holds.

    \b
    Example:
      export HISTORY_PASSWORD=...
      dispatch history serve --path /var/lib/dispatch/history --password-env HISTORY_PASSWORD
      dispatch gateway --history-url clickhouse://127.0.0.1:8123   # with DISPATCH_HISTORY_PASSWORD_ENV=HISTORY_PASSWORD
    """
    from dispatch.cli.history.serving import serve_history  # noqa: PLC0415 - the HTTP stack takes a second to load

    password = os.environ.get(password_env, "")
    if not password:
        raise ConfigurationError(f"the environment variable {password_env} (--password-env) is not set or empty")
    with listen(host, port) as listener, Engine(path) as engine:
        with HistoryStore(f"chdb://{path.resolve()}") as store:
            store.init(ttl_days)
        url = url_of(listener).replace("http://", "clickhouse://")

        def ready() -> None:
            typer.echo(url)
            typer.echo(f"An embedded history in {path} answers at {url}. Ctrl-C stops it.", err=True)

        options = {"use_uvloop": sys.platform != "win32"}
        anyio.run(serve_history, engine, password, listener, ready, backend_options=options)


def opened(url: str, password_env: str) -> HistoryStore:
    """Return the history at `url`.

    Raises:
        HistoryOff: none is named.
        ConfigurationError: the URL is none, or the password is not there.
    """
    if not url:
        raise HistoryOff(_OFF)
    return HistoryStore(url, password_env=password_env)

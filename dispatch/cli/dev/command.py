"""The options of `dispatch dev`."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer

from dispatch.cli.dev.plan import Options
from dispatch.cli.dev.stack import run
from dispatch.telemetry.logs import set_up_logging

_HELP = """Run everything on this machine until Ctrl-C: an embedded Valkey with the library and the default config, a
simulated OpenAI-compatible backend, an embedded history, two gateways that share the group, and the operators' page. It
listens on loopback only, asks for no keys (also when some are created) and reads no DISPATCH_* variables. Nothing stays
behind: no process, no file.

Exit code: 0 after Ctrl-C or SIGTERM, when everything has stopped; 1 when it could not start, or a part of it ended by
itself; 2 wrong usage.

\b
Examples:
  dispatch dev
  dispatch dev --load
  dispatch dev --endpoint https://llm.example/v1 --api-key-env LLM_KEY
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=_HELP)
def dev(  # noqa: PLR0913 - a command's options are its parameters
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Use this OpenAI-compatible backend (its base URL) instead of the simulated one."
        ),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable that holds the endpoint's key.")
    ] = "",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the first gateway; the others take the next ones. 0 = free ones."),
    ] = 8080,
    gateways: Annotated[int, typer.Option(min=1, max=8, help="How many gateway processes.")] = 2,
    valkey_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of Valkey. 0 = a free one.")] = 0,
    studio: Annotated[
        bool, typer.Option(help="The operators' page (port 8090, or a free one), if its library is installed.")
    ] = True,
    load: Annotated[bool, typer.Option("--load", help="Send a gentle mixed demo load over all pools.")] = False,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep history in an embedded ClickHouse (about 400 MB).")
    ] = True,
    logs: Annotated[bool, typer.Option("--logs", help="Show on stderr what the processes log.")] = False,
) -> None:
    """Run everything on this machine."""
    options = Options(
        endpoint=endpoint, api_key_env=api_key_env, port=port, gateways=gateways,
        valkey_port=valkey_port, studio=studio, load=load, history=history, logs=logs,
    )  # fmt: skip
    set_up_logging(level="warning")
    anyio.run(run, options)

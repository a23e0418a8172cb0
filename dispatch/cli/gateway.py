"""`dispatch gateway`: one gateway process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from dispatch.config import GatewaySettings
from dispatch.telemetry.logs import set_up_logging

app = typer.Typer(add_completion=False)

_EPILOG = (
    "Every option is also a variable DISPATCH_<NAME> and a line of the settings file; options win, then variables."
)


@app.command(epilog=_EPILOG)
def gateway(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    config: Annotated[
        Path | None, typer.Option(help="Settings file (.yaml, .toml or .json). [DISPATCH_CONFIG_FILE]")
    ] = None,
    valkey_url: Annotated[
        str | None,
        typer.Option(
            help="Valkey: valkey://[[user]:password@]host[:port][/db], valkeys:// with TLS, "
            "?cluster=true for a cluster."
        ),
    ] = None,
    valkey_client: Annotated[str | None, typer.Option(help="glide or redis.", show_default="glide")] = None,
    fabric_group: Annotated[
        str | None, typer.Option("--fabric-group", "--group", help="The group it serves.", show_default="default")
    ] = None,
    gateway_id: Annotated[
        str | None, typer.Option(help="Name of this gateway, its own in the group.", show_default="made up")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[str | None, typer.Option(help="Port; 0 = any free one.", show_default="8080")] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            help="Whether callers need a key: auto (when the group has one, and always where other machines can "
            "connect), required or off.",
            show_default="auto",
        ),
    ] = None,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="The same as --keys off.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen where other machines can connect though no key is asked for.")
    ] = False,
    slots: Annotated[str | None, typer.Option(help="Requests this gateway runs at once.", show_default="64")] = None,
    endpoint_url: Annotated[
        str | None,
        typer.Option(
            help="OpenAI-compatible base URL for the default config of a group that was never configured; else unused."
        ),
    ] = None,
    endpoint_api_key_env: Annotated[
        str | None, typer.Option(help="Name of the variable that holds the key of --endpoint-url.")
    ] = None,
    drain_timeout_ms: Annotated[
        str | None, typer.Option(help="How long running requests may take after SIGTERM.", show_default="30000")
    ] = None,
    history_url: Annotated[
        str | None,
        typer.Option(help="Where history goes: clickhouse://[user@]host[:port][/database].", show_default="off"),
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json.", show_default="auto")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
) -> None:
    r"""Run one gateway: it claims requests of a fabric group, runs them and serves the OpenAI-compatible HTTP API.

    It does not start where other machines can connect and no key would be asked for, unless told --insecure.

    Ends with exit code 0 after SIGTERM or Ctrl-C, when what runs has finished or --drain-timeout-ms is over.

    \b
    Example:
      dispatch scripts load --url valkey://127.0.0.1:6379
      dispatch gateway --valkey-url valkey://127.0.0.1:6379 --endpoint-url http://127.0.0.1:8000/v1
    """
    flags: dict[str, Any] = {
        "config_file": config,
        "valkey_url": valkey_url,
        "valkey_client": valkey_client,
        "fabric_group": fabric_group,
        "gateway_id": gateway_id,
        "host": host,
        "port": port,
        "keys": "off" if no_keys else keys,
        "insecure": insecure or None,
        "slots": slots,
        "endpoint_url": endpoint_url,
        "endpoint_api_key_env": endpoint_api_key_env,
        "drain_timeout_ms": drain_timeout_ms,
        "history_url": history_url,
        "log_format": log_format,
        "log_level": log_level,
    }
    settings = GatewaySettings(**{name: value for name, value in flags.items() if value is not None})
    set_up_logging(settings.log_format, settings.log_level, gateway=settings.gateway_id, group=settings.fabric_group)
    if not settings.enabled:
        typer.echo("queueing is disabled (DISPATCH_ENABLED): nothing is started", err=True)
        return
    # Only now: the HTTP stack takes a second to load, and what is wrong with a setting is said at once.
    from dispatch.cli.serving import serve  # noqa: PLC0415 - see above

    options = {"use_uvloop": sys.platform != "win32"}
    anyio.run(serve, settings, backend="asyncio", backend_options=options)

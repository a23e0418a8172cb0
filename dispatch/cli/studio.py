"""`dispatch studio`: the operators' page."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import anyio
import structlog
import typer

from dispatch.cli.listening import is_loopback, listen, url_of
from dispatch.cli.operating import DEFAULT_URL, ServerUrl
from dispatch.errors import ConfigurationError
from dispatch.fabric.schema import check_group
from dispatch.ingress.authority import KeysMode
from dispatch.telemetry.logs import set_up_logging

app = typer.Typer(add_completion=False)
log = structlog.get_logger(__name__)

DEFAULT_PORT = 8090
LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
_INSTALL = "pip install 'fabric-dispatch[studio]'"


@app.command()
def studio(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    url: ServerUrl = DEFAULT_URL,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group", "--fabric-group", envvar="DISPATCH_FABRIC_GROUP",
            help="Fabric group to show; several are allowed.", show_default="default",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = DEFAULT_PORT,
    keys: Annotated[
        KeysMode,
        typer.Option(
            help="Whether visitors need a key (role observe or admin): auto (when the group has one, and always where "
            "other machines can connect), required or off."
        ),
    ] = "auto",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen where other machines can connect though no key is asked for.")
    ] = False,
    allow_anonymous_writes: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous-writes",
            help="Let those who were asked for no key change things; the record then says anonymous@ADDRESS.",
        ),
    ] = False,
    history: Annotated[
        str,
        typer.Option(envvar="DISPATCH_HISTORY_URL", help="The history: clickhouse://user@host:8123/database."),
    ] = "",
    history_password_env: Annotated[
        str,
        typer.Option(
            envvar="DISPATCH_HISTORY_PASSWORD_ENV", metavar="NAME",
            help="The environment variable that holds the history's password.",
        ),
    ] = "",
    valkey_client: Annotated[
        str, typer.Option(help="redis or glide; redis-py says at once why a server cannot be reached.")
    ] = "redis",
    log_format: Annotated[LogFormat, typer.Option(help="How to log.")] = "auto",
    log_level: Annotated[LogLevel, typer.Option(help="How much to log.")] = "info",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document with the address on stdout.")] = False,
) -> None:  # fmt: skip
    r"""Serve the operators' page of fabric groups: what waits, runs and ended, why, and what to do about it.

    It reads Valkey itself and needs no gateway. Ends with exit code 0 after SIGTERM or Ctrl-C.

    \b
    Example:
      dispatch studio --url valkey://127.0.0.1:6379 --group default
      dispatch studio --host 0.0.0.0 --keys required
    """
    set_up_logging(log_format, log_level)
    groups = list(dict.fromkeys(group or ["default"]))
    for name in groups:
        check_group(name)
    options = {
        "url": url, "groups": groups, "keys": keys, "insecure": insecure, "client": valkey_client,
        "anonymous_writes": allow_anonymous_writes, "history": history, "history_password_env": history_password_env,
    }  # fmt: skip
    with listen(host, port) as listener:
        anyio.run(_serve, listener, options, json)


async def _serve(listener: socket.socket, options: dict[str, Any], as_json: bool) -> None:
    # Only now: the page's library takes a second to load, and what is wrong with an option is said at once.
    try:
        from dispatch.cli.studio_doors import open_studio  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the page's library is not installed ({error.name}): {_INSTALL}") from error
    import msgspec  # noqa: PLC0415 - beside it
    import uvicorn  # noqa: PLC0415 - as above

    from dispatch.cli.http_server import HttpServer  # noqa: PLC0415 - it loads uvicorn

    async with open_studio(options, loopback=is_loopback(listener)) as application:
        config = uvicorn.Config(
            application, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=1,
            ws_max_size=1_048_576, server_header=False, proxy_headers=False,
        )  # fmt: skip
        server = HttpServer(config)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_obey, signals, server)
                address = url_of(listener)
                log.info("listening", url=address, groups=options["groups"], keys=options["keys"])
                if as_json:
                    typer.echo(msgspec.json.encode({"url": address, "groups": options["groups"]}).decode())
                await server.serve([listener])
                tasks.cancel_scope.cancel()


async def _obey(signals: AsyncIterator[signal.Signals], server: Any) -> None:
    """Turn the first signal into a stop in order, the second into one at once."""
    async for _ in signals:
        server.force_exit = server.should_exit
        server.should_exit = True

"""The `dispatch` command: the root of all sub commands, and the one place where an error becomes an exit code.

Sub commands are imported only when they are called, so that `dispatch --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dispatch.errors import DispatchError

DISTRIBUTION = "fabric-dispatch"

_COMMANDS = {
    "cancel": ("dispatch.cli.cancel", "Cancel requests, waiting or running, and say what became of each."),
    "config": ("dispatch.cli.config", "Show and change the config of a fabric group: pools, weights, caps, endpoints."),
    "dead": ("dispatch.cli.dead", "List requests whose attempts are spent; show, retry or drop them."),
    "dev": ("dispatch.cli.dev", "Run everything on this machine: Valkey, a simulated backend, two gateways."),
    "doctor": ("dispatch.cli.doctor", "Say what is wrong in a group, and where to look first; repair its counters."),
    "estimate": ("dispatch.cli.estimate", "Say how long a request that is submitted to a pool now would wait."),
    "explain": ("dispatch.cli.explain", "Say in sentences where a request is, why it waits, or how it ended."),
    "gateway": ("dispatch.cli.gateway", "Run one gateway: it claims requests, executes them and serves HTTP."),
    "history": ("dispatch.cli.history", "What has ended: lists, percentiles, errors, tokens and shares."),
    "keys": ("dispatch.cli.keys", "Create, list and revoke the bearer keys of a group's callers."),
    "metrics": (
        "dispatch.cli.metrics",
        "Print a Grafana dashboard, Prometheus alert rules, the list of metrics.",
    ),
    "pools": ("dispatch.cli.pools", "List pools and what holds them up; pause, resume, drain or purge one."),
    "requests": ("dispatch.cli.requests", "List requests that run and wait, and say where one is."),
    "scripts": ("dispatch.cli.scripts", "Load the Lua library into Valkey, and compare or print it."),
    "simulate": ("dispatch.cli.simulate", "Run a simulated OpenAI-compatible backend."),
    "studio": ("dispatch.cli.studio", "Serve the operators' page: what waits, runs and ended, why, and what to do."),
    "top": ("dispatch.cli.top", "Watch a group live: pools and why they wait, gateways, endpoints, what ended."),
}
"""Name, module with its typer `app`, and the line in `dispatch --help`."""


_OWN_COMPLETION = ("install_completion", "show_completion")


class _LazyGroup(TyperGroup):
    """A group that imports a sub command when it is asked for it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Names only: listing and suggestions for a mistyped name read them, `get_command` never does.
        self.commands.update(dict.fromkeys(_COMMANDS, TyperCommand(None)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the base class names its parameters
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command = get_command(importlib.import_module(module).app)
        _adopt(command)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


def _adopt(command: Any) -> None:
    """Make a module's command a part of this one.

    Help texts have no frames, colours or cut lines: they are read in pipes and narrow terminals as well. The mark that
    keeps lines as they are arrives spelled out from raw docstrings. Options that would install completion for a command
    of another name go.
    """
    command.rich_markup_mode = None
    command.help = (command.help or "").replace("\\b\n", "\b\n")
    command.short_help = command.short_help or command.help.partition("\n\n")[0].replace("\n", " ")
    command.params = [option for option in command.params if option.name not in _OWN_COMPLETION]
    for sub_command in getattr(command, "commands", {}).values():
        _adopt(sub_command)


_HELP = """Fair dispatch of LLM calls: queues in Valkey, any number of gateways, OpenAI-compatible backends.

\b
Example:
  dispatch dev
  dispatch scripts status --help
"""

app = typer.Typer(cls=_LazyGroup, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # noqa: PLC0415 - reads a file; only this option needs it

        typer.echo(f"dispatch {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback(help=_HELP)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options of `dispatch` itself."""


def main() -> NoReturn:
    """Run the command line and end the process.

    Exit codes: 0 done (also when the reader of a pipe went away), 1 an error that was said in one sentence on stderr,
    2 wrong usage, 130 Ctrl-C. A traceback is a bug of this program.
    """
    _replace_closed_streams()
    code = _run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would say that it could not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _run() -> int:
    try:
        get_command(app).main(prog_name="dispatch")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            return 0
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (BrokenPipeError, DispatchError, BaseExceptionGroup) as error:
        code = _exit_code(list(_leaves(error)))
        if code is None:
            raise
        return code
    return 0


def _exit_code(errors: list[BaseException]) -> int | None:
    """Say what is meant for a person and return the exit code; None = one of them is a bug and wants its traceback."""
    if any(isinstance(error, KeyboardInterrupt) for error in errors):
        return 130
    told = [error for error in errors if isinstance(error, DispatchError)]
    if any(not isinstance(error, DispatchError | BrokenPipeError) for error in errors):
        return None
    for text in dict.fromkeys(str(error) for error in told):
        print(f"dispatch: {text}", file=sys.stderr)  # noqa: T201 - the terminal is this module's output
    return 1 if told else 0


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def _replace_closed_streams() -> None:
    """Open what the caller closed (`>&-`): otherwise the next socket would get that number and receive our prints."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    main()

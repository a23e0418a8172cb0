"""The `dispatch` command in pipes, narrow terminals and with closed streams; errors become one sentence and a code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import typer
from typer.main import get_command

from dispatch.cli import main as root
from dispatch.errors import ConfigurationError, FabricUnavailable
from tests.support.valkey import ValkeyProcess

DISPATCH = [sys.executable, "-m", "dispatch"]
ODD_TERMINALS = {"dumb": {"NO_COLOR": "1", "COLUMNS": "20", "TERM": "dumb"}, "narrow": {"COLUMNS": "20"}}
NEEDS_SERVER = ["scripts status", "scripts diff", "scripts load"]
NEEDS_GROUP = [
    "config show", "config history", "config rollback 1", "config set policy=drr", "pools list", "pools show default",
    "pools pause default", "pools resume default", "pools drain default", "pools purge default", "doctor",
    "explain default", "top",
    "dead list", "dead show default", "dead retry default", "dead drop default", "cancel default",
    "keys create --name default", "keys list", "keys revoke default", "requests list", "requests show default",
    "estimate default",
]  # fmt: skip
COMMANDS = [
    "dev", "gateway", "simulate", "studio", "history init", "history serve", "history list", "history show",
    "history stats", "history series", "history errors", "history tokens", "history shares", "history gateways",
    "history verify", "metrics dashboard", "metrics alerts", "metrics list",
    "scripts load", "scripts status", "scripts diff", "scripts print", "config apply",
    "config diff", *(re.sub(r"( --name)? (1|\S+=\S+|default)$", "", command) for command in NEEDS_GROUP),
]  # fmt: skip
GROUPS = ["config", "dead", "history", "keys", "metrics", "pools", "requests", "scripts"]
LISTINGS = ["--help", "--version", "scripts print", *NEEDS_SERVER]


def dispatch(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCH_")}
    environment |= options.pop("environment", {})
    return subprocess.run(
        [*DISPATCH, *words], capture_output=True, text=True, timeout=30, check=False, env=environment, **options
    )


# ---- the root


def test_the_version_is_the_packages() -> None:
    done = dispatch("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"dispatch \d+\.\d+\.\d+\n", done.stdout)


def test_help_lists_every_command_at_once() -> None:
    took, needed = [], []
    for _ in range(5):
        start = time.perf_counter()
        done = dispatch("--help")
        between = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import typer"], check=True)
        took.append(between - start)
        needed.append(time.perf_counter() - between)
    assert all(re.search(rf"^  {name} ", done.stdout, re.MULTILINE) for name in root._COMMANDS)
    assert min(took) < 3 * min(needed), (took, needed)  # about as long as its one dependency takes to load


def test_the_root_loads_nothing_of_its_commands() -> None:
    code = (
        "import sys; from dispatch.cli import main; "
        "heavy = {'glide', 'redis', 'httpx', 'fastapi', 'uvicorn', 'aiohttp', 'rich', 'structlog', 'pydantic'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://me:hidden@host", "valkey:host", ""])
@pytest.mark.parametrize("command", ["pools list", "top --once", "doctor", "history stats"])
def test_an_address_of_neither_kind_is_told_with_both(command: str, url: str) -> None:
    done = dispatch(*command.split(), "--gateway", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"dispatch: the address '[^']*' is neither .*valkey://.* nor .*http://.*\n", done.stderr)
    assert "hidden" not in done.stderr


@pytest.mark.parametrize("where", ["--history=clickhouse://127.0.0.1:9", "--gateway=http://127.0.0.1:9"])
def test_an_ending_that_there_is_not_is_told_with_those_that_there_are(where: str) -> None:
    done = dispatch("history", "list", "--ending", "vanished", where, environment={"COLUMNS": "300"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "'vanished' is no ending; there are " in done.stderr
    assert "producer_gone" in done.stderr


def test_a_mistyped_command_is_refused_with_the_near_one() -> None:
    done = dispatch("gatway")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Did you mean 'gateway'?" in done.stderr


def test_the_list_of_commands_in_these_tests_is_whole() -> None:
    def walk(command: Any, path: tuple[str, ...]) -> Iterator[str]:
        if not getattr(command, "commands", None):
            yield " ".join(path)
        for name in getattr(command, "commands", {}):
            yield from walk(command.get_command(None, name), (*path, name))

    assert sorted(walk(get_command(root.app), ())) == sorted(COMMANDS)


def test_the_list_of_groups_in_these_tests_is_whole() -> None:
    commands = get_command(root.app)
    assert [name for name in root._COMMANDS if hasattr(commands.get_command(None, name), "commands")] == GROUPS


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = dispatch(*command.split(), "--help", environment={"COLUMNS": "100"})
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"^ +Examples?:\n( +.*\n)*? +dispatch {command}\b", done.stdout, re.MULTILINE), done.stdout
    assert "--install-completion" not in done.stdout
    assert "\\b" not in done.stdout


# ---- errors


@pytest.fixture
def run_failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run `dispatch fail`, a command that raises the given error; returns the exit code."""

    def run(error: BaseException) -> int:
        app = typer.Typer()

        @app.command()
        def fail() -> NoReturn:
            raise error

        monkeypatch.setitem(root._COMMANDS, "fail", ("failing", ""))
        monkeypatch.setitem(sys.modules, "failing", SimpleNamespace(app=app))  # type: ignore[arg-type]  # only `app` is read
        monkeypatch.setattr(sys, "argv", ["dispatch", "fail"])
        return root._run()

    return run


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigurationError("port is missing"), "dispatch: port is missing\n"),
        (
            ExceptionGroup("", [ConfigurationError("a"), ExceptionGroup("", [FabricUnavailable("b")])]),
            "dispatch: a\ndispatch: b\n",
        ),
        (ExceptionGroup("", [ConfigurationError("a"), ConfigurationError("a")]), "dispatch: a\n"),
        (ExceptionGroup("", [ConfigurationError("a"), BrokenPipeError()]), "dispatch: a\n"),
    ],
)
def test_an_error_is_one_sentence(
    run_failing: Callable[[BaseException], int], error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(error) == 1
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("error", [BrokenPipeError(), ExceptionGroup("", [BrokenPipeError()])])
def test_a_reader_that_went_away_is_no_error(
    run_failing: Callable[[BaseException], int], error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(error) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("", [KeyboardInterrupt()])])
def test_ctrl_c_is_130(
    run_failing: Callable[[BaseException], int], error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(error) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError("bug"), ExceptionGroup("", [ConfigurationError("a"), ValueError("bug")])])
def test_a_bug_keeps_its_traceback(run_failing: Callable[[BaseException], int], error: Exception) -> None:
    with pytest.raises(type(error)):
        run_failing(error)


@pytest.mark.parametrize("command", [*NEEDS_SERVER, *NEEDS_GROUP])
def test_no_valkey_is_one_sentence_within_seconds(command: str) -> None:
    start = time.monotonic()
    dispatch(*command.split(), "--help")
    between = time.monotonic()
    done = dispatch(*command.split(), "--url", "valkey://127.0.0.1:9")
    assert time.monotonic() - between < 2 * (between - start) + 2  # the first is how long it takes to start
    assert done.returncode not in (0, 130)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "127.0.0.1:9" in done.stderr


# ---- pipes and terminals


@pytest.mark.parametrize("terminal", ODD_TERMINALS)
@pytest.mark.parametrize("command", LISTINGS)
def test_a_listing_is_plain_and_whole_anywhere(valkey: ValkeyProcess, command: str, terminal: str) -> None:
    done = dispatch(*command.split(), environment={"DISPATCH_VALKEY_URL": valkey.url, **ODD_TERMINALS[terminal]})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "…" not in done.stdout
    assert "Traceback" not in done.stderr
    if command == "scripts status":
        assert f"127.0.0.1:{valkey.port}" in done.stdout


@pytest.mark.parametrize("command", LISTINGS)
def test_a_reader_that_went_away_is_quiet(valkey: ValkeyProcess, command: str) -> None:
    for unbuffered in ("", "1"):
        reader, writer = os.pipe()
        os.close(reader)
        environment = os.environ | {"DISPATCH_VALKEY_URL": valkey.url, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            [*DISPATCH, *command.split()], stdout=writer, stderr=subprocess.PIPE, check=False, env=environment
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closing", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", LISTINGS)
def test_closed_streams_do_no_harm(valkey: ValkeyProcess, command: str, closing: str) -> None:
    line = f"exec {' '.join(DISPATCH)} {command} {closing}"
    environment = os.environ | {"DISPATCH_VALKEY_URL": valkey.url}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert done.stderr == "" or command in NEEDS_SERVER
    assert "Traceback" not in done.stderr

"""What the README shows was tried: its Python runs, its commands and options exist, its tables and links are true."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dispatch.cli import main as root
from dispatch.config import GatewaySettings
from dispatch.config.documents import DEFAULT_WEIGHTS
from tests.support.commands import Commands
from tests.support.dev import DevRun, dev

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table(heading: str) -> list[list[str]]:
    rows = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert rows is not None
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in rows[1].splitlines()]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevRun]:
    with dev(tmp_path_factory.mktemp("dev")) as run:
        run.wait_ready()
        yield run


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_runs(running: DevRun, number: int, tmp_path: Path) -> None:
    code = blocks("python")[number]
    for shown, real in (
        ("http://127.0.0.1:8080", running.gateways[0].removesuffix("/v1")),
        ("valkey://127.0.0.1:6379", running.valkey_url),
        ("http://127.0.0.1:9000/v1", running.backend),
    ):
        code = code.replace(shown, real)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_operators_lines_work_one_after_the_other(
    running: DevRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pools.yaml").write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    dispatch = Commands(running.valkey_url, "from-a-file")
    operating = re.compile(r"dispatch (config|pools|doctor|dead (list|retry|drop))\b")
    shown = [line for block in blocks("sh") for line in block.splitlines() if operating.match(line)]
    lines = [shlex.split(line, comments=True) for line in shown]
    assert len(lines) >= 16
    for words in lines:
        done = dispatch(*words[1:])
        assert done.code == (1 if words[1:3] == ["config", "diff"] else 0), (words, done)


@pytest.mark.parametrize("line", [block for block in blocks("sh") if block.startswith("curl ")])
def test_the_curl_lines_work(running: DevRun, line: str) -> None:
    line = line.replace("http://127.0.0.1:8080", running.gateways[0].removesuffix("/v1"))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20, check=True)
    assert '"choices"' in done.stdout


def test_what_the_shell_submits_can_be_fetched(running: DevRun) -> None:
    [lines] = [block for block in blocks("sh") if block.startswith("id=")]
    lines = lines.replace("http://127.0.0.1:8080", running.gateways[0].removesuffix("/v1"))
    fetch = lines.splitlines()[-1].partition("#")[0]
    wait = f"for _ in $(seq 100); do {fetch} | grep -q choices && break; sleep 0.1; done"
    done = subprocess.run(
        ["bash", "-c", f"{lines}\n{wait}\n{lines}"], capture_output=True, text=True, timeout=40, check=True
    )
    assert '"state":"' in done.stdout


def test_the_commands_and_options_exist() -> None:
    lines = [
        line.split("#")[0] for block in blocks("sh") for line in block.splitlines() if line.startswith("dispatch ")
    ]
    assert len(lines) >= 4
    for line in lines:
        command: Any = get_command(root.app)
        words = shlex.split(line)[1:]
        while getattr(command, "commands", None):
            command = command.get_command(None, words.pop(0))
            assert command is not None, line
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_settings_table_is_the_settings() -> None:
    rows = {name: default for name, default, _ in table("variable")}
    fields = {f"DISPATCH_{name.upper()}": field.default for name, field in GatewaySettings.model_fields.items()}
    assert set(rows) == set(fields)
    for name, default in fields.items():
        if isinstance(default, bool):
            assert rows[name] == str(default).lower()
        elif isinstance(default, int) or (isinstance(default, str) and default):
            assert rows[name] == str(default)


def test_the_pools_table_is_the_default_config() -> None:
    assert {pool: int(weight) for pool, weight, _ in table("pool")} == DEFAULT_WEIGHTS


def test_links_and_scripts_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    scripts = re.findall(r"(?<![\w/])(?:\./)?((?:scripts|\.ci)/[\w-]+)", README)
    assert links
    assert scripts
    assert [name for name in {*links, *scripts} if not (ROOT / name).exists()] == []

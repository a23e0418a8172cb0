"""`dispatch scripts` as an operator meets it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from dispatch.fabric.library import current_library
from tests.support.cluster import ValkeyCluster
from tests.support.valkey import ValkeyProcess, free_port

EQUAL, DIFFERS, TROUBLE = 0, 1, 2
ESCAPE = "\x1b"
ROOT = Path(__file__).resolve().parents[2]
SLACK_S = 2.0
"""What starting a process may take on a busy machine."""


@pytest.fixture
def server(start_valkey) -> ValkeyProcess:
    process: ValkeyProcess = start_valkey(library=False)
    return process


def scripts(*words: str, url: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `dispatch scripts` with the URL from the environment, as a deployment gives it."""
    return subprocess.run(
        [sys.executable, "-m", "dispatch", "scripts", *words],
        env={**os.environ, "DISPATCH_VALKEY_URL": url, **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def put_other_library(port: int) -> None:
    text = "#!lua name=fabric_dispatch\nserver.register_function('dispatch_old', function() return 1 end)\n"
    with redis.Redis(port=port) as eye:
        eye.function_load(text, replace=True)


def test_load_says_what_it_did_and_is_repeatable(server: ValkeyProcess) -> None:
    first, second = scripts("load", url=server.url), scripts("load", url=server.url)
    assert (first.returncode, second.returncode) == (0, 0)
    assert f"127.0.0.1:{server.port}  loaded" in first.stdout
    assert f"127.0.0.1:{server.port}  unchanged" in second.stdout
    assert first.stderr == second.stderr == ""


def test_load_names_added_and_removed_functions(server: ValkeyProcess) -> None:
    put_other_library(server.port)
    done = scripts("load", url=server.url)
    assert "replaced" in done.stdout
    assert f"127.0.0.1:{server.port} removed: dispatch_old\n" in done.stdout
    assert ", ".join(current_library().functions) in done.stdout


def test_load_as_json(server: ValkeyProcess) -> None:
    put_other_library(server.port)
    done = scripts("load", "--json", url=server.url)
    (node,) = json.loads(done.stdout)["nodes"]
    assert (node["action"], node["removed"], node["problem"]) == ("replaced", ["dispatch_old"], None)
    assert node["added"] == list(current_library().functions)
    assert node["before"]["functions"] == ["dispatch_old"]


def test_status_goes_from_missing_over_different_to_equal(server: ValkeyProcess) -> None:
    missing = scripts("status", url=server.url)
    put_other_library(server.port)
    different = scripts("status", "--json", url=server.url)
    scripts("load", url=server.url)
    equal = scripts("status", "--json", url=server.url)
    assert (missing.returncode, different.returncode, equal.returncode) == (DIFFERS, DIFFERS, EQUAL)
    assert "missing" in missing.stdout
    (node,) = json.loads(different.stdout)["nodes"]
    assert (node["state"], node["functions_extra"]) == ("different", ["dispatch_old"])
    document = json.loads(equal.stdout)
    assert document["nodes"][0]["state"] == "equal"
    assert document["nodes"][0]["installed"]["digest"] == document["library"]["digest"] == current_library().digest


def test_diff_is_a_unified_diff(server: ValkeyProcess) -> None:
    put_other_library(server.port)
    different = scripts("diff", url=server.url)
    assert different.returncode == DIFFERS
    assert different.stdout.startswith(f"--- 127.0.0.1:{server.port}/fabric_dispatch\n+++ version ")
    assert "\n-server.register_function('dispatch_old'" in different.stdout
    scripts("load", url=server.url)
    equal = scripts("diff", url=server.url)
    assert (equal.returncode, equal.stdout) == (EQUAL, "")
    document = json.loads(scripts("diff", "--json", url=server.url).stdout)
    assert document["nodes"][0]["diff"] == ""


def test_print_needs_no_server() -> None:
    text = scripts("print", url="nonsense")
    assert text.stdout == current_library().text
    mapped = scripts("print", "--map").stdout.splitlines()
    assert len(mapped) == len(current_library().places)
    assert any(line.endswith("  lua/functions/library_version.lua:1") for line in mapped)
    document = json.loads(scripts("print", "--json").stdout)
    line = document["lines"][-1]
    assert document["text"] == current_library().text
    last = max(place.name for place in (ROOT / "lua" / "functions").glob("*.lua"))
    assert (line["file"], line["file_line"]) == (f"functions/{last}", 1)


@pytest.mark.parametrize("command", ["load", "status", "diff"])
def test_valkey_away_is_one_sentence_within_three_seconds(command: str) -> None:
    url = f"valkey://user:geheim@127.0.0.1:{free_port()}"
    started = time.monotonic()
    done = scripts(command, url=url)
    assert time.monotonic() - started < 3 + SLACK_S
    assert (done.returncode, done.stdout) == (TROUBLE, "")
    assert done.stderr.startswith("dispatch: Valkey at 127.0.0.1:")
    assert done.stderr.endswith(" does not answer: connection refused\n")
    assert "geheim" not in done.stderr


def test_a_silent_valkey_is_told_within_three_seconds(server: ValkeyProcess) -> None:
    server.pause()
    started = time.monotonic()
    done = scripts("status", "--json", url=server.url)
    assert time.monotonic() - started < 3 + SLACK_S
    assert done.returncode == TROUBLE
    assert json.loads(done.stdout)["nodes"][0]["state"] == "unreachable"
    assert done.stderr == f"dispatch: Valkey at 127.0.0.1:{server.port} does not answer: it took too long\n"


def test_a_wrong_password_and_a_wrong_url_are_one_sentence_each(start_valkey) -> None:
    server = start_valkey(library=False, options=("--requirepass", "richtig"))
    refused = scripts("load", url=f"valkey://:falsch@127.0.0.1:{server.port}")
    assert refused.returncode == TROUBLE
    assert refused.stderr.startswith(f"dispatch: 127.0.0.1:{server.port}: Valkey refused the login; check user and")
    malformed = scripts("load", url="valkey://:falsch@")
    assert malformed.returncode == TROUBLE
    assert malformed.stderr == "dispatch: Valkey URL 'valkey://***@': the host is missing\n"


def test_a_function_name_of_another_library_is_not_taken_over(server: ValkeyProcess) -> None:
    with redis.Redis(port=server.port) as eye:
        eye.function_load("#!lua name=other\nserver.register_function('dispatch_lease_claim', function() end)\n")
    done = scripts("load", url=server.url)
    assert done.returncode == TROUBLE
    assert "dispatch_lease_claim already exists" in done.stderr


def test_a_cluster_gets_it_on_every_primary() -> None:
    with ValkeyCluster() as cluster:
        document = json.loads(scripts("load", "--json", url=cluster.url).stdout)
        assert {node["address"] for node in document["nodes"]} == cluster.addresses
        assert {node["action"] for node in document["nodes"]} == {"loaded"}
        cluster.nodes[1].pause()
        partly = scripts("status", "--json", url=cluster.url)
        states = {node["address"]: node["state"] for node in json.loads(partly.stdout)["nodes"]}
        assert partly.returncode == TROUBLE
        assert states[f"127.0.0.1:{cluster.nodes[0].port}"] == "equal"
        assert states[f"127.0.0.1:{cluster.nodes[1].port}"] == "unreachable"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m dispatch scripts print | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout == "#!lua name=fabric_dispatch\n0\n"
    assert done.stderr == ""


def test_pipes_get_no_escape_codes(server: ValkeyProcess) -> None:
    done = scripts("status", url=server.url, FORCE_COLOR="", TERM="xterm-256color")
    assert ESCAPE not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "escapes"),
    [({"TERM": "xterm-256color"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)],
)
def test_a_terminal_gets_a_table_and_colours_only_if_wanted(
    server: ValkeyProcess, environment: dict[str, str], escapes: bool
) -> None:
    put_other_library(server.port)
    shown = in_terminal(["status"], server.url, environment) + in_terminal(["diff"], server.url, environment)
    assert (ESCAPE in shown) == escapes
    assert "different" in shown
    assert f"127.0.0.1:{server.port}" in shown


def in_terminal(words: list[str], url: str, environment: dict[str, str]) -> str:
    """Run `dispatch scripts` with a terminal as its standard output and return what appears there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dispatch", "scripts", *words],
        env={**os.environ, "TERM": "xterm-256color", "DISPATCH_VALKEY_URL": url, **environment},
        stdout=theirs,
        stdin=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        while chunk := _read(screen):
            shown += chunk
    process.wait(timeout=20)
    return shown.decode()


def _read(screen: Any) -> bytes:
    try:
        return screen.read(65536) or b""
    except OSError:  # the other end of a terminal closes with EIO
        return b""


def test_help_has_an_example_and_the_exit_codes() -> None:
    for command in ("load", "status", "diff"):
        text = scripts(command, "--help").stdout
        assert "Example:" in text
        assert "Exit code: 0" in text

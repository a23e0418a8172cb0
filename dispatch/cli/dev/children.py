"""The processes that `dispatch dev` starts: what they say, when they end, and how all of them are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.text import TextReceiveStream

from dispatch.errors import DispatchError

_TETHER = Path(__file__).with_name("tether.py")
_TAIL_LINES = 20
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to start. `name` is for people; `stop_s` is how long it may take from SIGTERM to its end.

    Children of one `stage` stop side by side, and before those of a lower stage, which they depend on.
    """

    name: str
    stage: int
    command: Sequence[str]
    environment: dict[str, str]
    stop_s: float = 5.0


@dataclass(eq=False, slots=True)
class Child:
    """One running process with the last lines it said."""

    program: Program
    process: Process
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def last_words(self) -> str:
        """Return the last lines it said, indented, with a heading; "" when it said nothing."""
        said = "\n".join(f"    {line}" for line in self.tail)
        return f"; its last lines:\n{said}" if said else "; it said nothing"


class Children:
    """Starts processes and owns them until `stop`.

    Each has a session of its own, so that Ctrl-C reaches only us and the order of stopping is ours. `tasks` holds one
    for each child until that ends, even when cancelled: it reads what the child says, without which the child would
    block while it drains. So whoever starts children must reach `stop`.
    """

    def __init__(self, tasks: TaskGroup, *, echo: Callable[[str], None] | None = None) -> None:
        self._tasks = tasks
        self._echo = echo
        self._all: list[Child] = []
        self._stopping = False
        self._unexpected = anyio.Event()
        self._fault: OSError | None = None

    async def start(self, program: Program) -> Child:
        """Start a process.

        Raises:
            DispatchError: it cannot be started.
        """
        command = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *program.command]
        # Shielded: a process that was started and not noted down could not be stopped.
        with anyio.CancelScope(shield=True):
            try:
                process = await anyio.open_process(
                    command,
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    env=program.environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise DispatchError(f"{program.name} cannot be started: {error.strerror or error}") from error
            child = Child(program, process)
            self._all.append(child)
            self._tasks.start_soon(self._follow, child)
        return child

    async def watch(self) -> NoReturn:
        """Wait until a child ends that nobody stopped.

        Raises:
            DispatchError: names the child, how it ended, and its last lines.
            OSError: what the children say cannot be passed on (the reader went away).
        """
        await self._unexpected.wait()
        if self._fault is not None:
            raise self._fault
        child = next(child for child in self._all if child.ended.is_set())
        raise DispatchError(f"{child.program.name} ended unexpectedly ({_how(child)}){child.last_words()}")

    def forget(self, child: Child) -> None:
        """Take an ended child out of the watch: its end was expected or is dealt with."""
        self._all.remove(child)
        self._unexpected = anyio.Event()

    async def stop(self) -> None:
        """Stop all, the highest stage first; each gets its time, then is killed. Repeatable, never left half-way."""
        self._stopping = True
        with anyio.CancelScope(shield=True):
            for stage in sorted({child.program.stage for child in self._all}, reverse=True):
                children = [child for child in self._all if child.program.stage == stage]
                for child in children:
                    _signal(child, signal.SIGTERM)
                with anyio.move_on_after(max(child.program.stop_s for child in children)):
                    for child in children:
                        await child.ended.wait()
                await self._kill(children)

    def hurry(self) -> None:
        """Kill all at once; a `stop` under way then ends."""
        self._stopping = True
        for child in self._all:
            _signal(child, signal.SIGKILL)

    async def _kill(self, children: list[Child]) -> None:
        for child in children:
            if not child.ended.is_set():
                _signal(child, signal.SIGKILL)
                with anyio.move_on_after(_KILL_WAIT_S):
                    await child.ended.wait()

    async def _follow(self, child: Child) -> None:
        with anyio.CancelScope(shield=True):
            await self._read(child)
            await child.process.wait()
            await child.process.aclose()
        child.ended.set()
        if not self._stopping:
            self._unexpected.set()

    async def _read(self, child: Child) -> None:
        if child.process.stdout is not None:  # always: it was started with a pipe
            rest = ""
            # Broken while we read: the process is gone, and there is no more to read.
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async for text in TextReceiveStream(child.process.stdout, errors="replace"):
                    *lines, rest = (rest + text).split("\n")
                    self._heard(child, lines)
            self._heard(child, [rest] if rest else [])

    def _heard(self, child: Child, lines: Sequence[str]) -> None:
        for line in lines:
            child.tail.append(line)
            try:
                if self._echo is not None:
                    self._echo(f"{child.program.name}: {line}")
            except OSError as error:
                # Reading goes on: a child that nobody reads could not be stopped in good order.
                self._echo, self._fault = None, error
                self._unexpected.set()


def _signal(child: Child, number: signal.Signals) -> None:
    if not child.ended.is_set():
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _how(child: Child) -> str:
    code = child.process.returncode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

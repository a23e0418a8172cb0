"""The processes of a run: gateways and producers that are killed, stopped and started again, each behind its proxy.

All are tethered: when the harness is killed, the kernel kills them. Start them in the main thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

import dispatch
from tests.chaos.evidence import Call, Ended, LogLine, Stalled, Started
from tests.chaos.producer import Job

_TETHER = Path(dispatch.__file__).parent / "cli" / "dev" / "tether.py"
_ROOT = Path(__file__).parents[2]
_SIGNS = ("Traceback", "ScriptFault", "run_failed", "settle_refused", "result_dropped")
_LINE = msgspec.json.Decoder(LogLine)


class Member:
    """A process with a name that outlives it: it may be killed and come back. What each life says goes to `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.lives = 0
        self.wanted = False
        """Whether it should run now: if it does not, somebody has to start it again."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether its process is there (it may be stopped)."""
        return self.process is not None and self.process.poll() is None

    @property
    def said(self) -> Path:
        """Where the current life's stderr goes."""
        return self.folder / f"{self.name}-{self.lives}.log"

    def launch(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start the next life."""
        self.lives += 1
        self.wanted = True
        with self.said.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), sys.executable, *command],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process."""
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once; it is not wanted any more until it is started again."""
        self.wanted = False
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def ended(self, within_s: float) -> int | None:
        """Wait for the end of the process; returns its exit code, None when it goes on."""
        assert self.process is not None
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None


class GatewayMember(Member):
    """`dispatch gateway`. Half of the time a new life comes under the name of the last one."""

    def __init__(self, name: str, folder: Path, settings: dict[str, str]) -> None:
        super().__init__(name, folder)
        self._settings = settings
        self._generation = 0

    def start(self, *, new_name: bool = False) -> None:
        """Start it; `new_name`: as a gateway the group has never seen."""
        self._generation += new_name
        values = self._settings | {"gateway_id": f"{self.name}.{self._generation}"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCH_")}
        environment = clean | {f"DISPATCH_{name.upper()}": value for name, value in values.items()}
        self.launch(["-m", "dispatch", "gateway"], environment)

    @property
    def listens(self) -> bool:
        """Whether this life got as far as serving."""
        return b'"event":"listening"' in self.said.read_bytes()

    def complaints(self) -> list[str]:
        """Return what no life of a gateway may say."""
        found: list[str] = []
        for path in sorted(self.folder.glob(f"{self.name}-*.log")):
            text = path.read_text("utf-8", "replace")
            found += [f"{path.name} says {sign}: {_around(text, sign)}" for sign in _SIGNS if sign in text]
        return found


class ProducerMember(Member):
    """`tests.chaos.producer`. A new life goes on with the orders that no life before it has begun.

    Before them it repeats the calls that died with the last one, if they have a name that makes that safe.
    """

    def __init__(self, name: str, folder: Path, job: Job) -> None:
        super().__init__(name, folder)
        self._job = job
        self._killed_at: dict[int, float] = {}

    def start(self) -> None:
        """Start it with what is left to do; nothing happens when nothing is."""
        begun = {line.call for line in self.lines() if isinstance(line, Started)}
        died = [call.order for call in self.calls() if call.died_at and (call.order.named or call.order.keyed)]
        orders = [msgspec.structs.replace(order, repeat=True) for order in died if not order.repeat]
        orders += [order for order in self._job.orders if order.tag not in begun]
        if self.lives and not orders:
            self.wanted = False
            return
        job = self._orders(self.lives + 1)
        job.write_bytes(msgspec.json.encode(msgspec.structs.replace(self._job, orders=orders)))
        self.launch(["-m", "tests.chaos.producer", str(job), str(self._log(self.lives + 1))], dict(os.environ))

    def kill(self) -> None:
        """End it at once: the calls under way die with it."""
        self._killed_at[self.lives] = time.time()
        super().kill()

    @property
    def done(self) -> bool:
        """Whether its last life made all calls that were left, and every one has come back."""
        return not self.wanted or (self.process is not None and self.process.poll() == 0)

    def lines(self) -> list[LogLine]:
        """Return everything all lives have noted."""
        return [line for life in range(1, self.lives + 1) for line in self._read(life)]

    def stalls(self) -> list[Stalled]:
        """Return when its processes stood still."""
        return [line for line in self.lines() if isinstance(line, Stalled)]

    def calls(self) -> list[Call]:
        """Return every call that was begun, with what came of it."""
        calls: dict[tuple[int, str], Call] = {}
        for life in range(1, self.lives + 1):
            job = msgspec.json.decode(self._orders(life).read_bytes(), type=Job)
            orders = {order.tag: order for order in job.orders}
            for line in self._read(life):
                if isinstance(line, Started):
                    call = Call(orders[line.call], self.name, line.at, died_at=self._killed_at.get(life))
                    calls[life, line.call] = call
                elif isinstance(line, Ended):
                    call = calls[life, line.call]
                    call.ended, call.died_at = line, None
        return list(calls.values())

    def _orders(self, life: int) -> Path:
        return self.folder / f"{self.name}-{life}.json"

    def _log(self, life: int) -> Path:
        return self.folder / f"{self.name}-{life}.jsonl"

    def _read(self, life: int) -> list[LogLine]:
        path = self._log(life)
        if not path.exists():
            return []
        return [_LINE.decode(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _around(text: str, sign: str) -> str:
    line = next(line for line in text.splitlines() if sign in line)
    return line[:300]

"""One run against one target: what is asked for, how its answers are counted, and what is told of it.

A run is so many connections, each with one request at a time. It is counted from when as many answers as connections
have come (not one for each: a target may serve some over and over while others wait), until its time is over and as
many have come again; after that nothing more is asked, and the last answers are waited for. So a slow target, too, is
measured in the middle of its work, and nothing is broken off.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import uvloop

from scripts.bench.children import cpu_seconds

WORD = b"lorem"
"""Each token of an answer holds it once, so that a lost or doubled token is found by counting."""

BODY_BYTES = 1024
RUN_BOUND_S = 120.0
"""How long a run may take beyond its own time: every answer is waited for."""

_WARM_S = 0.15


class Run(msgspec.Struct, frozen=True):
    """What is asked for.

    `greeting` is a path that costs the target little: each connection asks for it before the run begins. `tokens` is
    how many an answer has, `pids` whose CPU time is told, by name.
    """

    url: str
    greeting: str
    connections: int
    stream: bool
    seconds: float
    tokens: int
    pids: dict[str, int] = {}


class Outcome(msgspec.Struct, frozen=True):
    """What came of it. Times in milliseconds, CPU in seconds; `first` is the first byte of the answer's body.

    `problem` says why the run does not count; "" = it does.
    """

    count: int = 0
    seconds: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    first_p50_ms: float = 0.0
    cpu_s: dict[str, float] = {}
    problem: str = ""


class Tally:
    """Counts the answers of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = 0
        self._warm_at = 0.0
        self._opened = 0.0
        self._closed = 0.0
        self._cpu: dict[str, float] = {}
        self._took: list[float] = []
        self._first: list[float] = []
        self.problem = ""

    def begin(self) -> None:
        """Note that the first requests go out now."""
        self._warm_at = time.perf_counter() + _WARM_S

    def answered(self, took_s: float, first_s: float) -> bool:
        """Note an answer and when its body began; returns whether another is wanted."""
        now = time.perf_counter()
        if self._closed or self.problem:
            return False
        if not self._opened:
            self._before += 1
            if self._before >= self._run.connections and now >= self._warm_at:
                self._cpu, self._opened = self._cpu_now(), time.perf_counter()
            return True
        if now >= self._opened + self._run.seconds and len(self._took) >= self._run.connections:
            self._closed, after = now, self._cpu_now()
            self._cpu = {name: used - self._cpu[name] for name, used in after.items()}
            return False
        self._took.append(took_s)
        self._first.append(first_s)
        return True

    def failed(self, problem: str) -> None:
        """Note that the target did something wrong: the run does not count."""
        self.problem = self.problem or problem

    def outcome(self) -> Outcome:
        """Return what came of the run, which is over."""
        if self.problem or not self._closed or not self._took:
            return Outcome(problem=self.problem or "too few answers came in the run's time")
        took = sorted(self._took)
        return Outcome(
            count=len(took),
            seconds=self._closed - self._opened,
            p50_ms=_at(took, 0.50),
            p99_ms=_at(took, 0.99),
            first_p50_ms=_at(sorted(self._first), 0.50),
            cpu_s=self._cpu,
        )

    def _cpu_now(self) -> dict[str, float]:
        return {"load": time.process_time(), **{name: cpu_seconds(pid) for name, pid in self._run.pids.items()}}


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


def request_body(*, stream: bool) -> bytes:
    """Return a chat completion's body of 1 KB."""
    head = {"model": "bench", "stream": stream, "messages": [{"role": "user", "content": ""}]}
    room = BODY_BYTES - len(msgspec.json.encode(head))
    head["messages"] = [{"role": "user", "content": "x" * room}]
    return msgspec.json.encode(head)


def wrong_answer(run: Run, status: int, body: bytes) -> str:
    """Return what is wrong with an answer, "" if nothing is."""
    if status != 200:
        return f"answered {status}: {body[:200].decode(errors='replace')}"
    if (words := body.count(WORD)) != run.tokens:
        return f"gave {words} of {run.tokens} tokens: {body[:200].decode(errors='replace')}"
    if run.stream and not body.rstrip().endswith(b"data: [DONE]"):
        return f"did not end its stream with [DONE]: {body[-200:].decode(errors='replace')}"
    return ""


def obey(perform: Callable[[Run], Awaitable[Outcome]]) -> None:
    """Be a process that makes runs: one `Run` as a line of JSON on stdin, one `Outcome` on stdout; ends with stdin."""
    decoder = msgspec.json.Decoder(Run)

    async def bounded(run: Run) -> Outcome:
        try:
            async with asyncio.timeout(run.seconds + RUN_BOUND_S):
                return await perform(run)
        except TimeoutError:
            return Outcome(problem=f"not all answers came within {run.seconds + RUN_BOUND_S:g} s")
        except OSError as error:
            return Outcome(problem=f"no connection: {error}")

    for line in sys.stdin.buffer:
        outcome = uvloop.run(bounded(decoder.decode(line)))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


def per_second(outcome: Outcome) -> float:
    """Return the rate of a run."""
    return outcome.count / outcome.seconds


def cpu_us(outcome: Outcome, names: Mapping[str, object] | tuple[str, ...]) -> float:
    """Return the CPU time that these processes used for one request, in microseconds."""
    return sum(outcome.cpu_s[name] for name in names) / outcome.count * 1e6

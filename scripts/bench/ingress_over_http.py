"""What a gateway adds to a call over HTTP, and how many calls it serves.

Four targets take turns in every round, on one backend that has its answers ready:

  direct       the backend itself
  bare_client  the gateway's own HTTP client against the backend, with nothing around it
  gateway      one gateway with its Valkey: HTTP in, the queue, HTTP out
  litellm      LiteLLM's proxy, one worker, its logging off

Closed loop: each connection has one request of 1 KB at a time. "Added" is a target's latency less the backend's own at
the same number of connections. A core's requests a second are requests by the CPU time of the server processes, for the
gateway that of Valkey included. LiteLLM is installed once into an environment of its own in the cache folder.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from dispatch.cli.dev.probe import free_ports
from scripts.bench import litellm_peer
from scripts.bench.children import Child, Children, Failed, children
from scripts.bench.ingress_result import Cell, Round, report, result_of
from scripts.bench.ingress_run import RUN_BOUND_S, Outcome, Run
from scripts.bench.server import BenchServer, bench_server

GROUP = "bench"
_READY_S = 60.0
_WARM_S, _WARM_PEER_S = 0.3, 2.0
"""How long a target works before it is measured; LiteLLM still loads parts of itself with its first requests."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. LiteLLM, whose runs are long, takes part in the first `peer_rounds` rounds."""

    rounds: int
    peer_rounds: int
    seconds: float
    connections: tuple[int, ...]
    modes: tuple[bool, ...]
    tokens: int
    chunk_ms: float


@dataclass(frozen=True)
class Target:
    """Where requests go: which process asks, at which URL, and whose CPU time counts. `greeting` as of `Run`."""

    asks: Child
    url: str
    greeting: str
    pids: Mapping[str, int]


def main() -> None:
    """Run the benchmark and print what it found; exit code 1 when a goal is missed and --enforce is given."""
    arguments = _arguments()
    quick = Effort(3, 1, 0.6, (16, 128), (False, True), 20, 0.0)
    effort = quick if arguments.quick else replace(quick, rounds=5, peer_rounds=5, seconds=3.0)
    given = {
        "rounds": arguments.rounds, "seconds": arguments.seconds, "connections": arguments.connections,
        "modes": {None: None, "whole": (False,), "stream": (True,)}[arguments.mode],
        "tokens": arguments.tokens, "chunk_ms": arguments.chunk_ms,
    }  # fmt: skip
    effort = replace(effort, **{name: value for name, value in given.items() if value is not None})
    try:
        result = run(effort, with_litellm=not arguments.without_litellm)
    except Failed as error:
        sys.exit(f"bench: {error}")
    print(json.dumps(result, indent=2) if arguments.json else report(result))
    if arguments.enforce and result["missed"]:
        sys.exit(f"missed: {', '.join(result['missed'])}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench/ingress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: scripts/bench/ingress --quick --json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="under 90 seconds, once LiteLLM is installed")
    parser.add_argument("--enforce", action="store_true", help="exit with 1 when a ratio misses its goal")
    parser.add_argument("--without-litellm", action="store_true", help="leave LiteLLM out")
    parser.add_argument("--connections", type=_numbers, metavar="N,N", help="numbers of connections (16,128)")
    parser.add_argument("--mode", choices=("whole", "stream"), help="only one kind of answer (both)")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often everything is measured")
    parser.add_argument("--seconds", type=float, metavar="S", help="how long each run is counted")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of an answer, chunks of a stream (20)")
    parser.add_argument("--chunk-ms", type=float, metavar="MS", help="pause of the backend before each chunk (0)")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not all(1 <= number <= 1024 for number in numbers):
        raise argparse.ArgumentTypeError("from 1 to 1024 connections")
    return numbers


def run(effort: Effort, *, with_litellm: bool) -> dict[str, Any]:
    """Start everything, measure in turn, stop everything; returns the benchmark's document.

    Raises:
        Failed: something of ours did not start, or answered wrongly.
    """
    notes: list[str] = []
    peer = _peer(notes) if with_litellm else None
    with tempfile.TemporaryDirectory() as folder, children(Path(folder)) as owned, bench_server() as server:
        targets = _start(owned, server, effort, peer, notes)
        cells = _measure(targets, effort, notes)
        valkey = str(server.client.info("server")["valkey_version"])
        commands = {child.name: child.shown().replace(folder, "<folder>") for child in owned}
    return {
        **result_of(cells),
        "rounds": effort.rounds, "litellm_rounds": effort.peer_rounds if peer else 0,
        "seconds_per_run": effort.seconds, "tokens": effort.tokens, "chunk_ms": effort.chunk_ms,
        "load": "asyncio protocols with httptools and uvloop, a process of its own",
        "backend": "a raw asyncio protocol with httptools and uvloop, a process of its own",
        "versions": _versions(valkey, peer), "commands": commands, "notes": notes,
    }  # fmt: skip


def _peer(notes: list[str]) -> Path | None:
    """Return the peer's Python, None when it cannot be had."""
    folder = litellm_peer.cache_folder()
    if not (folder / "made").exists():
        say(f"installing LiteLLM {litellm_peer.VERSION} into {folder} (once, some minutes)")
    try:
        return litellm_peer.install(folder)
    except litellm_peer.NotThere as error:
        _note(notes, f"LiteLLM is left out: {error}")
        return None


def _start(
    owned: Children, server: BenchServer, effort: Effort, peer: Path | None, notes: list[str]
) -> dict[str, Target]:
    say("starting the backend, the gateway" + (" and LiteLLM" if peer else ""))
    module = [sys.executable, "-m"]
    backend = owned.start("backend", [
        *module, "scripts.bench.ingress_backend", "--tokens", str(effort.tokens), "--chunk-ms", str(effort.chunk_ms)
    ], is_asked=True)  # fmt: skip
    url = backend.hear(_READY_S).decode()
    gateway_port, peer_port = free_ports(2)
    proxy = litellm_peer.start(owned, peer, url, peer_port) if peer else None
    most = max(effort.connections)
    server.configure(GROUP, {
        "total_concurrent_dispatch": 2 * most, "max_queued": 10_000, "pools": [{"pool_id": "default"}],
        "endpoints": [{"endpoint_id": "default", "url": url}],
    })  # fmt: skip
    gateway = owned.start("gateway", [
        *module, "dispatch", "gateway", "--valkey-url", server.url, "--fabric-group", GROUP, "--port",
        str(gateway_port), "--slots", str(2 * most), "--log-level", "warning",
    ])  # fmt: skip
    load = owned.start("load", [*module, "scripts.bench.ingress_load"], is_asked=True)
    client = owned.start("bare_client", [*module, "scripts.bench.ingress_client"], is_asked=True)
    gateway.wait_for(f"http://127.0.0.1:{gateway_port}/readyz", _READY_S)
    behind = {"backend": backend.pid}
    own = {"gateway": gateway.pid, "valkey": int(server.client.info("server")["process_id"])}
    targets = {
        "direct": Target(load, url, "/v1/models", behind),
        "bare_client": Target(client, url, "", behind),
        "gateway": Target(load, f"http://127.0.0.1:{gateway_port}/v1", "/healthz", behind | own),
    }
    if proxy is not None:
        try:
            litellm_peer.wait_ready(proxy, peer_port)
            url = f"http://127.0.0.1:{peer_port}/v1"
            targets["litellm"] = Target(load, url, litellm_peer.ALIVE, behind | {"litellm": proxy.pid})
        except litellm_peer.NotThere as error:
            _note(notes, f"LiteLLM is left out: {error}")
    return targets


def _measure(targets: dict[str, Target], effort: Effort, notes: list[str]) -> list[Cell]:
    """Run all rounds. A peer that fails is left out from then on, and with it what was measured of it."""
    cells = [Cell(connections, stream, []) for stream in effort.modes for connections in effort.connections]
    began = time.monotonic()
    for stream in effort.modes:
        for name in list(targets):
            say(f"warming up {name}{', streaming' if stream else ''}")
            seconds = _WARM_PEER_S if name == "litellm" else _WARM_S
            _try(targets, name, Run("", "", effort.connections[0], stream, seconds, effort.tokens), notes)
    for number in range(effort.rounds):
        for cell in cells:
            say(f"round {number + 1} of {effort.rounds}, {cell.name} ({time.monotonic() - began:.0f} s)")
            one: Round = {}
            names = list(targets)
            for at in range(len(names)):
                name = names[(at + number) % len(names)]  # nobody always runs after the same one
                if name == "litellm" and number >= effort.peer_rounds:
                    continue
                plan = Run("", "", cell.connections, cell.stream, effort.seconds, effort.tokens)
                if (outcome := _try(targets, name, plan, notes)) is not None:
                    one[name] = outcome
            cell.rounds.append(one)
    for cell in cells:
        cell.rounds[:] = [{name: one[name] for name in targets if name in one} for one in cell.rounds]
    return cells


def _try(targets: dict[str, Target], name: str, plan: Run, notes: list[str]) -> Outcome | None:
    target = targets[name]
    plan = msgspec.structs.replace(plan, url=target.url, greeting=target.greeting, pids=dict(target.pids))
    target.asks.tell(msgspec.json.encode(plan))
    outcome = msgspec.json.decode(target.asks.hear(plan.seconds + 2 * RUN_BOUND_S), type=Outcome)
    if not outcome.problem:
        return outcome
    if name != "litellm":
        raise Failed(f"{name} at {plan.connections} connections: {outcome.problem}")
    del targets[name]
    _note(notes, f"LiteLLM is left out: at {plan.connections} connections it {outcome.problem}")
    return None


def _versions(valkey: str, peer: Path | None) -> dict[str, str]:
    names = ("fabric-dispatch", "aiohttp", "uvicorn", "uvloop", "httptools", "valkey-glide")
    found = {"python": platform.python_version(), "valkey": valkey, **{name: version(name) for name in names}}
    if peer is not None:
        found["litellm"] = litellm_peer.VERSION
    return found


def _note(notes: list[str], text: str) -> None:
    notes.append(text)
    say(text)


def say(text: str) -> None:
    """Tell progress on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""Gateway throughput with telemetry on (metrics, spans, history) beside off, in turn.

Two gateway processes of one server, each with a group of its own, the same producer process and the same backend, which
has its answers ready: one counts, records and turns its records into rows of history, the other does nothing of that.
Told are the rates and the processor time of the gateway for each request; the ratio of the latter hangs less on what
else the machine does. Without --history the rows are made and thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from dispatch import DispatchClient, Gateway, GatewaySettings
from dispatch.contract import Call, Operation
from dispatch.errors import HistoryUnavailable
from dispatch.fabric.observing import NOBODY
from dispatch.gateway.executors import NoopExecutor
from dispatch.producer.options import CallOptions
from dispatch.telemetry.history.rows import columns_of
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.metrics.exporting import Metrics
from dispatch.telemetry.recorder import RecorderOptions
from dispatch.telemetry.recording import Recording
from dispatch.telemetry.sinks import Sink, ThreadSink
from scripts.bench.fabric_round_trip import BODY_BYTES, OUTSTANDING, at_concurrency, say, spread
from scripts.bench.server import BenchServer, bench_server

GROUPS = {"off": "bench-off", "on": "bench-on"}
SETTLED_S = 1.0
"""What is left to record after a round is done within this time, and counts for that round."""


def main() -> None:
    """Run the benchmark and print what it found."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench/telemetry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: scripts/bench/telemetry --quick --json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="about half a minute")
    parser.add_argument("--noop", action="store_true", help="no calls to a backend: the executor does nothing")
    parser.add_argument("--history", metavar="URL", default="", help="write the rows there, too (see README, History)")
    parser.add_argument("--gateway", nargs=2, metavar=("URL", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gateway:
        how = How(arguments.history, arguments.noop)
        anyio.run(serve, *arguments.gateway, how, backend_options={"use_uvloop": True})
        return
    rounds, seconds = (4, 2.0) if arguments.quick else (8, 4.0)
    with bench_server() as server, backend() as endpoint_url:
        result = measure(server, endpoint_url, How(arguments.history, arguments.noop), (rounds, seconds))
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(f"{k:28} {v}" for k, v in result.items()))


class How(NamedTuple):
    """Where rows go ("" = nowhere), and whether no backend is called."""

    history: str
    noop: bool


@contextmanager
def backend() -> Iterator[str]:
    """Run a backend; gives its URL."""
    process = subprocess.Popen([sys.executable, "-m", "scripts.bench.ingress_backend"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        yield process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.wait()


def measure(server: BenchServer, endpoint_url: str, how: How, extent: tuple[int, float]) -> dict[str, object]:
    """Start a gateway for each mode and measure them in turn; returns the benchmark's document."""
    rounds, seconds = extent
    for group in GROUPS.values():
        server.configure(group, {
            "total_concurrent_dispatch": OUTSTANDING, "pools": [{"pool_id": "default"}],
            "endpoints": [{"endpoint_id": "default", "url": endpoint_url}],
        })  # fmt: skip
    command = [sys.executable, "-m", "scripts.bench.telemetry_cost", "--history", how.history, "--gateway", server.url]
    noop = ["--noop"] if how.noop else []
    gateways = {mode: subprocess.Popen([*command, mode, *noop], stdout=subprocess.DEVNULL) for mode in GROUPS}
    rates: dict[str, list[float]] = {mode: [] for mode in GROUPS}
    used_us: dict[str, list[float]] = {mode: [] for mode in GROUPS}
    try:
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}")
            for mode, gateway in gateways.items():
                before = cpu_seconds(gateway.pid)
                done, took = anyio.run(produce, server.url, GROUPS[mode], seconds, backend_options={"use_uvloop": True})
                time.sleep(SETTLED_S)
                if number > 0:  # the first one warms up
                    rates[mode].append(done / took)
                    used_us[mode].append((cpu_seconds(gateway.pid) - before) / done * 1e6)
    finally:
        for gateway in gateways.values():
            gateway.send_signal(signal.SIGTERM)
        for gateway in gateways.values():
            gateway.wait(timeout=30)
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    cpu = [off / on for on, off in zip(used_us["on"], used_us["off"], strict=True)]
    return {
        "rate_off": round(statistics.median(rates["off"]), 1), "rate_on": round(statistics.median(rates["on"]), 1),
        "gateway_us_off": round(statistics.median(used_us["off"]), 1),
        "gateway_us_on": round(statistics.median(used_us["on"]), 1),
        "ratios": {"rate_on_over_off": round(statistics.median(ratios), 3),
                   "gateway_cpu_off_over_on": round(statistics.median(cpu), 3)},
        "spread": {"rate_on_over_off": spread(ratios), "gateway_cpu_off_over_on": spread(cpu)},
        "rounds": rounds, "seconds_per_round": seconds,
    }  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """Return the processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def serve(url: str, mode: str, how: How) -> None:
    """Be a gateway without an HTTP front. Ends with SIGTERM."""
    on = mode == "on"
    settings = GatewaySettings(valkey_url=url, fabric_group=GROUPS[mode], slots=OUTSTANDING)
    metrics = Metrics(Resource.create(), settings.fabric_group) if on else None
    options = RecorderOptions(group=settings.fabric_group, consumer=settings.gateway_id, resource=Resource.create())
    recording = Recording(url, options, [sink_of(how.history)] if on else [])
    observer = NOBODY if metrics is None else metrics.counting
    executor = NoopExecutor(b"y" * BODY_BYTES) if how.noop else None
    async with recording, Gateway(settings, executor=executor, observer=observer):
        await anyio.sleep_forever()


def sink_of(history: str) -> Sink:
    """Return the history, or a sink that makes rows for nobody."""
    if history:
        store = HistoryStore(history)
        return ThreadSink("history", store.write, away=HistoryUnavailable, close=store.close)

    def make_rows(spans: Sequence[ReadableSpan]) -> None:
        columns_of(spans)

    return ThreadSink("history", make_rows, away=OSError)


async def produce(url: str, group: str, seconds: float) -> tuple[int, float]:
    """Make calls for `seconds`; returns how many, and how long that took."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * (BODY_BYTES - 60)}]}).encode()
    call = Call(operation=Operation.CHAT_COMPLETIONS, body=body, model="m", message_count=1)
    options = CallOptions(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    async with DispatchClient(url, fabric_group=group) as client:

        async def whole() -> None:
            reply = await client.call(call, options)
            if not reply.succeeded:
                raise RuntimeError(f"a benchmark request ended {reply.ending}")

        started = time.perf_counter()
        rate = await at_concurrency(whole, seconds)
        took = time.perf_counter() - started
    return round(rate * took), took


if __name__ == "__main__":
    main()

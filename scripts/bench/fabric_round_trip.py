"""Rate, round trip and server CPU of submit -> claim -> no-op executor -> reply, beside a bare no-op FCALL.

One gateway process, one producer process with 128 outstanding requests of 1 KB, one Valkey server, all on this machine.
Bare and whole calls are measured in turn, several times each; medians and the spread are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

from dispatch import DispatchClient, Gateway, GatewaySettings
from dispatch.contract import Call, Operation
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connecting import connect
from dispatch.fabric.functions import request_submit
from dispatch.fabric.records import Submission
from dispatch.fabric.sync import BlockingConnection
from dispatch.gateway.executors import NoopExecutor
from dispatch.producer.options import CallOptions
from scripts.bench.server import BenchServer, bench_server

GROUP = "bench"
OUTSTANDING = 128
BODY_BYTES = 1024
QUEUED_FOR_MEMORY = 100_000
PRODUCER_MEMORY_BATCH = 500


@dataclass
class Samples:
    """What the rounds measured."""

    bare_rates: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)


def main() -> None:
    """Run the benchmark and print what it found."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench/fabric", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: scripts/bench/fabric --quick --json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="under 45 seconds")
    parser.add_argument("--gateway", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.gateway:
        anyio.run(serve, arguments.gateway, backend_options={"use_uvloop": True})
        return
    rounds, seconds = (5, 1.5) if arguments.quick else (9, 4.0)
    with bench_server() as server:
        result = measure(server, rounds, seconds)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


def measure(server: BenchServer, rounds: int, seconds: float) -> dict[str, object]:
    """Measure memory, then rates in turn; returns the benchmark's document."""
    pools = [{"pool_id": name, "quantum": quantum, "max_queue_depth": 2 * QUEUED_FOR_MEMORY} for name, quantum in
             (("interactive", 4), ("document-extract", 2), ("backfill", 1), ("default", 1))]  # fmt: skip
    document = {
        "total_concurrent_dispatch": OUTSTANDING, "max_queued": 2 * QUEUED_FOR_MEMORY, "pools": pools,
        "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
    }  # fmt: skip
    say("memory of queued requests")
    server.configure("memory", document)
    queued_bytes = memory_of_queued(server)
    server.client.flushdb()
    server.configure(GROUP, document)
    say("starting the gateway process")
    command = [sys.executable, "-m", "scripts.bench.fabric_round_trip", "--gateway", server.url]
    gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # where its log goes
    try:
        samples = anyio.run(produce, server, rounds, seconds, backend_options={"use_uvloop": True})
    finally:
        gateway.terminate()
        gateway.wait(timeout=30)
    latencies = sorted(samples.latencies_ms)
    ratios = [rate / bare for rate, bare in zip(samples.rates, samples.bare_rates, strict=True)]
    return {
        "rate": round(statistics.median(samples.rates), 1),
        "p50_ms": round(statistics.median(latencies), 2),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)], 2),
        "server_us_per_request": round(statistics.median(samples.server_us), 1),
        "ratios": {"rate_over_bare_fcall": round(statistics.median(ratios), 3)},
        "bare_fcall_rate": round(statistics.median(samples.bare_rates), 1),
        "spread": {
            "rate": spread(samples.rates), "bare_fcall_rate": spread(samples.bare_rates),
            "server_us_per_request": spread(samples.server_us), "rate_over_bare_fcall": spread(ratios),
        },
        "queued_bytes_per_100k_requests": queued_bytes,
        "outstanding": OUTSTANDING, "body_bytes": BODY_BYTES, "rounds": rounds, "seconds_per_round": seconds,
    }  # fmt: skip


def memory_of_queued(server: BenchServer) -> int:
    """Queue 100,000 requests of 1 KB and return what they take."""
    before = server.memory_bytes()
    with BlockingConnection(server.url, timeout_s=30) as connection:
        for start in range(0, QUEUED_FOR_MEMORY, PRODUCER_MEMORY_BATCH):
            calls = [request_submit(submission(start + at)) for at in range(PRODUCER_MEMORY_BATCH)]
            for answer in connection.run_many("memory", calls):
                if isinstance(answer, Exception):
                    raise answer
    return server.memory_bytes() - before


def submission(number: int) -> Submission:
    """Return a request of 1 KB with an envelope as the SDK sends it."""
    request_id, producer = uuid.uuid4().hex, "bench-producer"
    envelope = {
        "contract": 1, "request_id": request_id, "producer_id": producer, "pool_id": "default",
        "operation": "chat.completions", "model": "m", "message_count": 1,
        "traceparent": f"00-{number:032x}-00f067aa0ba902b7-01",
    }  # fmt: skip
    return Submission(
        request_id=request_id, pool_id="default", producer_id=producer, session="bench", nonce=uuid.uuid4().hex,
        model="m", message_count=1, images=0, pages=0, estimated_cost_units=None, timeout_ms=None,
        envelope=json.dumps(envelope).encode(), body_bytes=BODY_BYTES, body=b"x" * BODY_BYTES,
    )  # fmt: skip


async def serve(url: str) -> None:
    """Be the gateway process: a gateway without HTTP whose executor does nothing. Ends with SIGTERM."""
    settings = GatewaySettings(valkey_url=url, fabric_group=GROUP, slots=OUTSTANDING)
    async with Gateway(settings, executor=NoopExecutor(b"y" * BODY_BYTES)):
        await anyio.sleep_forever()


async def produce(server: BenchServer, rounds: int, seconds: float) -> Samples:
    """Measure bare and whole calls in turn."""
    samples = Samples()
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * (BODY_BYTES - 60)}]}).encode()
    call = Call(operation=Operation.CHAT_COMPLETIONS, body=body, model="m", message_count=1)
    options = CallOptions()
    noop = FunctionCall("noop", [], int)
    bare = await connect(server.url)
    async with DispatchClient(server.url, fabric_group=GROUP) as client:

        async def whole() -> None:
            started = time.perf_counter()
            reply = await client.call(call, options)
            samples.latencies_ms.append((time.perf_counter() - started) * 1000)
            if not reply.succeeded:
                raise RuntimeError(f"a benchmark request ended {reply.ending}")

        async def empty() -> None:
            await bare.run(GROUP, noop)

        await at_concurrency(whole, 1.0)
        samples.latencies_ms.clear()
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            samples.bare_rates.append(await at_concurrency(empty, seconds / 2))
            used, started = server.cpu_seconds(), len(samples.latencies_ms)
            samples.rates.append(await at_concurrency(whole, seconds))
            done = len(samples.latencies_ms) - started
            samples.server_us.append((server.cpu_seconds() - used) / done * 1e6)
    await bare.aclose()
    return samples


async def at_concurrency(action: Callable[[], Awaitable[None]], seconds: float) -> float:
    """Run `action` in 128 tasks for `seconds`; returns how often it was done a second."""
    done = 0
    started = time.perf_counter()
    stop_at = started + seconds

    async def repeat() -> None:
        nonlocal done
        while time.perf_counter() < stop_at:
            await action()
            done += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(OUTSTANDING):
            tasks.start_soon(repeat)
    return done / (time.perf_counter() - started)


def spread(values: list[float]) -> list[float]:
    """Return the least and the greatest value."""
    return [round(min(values), 3), round(max(values), 3)]


def say(text: str) -> None:
    """Tell progress on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def report(result: dict[str, object]) -> None:
    """Print the result for a person."""
    for name, value in result.items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()

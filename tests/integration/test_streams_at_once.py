"""Many streams through two gateway processes: none lost, doubled or reordered, memory flat, and leaving stops them."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.leftovers import counters_above_zero, endings_by_request
from tests.support.producing import until
from tests.support.ticking import Ticking, read_ticks, ticking
from tests.support.valkey import ValkeyProcess
from tests.support.wire import Wire

pytestmark = pytest.mark.anyio

MEGABYTE = 1024 * 1024


@dataclass
class Site:
    """A group, two gateways that serve it, and a backend."""

    url: str
    group: str
    gateways: list[GatewayProcess]
    backend: Ticking

    def ports(self) -> list[int]:
        return [int(gateway.url.rpartition(":")[2]) for gateway in self.gateways]

    def memory(self) -> list[int]:
        """Resident bytes of each gateway."""
        return [
            int(Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[1]) * 4096 for gateway in self.gateways
        ]


@asynccontextmanager
async def site(valkey: ValkeyProcess, chunks: int, every_s: float, *, slots: int = 512) -> AsyncIterator[Site]:
    async with AsyncExitStack() as exits:
        backend = await exits.enter_async_context(ticking(chunks, every_s))
        group = unique_group()
        configure(valkey.url, group, default_document(backend.url) | {"total_concurrent_dispatch": 2 * slots})
        gateways = [await exits.enter_async_context(GatewayProcess(valkey.url, group, slots=slots)) for _ in range(2)]
        yield Site(valkey.url, group, gateways, backend)


def call(name: str) -> bytes:
    return json.dumps({"model": "m", "messages": [], "stream": True, "user": name}).encode()


@dataclass
class Heard:
    """What all clients of a run have heard."""

    delays: list[float] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)

    async def listen(self, port: int, name: str) -> None:
        """Read one stream to its end."""
        numbers = self.texts[name] = []
        async with Wire(port) as wire:
            await wire.post(call(name))
            assert await wire.head() == 200
            read = 0
            while not wire.complete or read < len(wire.body):
                end = wire.body.rfind(b"\n\n")
                whole = end + 2 if end >= 0 else 0
                if whole > read:
                    now = time.monotonic()
                    for number, written in read_ticks(bytes(wire.body[read:whole])):
                        numbers.append(number)
                        self.delays.append(now - written)
                    read = whole
                elif not wire.complete:
                    await wire.more()
            assert wire.body.endswith(b"data: [DONE]\n\n")

    def percentile(self, part: int) -> float:
        """Return a percentile of the delays in milliseconds."""
        return statistics.quantiles(self.delays, n=100)[part - 1] * 1000


async def listened(ports: list[int], names: list[str]) -> Heard:
    heard = Heard()
    async with anyio.create_task_group() as tasks:
        for at, name in enumerate(names):
            tasks.start_soon(heard.listen, ports[at % len(ports)], name)
    return heard


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("streams", "chunks", "every_s"), [(40, 50, 0.05), pytest.param(500, 200, 0.25, marks=pytest.mark.long)]
)
async def test_streams_at_once_lose_double_and_reorder_nothing(
    valkey: ValkeyProcess, record_property: pytest.Recorder, streams: int, chunks: int, every_s: float
) -> None:
    async with site(valkey, chunks, every_s) as on:
        await listened(on.ports(), ["warm", "up"])
        memory: list[list[int]] = []

        async def watch() -> None:
            while True:
                memory.append(on.memory())
                await anyio.sleep(chunks * every_s / 10)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            heard = await listened(on.ports(), [str(number) for number in range(streams)])
            tasks.cancel_scope.cancel()
        direct = await listened([on.backend.port], [f"direct {number}" for number in range(min(streams, 100))])
        assert all(numbers == list(range(chunks)) for numbers in heard.texts.values())
        assert len(heard.delays) == streams * chunks
        middle, last = memory[len(memory) // 2], memory[-1]
        grown = [after - before for before, after in zip(middle, last, strict=True)]
        assert max(grown) < 24 * MEGABYTE
        figures = {
            "p50_ms": heard.percentile(50), "p99_ms": heard.percentile(99), "direct_p50_ms": direct.percentile(50),
            "direct_p99_ms": direct.percentile(99), "rss_mb": [round(each / MEGABYTE) for each in last],
            "grown_mb": [round(each / MEGABYTE, 1) for each in grown],
        }  # fmt: skip
        record_property("added delay per chunk", figures)
        print(f"\n{streams} streams of {chunks} chunks, one every {every_s * 1000:.0f} ms: {figures}")  # noqa: T201 - the report
        assert figures["p99_ms"] < 10_000
        await until(lambda: counters_above_zero(on.url, on.group) == {})
        assert set(endings_by_request(on.url, on.group).values()) == {1}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("clients", [60, pytest.param(200, marks=pytest.mark.long)])
async def test_clients_that_leave_at_random_points_stop_their_streams(
    valkey: ValkeyProcess, record_property: pytest.Recorder, clients: int
) -> None:
    """Some in the queue, some before the head, some in the middle: two gateways have room for half of them."""
    chance = random.Random(11)
    left: dict[str, float] = {}
    slots = clients // 4

    async def come_and_leave(port: int, name: str) -> None:
        async with Wire(port) as wire:
            await wire.post(call(name))
            with anyio.move_on_after(chance.uniform(0.05, 4)):
                await wire.head()
                await wire.rest()
            left[name] = time.monotonic()
            if chance.random() < 0.5:
                await wire.reset()

    async with site(valkey, 5_000, 0.02, slots=slots) as on:
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(come_and_leave, on.ports()[number % 2], str(number))
        await until(lambda: counters_above_zero(on.url, on.group) == {})
        await until(lambda: on.backend.begun.keys() == on.backend.ended.keys())
        took = sorted(ended - left[name] for name, ended in on.backend.ended.items())
        assert took, "nothing reached the backend"
        record_property("seconds until the backend saw it", {"median": statistics.median(took), "most": took[-1]})
        print(f"\n{len(took)} of {clients} reached the backend; stopped after {took[-1]:.3f} s at most")  # noqa: T201 - the report
        assert statistics.median(took) < 1
        assert took[-1] < 5  # 1 s where the machine is not busy
        assert set(endings_by_request(on.url, on.group).values()) == {1}
        # All slots are free: as many as there are begin at once.
        on.backend.chunks = 1
        heard = await listened(on.ports(), [f"again {number}" for number in range(2 * slots)])
        assert len(heard.texts) == 2 * slots

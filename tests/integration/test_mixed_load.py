"""Bodies of very different sizes from several producers through several gateways: one reply each, and nothing stays."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass

import anyio
import httpx
import msgspec
import pytest

from dispatch.backend.simulated import SimulatorOptions, running_simulator
from dispatch.contract import Operation, Reply, read_call
from dispatch.producer.client import DispatchClient
from dispatch.producer.options import CallOptions
from tests.support.gateway_process import GatewayProcess
from tests.support.leftovers import counters_above_zero, endings_by_request, keys_without_expiry
from tests.support.producing import frames_left, until, wide_group
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

REQUESTS, PRODUCERS, AT_ONCE = 2_000, 4, 24
POOLS = ("interactive", "document-extract", "backfill", "default")
# Smallest and largest body, and how many of a hundred are of that kind. On both sides of what travels inside a call
# (4 KiB) and of what fits a reply's frame (64 KiB).
SIZES = ((1_000, 4_000, 50), (4_000, 70_000, 38), (70_000, 1_000_000, 10), (1_000_000, 6_000_000, 2))
# What parsers like to change: numbers, escapes, characters that some take for line ends.
ODD = '"seed":123456789012345678901234567890,"top_p":0.10000000000000001,"x":{"k":[1e400,null]},"y":"\u2028\\u00e9漢🙂"'


@dataclass(frozen=True)
class Sample:
    """A request to be made, and the text its reply must hold."""

    request_id: str
    body: bytes
    text: str


def sample(number: int) -> Sample:
    """Make request `number`, the same in every run. Every fifth gets its whole prompt back, the rest a digest."""
    chance = random.Random(number)
    low, high, _ = chance.choices(SIZES, [share for *_, share in SIZES])[0]
    size = 6_000_000 if number == 0 else chance.randint(low, high)
    whole = number % 5 == 1
    messages = json.dumps([{"role": "user", "content": chance.randbytes(size // 2).hex()}])
    simulate = json.dumps({"id": f"load-{number}", "echo": "prompt" if whole else "sha256"})
    body = f'{{"model":"m",{ODD},"messages":{messages},"simulate":{simulate}}}'.encode()
    return Sample(f"load-{number}", body, messages if whole else hashlib.sha256(body).hexdigest())


async def produce(url: str, group: str, producer: str, numbers: range, replies: dict[str, list[Reply]]) -> None:
    """Make these requests from one client, and hold each reply against what was asked for."""
    room = anyio.CapacityLimiter(AT_ONCE)

    async def make(client: DispatchClient, number: int) -> None:
        async with room:
            wanted = sample(number)
            options = CallOptions(pool_id=POOLS[number % len(POOLS)], request_id=wanted.request_id)
            reply = await client.call(read_call(Operation.CHAT_COMPLETIONS, wanted.body), options)
        assert reply.succeeded, reply.error
        text = json.loads(reply.body)["choices"][0]["message"]["content"]
        assert text == wanted.text, f"{wanted.request_id} ({len(wanted.body)} bytes) was changed on its way"
        replies[wanted.request_id].append(msgspec.structs.replace(reply, body=b""))

    async with (
        DispatchClient(url, fabric_group=group, producer_id=producer) as client,
        anyio.create_task_group() as tasks,
    ):
        for number in numbers:
            tasks.start_soon(make, client, number)


async def test_two_thousand_requests_of_mixed_sizes_get_one_reply_each_and_leave_nothing(valkey: ValkeyProcess) -> None:
    replies: dict[str, list[Reply]] = defaultdict(list)
    producers = [f"producer-{number}" for number in range(PRODUCERS)]
    async with running_simulator(SimulatorOptions.fast()) as backend, httpx.AsyncClient() as http:
        group = wide_group(valkey.url, endpoints=[{"endpoint_id": "default", "url": backend}])
        async with (
            GatewayProcess(valkey.url, group, gateway_id="first", slots=32),
            GatewayProcess(valkey.url, group, gateway_id="second", slots=32),
        ):
            async with anyio.create_task_group() as tasks:
                for number, name in enumerate(producers):
                    tasks.start_soon(produce, valkey.url, group, name, range(number, REQUESTS, PRODUCERS), replies)
            await until(lambda: not counters_above_zero(valkey.url, group))
        stats = (await http.get(f"{backend.removesuffix('/v1')}/control/stats")).json()

    once = Counter(f"load-{number}" for number in range(REQUESTS))
    assert Counter({name: len(found) for name, found in replies.items()}) == once
    assert endings_by_request(valkey.url, group) == once
    assert Counter(stats["requests"]) == once
    assert {reply.head.gateway_id for [reply] in replies.values()} == {"first", "second"}
    assert counters_above_zero(valkey.url, group) == {}
    assert keys_without_expiry(valkey.url, group) == []
    assert [name for name in producers if frames_left(valkey.url, group, name)] == []

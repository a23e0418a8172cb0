"""A slot comes back whatever becomes of its request, at once, and is never left idle beside work that could use it."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from dispatch.errors import RequestEnded
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from dispatch.producer.queued import QueuedPath
from tests.behaviours.scene import PATIENT, SHORT_HOLD, Watching, assert_settled, endings, gateway_on, section
from tests.support.calls import COMPLETION
from tests.support.producing import MESSAGES, eye, said, say, until, wide_group
from tests.support.stub import (
    Fin,
    Hold,
    Reset,
    Script,
    SeenRequest,
    StubBackend,
    Write,
    answer_bytes,
    free_port,
    json_answer,
)
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

GOOD = json_answer(COMPLETION)
OVERSIZED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99999999\r\n\r\n{"
SCRIPTS = {
    "good": GOOD,
    "a 500": json_answer(b'{"error":{"message":"no"}}', status="500 Internal Server Error"),
    "a 503": json_answer(b"{}", status="503 Service Unavailable"),
    "a 400": json_answer(b'{"error":{"message":"no"}}', status="400 Bad Request"),
    "garbage": Script((Write(b"\x00\x01\x02\r\n\r\n"), Fin())),
    "no json": json_answer(b"<html>"),
    "oversized": Script((Write(OVERSIZED), Hold())),
    "cut": Script((Write(answer_bytes(COMPLETION)[:-9]), Fin())),
    "reset": Script((Reset(),)),
    "silence": Script((Hold(),)),
    "a trickle": Script((Write(answer_bytes(COMPLETION)[:60]), Hold())),
}


@dataclass
class Scene:
    url: str
    group: str
    stub: StubBackend
    client: DispatchClient


@asynccontextmanager
async def one_slot(url: str, **pool: Any) -> AsyncIterator[Scene]:
    """A pool with a single slot, a gateway, and a stub that answers as the call's text says."""
    async with StubBackend(lambda request: SCRIPTS[said(request.body)]) as stub:
        pools = [{"pool_id": "default", "max_concurrent": 1} | pool]
        endpoints = [{"endpoint_id": "default", "url": f"{stub.url}/v1"} | PATIENT]
        group = wide_group(url, pools=pools, endpoints=endpoints, **SHORT_HOLD)
        async with gateway_on(url, group), DispatchClient(url, fabric_group=group) as client:
            yield Scene(url, group, stub, client)


async def test_a_5xx_a_timeout_an_oversized_answer_and_a_lost_reply_leave_no_slot_taken(valkey: ValkeyProcess) -> None:
    async with one_slot(valkey.url) as scene:
        for text in (name for name in SCRIPTS if name != "good"):
            timeout = 0.3 if text in ("silence", "a trickle") else 20
            with pytest.raises(RequestEnded) as ended:
                await scene.client.complete(model="m", messages=say(text), timeout=timeout)
            assert ended.value.reply.ending == ("expired" if timeout < 1 else "failed"), text
            with anyio.fail_after(3):  # the only slot is free again
                assert (await scene.client.complete(model="m", messages=say("good"), timeout=20)).succeeded
        await until(lambda: len(endings(scene.url, scene.group)) == 2 * len(SCRIPTS) - 2)
        assert_settled(scene.url, scene.group)
        assert scene.stub.open_connections <= 1


async def test_a_reply_that_nobody_can_take_leaves_no_slot_taken(valkey: ValkeyProcess) -> None:
    group, executor = wide_group(valkey.url, pools=[{"pool_id": "default", "max_concurrent": 1}]), Watching()
    async with (
        gateway_on(valkey.url, group, executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
        DispatchClient(valkey.url, fabric_group=group, producer_id="gone", close_ms=100) as gone,
    ):
        call = asyncio.create_task(gone.complete(model="m", messages=MESSAGES, request_id="r-1"))
        await executor.until_begun(1)
        assert isinstance(gone._path, QueuedPath)
        gone._path._liveness.stop()  # as if its process had been killed
        with eye(valkey.url) as look:
            look.delete(key(group, "alive", producer="gone"))
        executor.release("r-1")
        await until(lambda: endings(valkey.url, group) == {"r-1": "reply_dropped"})
        executor.release()
        assert (await client.complete(model="m", messages=MESSAGES)).succeeded
        call.cancel()
    assert_settled(valkey.url, group)


async def test_an_endpoint_that_is_not_there_leaves_no_slot_taken(valkey: ValkeyProcess) -> None:
    address = {"endpoint_id": "default", "url": f"http://127.0.0.1:{free_port()}/v1"} | PATIENT
    pools = [{"pool_id": "default", "max_concurrent": 1}]
    group = wide_group(valkey.url, pools=pools, endpoints=[address])
    async with gateway_on(valkey.url, group), DispatchClient(valkey.url, fabric_group=group) as client:
        calls = (client.complete(model="m", messages=MESSAGES, timeout=20) for _ in range(10))
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {one.reply.ending for one in ended if isinstance(one, RequestEnded)} == {"failed"}
    assert len(ended) == 10
    assert_settled(valkey.url, group)


async def test_one_slow_call_holds_neither_the_replies_of_others_nor_their_slots(valkey: ValkeyProcess) -> None:
    def answer(request: SeenRequest) -> Script:
        return SCRIPTS["silence"] if said(request.body) == "slow" else GOOD

    async with StubBackend(answer) as stub:
        group = wide_group(
            valkey.url, total_concurrent_dispatch=3, endpoints=[{"endpoint_id": "default", "url": f"{stub.url}/v1"}]
        )
        async with gateway_on(valkey.url, group, slots=3), DispatchClient(valkey.url, fabric_group=group) as client:
            slow = asyncio.create_task(client.complete(model="m", messages=say("slow"), timeout=60))
            await stub.until(lambda seen: len(seen.requests) == 1)
            with anyio.fail_after(10):
                calls = (client.complete(model="m", messages=say("fast"), timeout=20) for _ in range(40))
                assert all(reply.succeeded for reply in await asyncio.gather(*calls))
            assert not slow.done()
            assert section(valkey.url, group, "group")["in_flight"] == 1
            slow.cancel()
        assert_settled(valkey.url, group)


@pytest.mark.parametrize("cost", [1, 16])
async def test_a_lone_request_starts_at_once_whatever_it_costs(valkey: ValkeyProcess, cost: int) -> None:
    async with one_slot(valkey.url) as scene:
        await scene.client.complete(model="m", messages=say("good"))
        waits = []
        for _ in range(15):
            reply = await scene.client.complete(model="m", messages=say("good"), cost=cost)
            waits.append(reply.queue_ms or 0)
            await anyio.sleep(0.01)  # so that everybody sleeps
        assert statistics.median(waits) < 50, waits


async def test_no_slot_stands_idle_while_expensive_heads_gather_credit(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "a"}, {"pool_id": "b"}, {"pool_id": "c", "quantum": 3}]
    group, executor = wide_group(valkey.url, pools=pools, total_concurrent_dispatch=4), Watching()
    async with gateway_on(valkey.url, group, executor), DispatchClient(valkey.url, fabric_group=group) as client:
        calls = [
            asyncio.create_task(client.complete(model="m", messages=MESSAGES, pool=pool, cost=cost, timeout=30))
            for pool, cost in (("a", 16), ("b", 16), ("c", 9))
            for _ in range(10)
        ]
        for begun in range(4, 31):  # each slot that ends is taken again at once, until nothing waits
            await executor.until_begun(begun, seconds=3)
            executor.release(next(name for name in executor.begun if name not in executor.ended))
            await anyio.lowlevel.checkpoint()
        executor.release()
        await asyncio.gather(*calls)
    assert executor.peak["group"] == 4
    assert_settled(valkey.url, group)


async def test_a_slot_that_another_pool_frees_is_taken_though_nobody_submits(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "a", "max_concurrent": 1}, {"pool_id": "b"}]
    group, executor = wide_group(valkey.url, pools=pools, total_concurrent_dispatch=1), Watching()
    async with (
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        first = asyncio.create_task(client.complete(model="m", messages=MESSAGES, pool="a", request_id="a"))
        await executor.until_begun(1)
        second = asyncio.create_task(client.complete(model="m", messages=MESSAGES, pool="b", request_id="b"))
        await until(lambda: section(valkey.url, group, "group")["pending"] == 1)
        executor.release("a")
        await executor.until_begun(2, seconds=2)  # far below the 5 s after which a sleeping gateway looks by itself
        executor.release()
        await asyncio.gather(first, second)


async def test_a_running_call_that_is_cancelled_frees_slot_and_connection_at_once(valkey: ValkeyProcess) -> None:
    async with one_slot(valkey.url) as scene:
        call = asyncio.create_task(
            scene.client.complete(model="m", messages=say("silence"), request_id="r", timeout=60)
        )
        await scene.stub.until(lambda seen: len(seen.requests) == 1)
        call.cancel()
        with anyio.fail_after(3):
            await scene.stub.requests[0].connection.closed.wait()
            assert (await scene.client.complete(model="m", messages=say("good"), timeout=20)).succeeded
        assert endings(scene.url, scene.group)["r"] == "cancelled"

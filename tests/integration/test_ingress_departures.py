"""Clients that leave: exactly when they have their answer, with half of the connection, or at any moment at all."""

from __future__ import annotations

import gc
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from tests.support.calls import COMPLETION
from tests.support.front import exchange, head
from tests.support.leftovers import counters_above_zero, endings_by_request
from tests.support.producing import say, stopwatch, until
from tests.support.proxy import TcpProxy
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Pause, Script, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

OK = json_answer(COMPLETION)
BODIES = {
    b"/v1/chat/completions": {"model": "m", "messages": say("hi")},
    b"/v1/completions": {"model": "m", "prompt": "hi"},
    b"/v1/embeddings": {"model": "m", "input": "hi"},
    b"/v1/responses": {"model": "m", "input": "hi"},
}
CHAT = b"/v1/chat/completions"
HEARTBEAT_S = 10.0
"""A third of the default lease."""


def post(path: bytes, *lines: bytes) -> bytes:
    body = json.dumps(BODIES[path]).encode()
    return head([b"POST " + path + b" HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *lines]) + body


async def read_and_leave(port: int, *, reset: bool) -> None:
    """Close in the moment in which the last byte of the answer was read."""
    stream = await anyio.connect_tcp("127.0.0.1", port)
    await stream.send(post(CHAT))
    heard = b""
    while not heard.endswith(COMPLETION):
        heard += await stream.receive()
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    if reset:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await anyio.aclose_forcefully(stream)
    assert heard.startswith(b"HTTP/1.1 200")


async def test_a_client_that_leaves_with_its_answer_was_served(valkey: ValkeyProcess) -> None:
    count = 500
    async with StubBackend(lambda _: OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        for start in range(0, count, 20):
            async with anyio.create_task_group() as tasks:
                for number in range(start, start + 20):
                    tasks.start_soon(lambda reset=bool(number % 2): read_and_leave(path.port, reset=reset))
        await until(lambda: counters_above_zero(valkey.url, path.group) == {})
        [row] = [row for row in path.section("pools")["rows"] if row["pool_id"] == "default"]
        assert {name: number for name, number in row["endings"].items() if number} == {"succeeded": count}
        assert len(stub.requests) == count
        assert set(endings_by_request(valkey.url, path.group).values()) == {1}


@pytest.mark.parametrize("path_name", BODIES)
async def test_a_half_closed_client_counts_as_gone_for_every_operation(valkey: ValkeyProcess, path_name: bytes) -> None:
    """It gets no answer, its request is cancelled wherever it is, and the slot is free at once."""
    pools = [{"pool_id": "default", "quantum": 1, "max_concurrent": 1}]
    async with StubBackend(Script((Hold(),))) as stub, stack(valkey.url, f"{stub.url}/v1", pools=pools) as path:
        stream = await anyio.connect_tcp("127.0.0.1", path.port)
        async with stream:
            await stream.send(post(path_name))
            await stub.until(lambda stub: len(stub.requests) == 1)
            await stream.send_eof()
            with anyio.fail_after(5), pytest.raises(anyio.EndOfStream):
                await stream.receive()
        await until(lambda: [row["ending"] for row in path.endings()] == ["cancelled"])
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()
        await until(lambda: path.leases() == 0)
        at_once = await exchange(path.port, post(path_name), half_close=True, then_wait=5)
        assert at_once.status is None  # FIN together with the request
        await until(lambda: counters_above_zero(valkey.url, path.group) == {})
        assert {row["ending"] for row in path.endings()} == {"cancelled"}


async def test_a_half_closed_client_with_a_key_comes_back_for_its_reply(valkey: ValkeyProcess) -> None:
    async with StubBackend(Script((Pause(0.4), *OK.steps))) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        key = b"idempotency-key: k"
        stream = await anyio.connect_tcp("127.0.0.1", path.port)
        async with stream:
            await stream.send(post(CHAT, key))
            await stub.until(lambda stub: len(stub.requests) == 1)
            await stream.send_eof()
            with anyio.fail_after(5), pytest.raises(anyio.EndOfStream):
                await stream.receive()
        await until(lambda: [row["ending"] for row in path.endings()] == ["succeeded"])
        again = await exchange(path.port, post(CHAT, key))
        assert (again.status, again.body, again.header(b"x-dispatch-replayed")) == (200, COMPLETION, b"true")


@asynccontextmanager
async def far_from_valkey(valkey: ValkeyProcess, stub: StubBackend) -> AsyncIterator[tuple[Stack, TcpProxy]]:
    """Start a stack whose every word to Valkey and back takes 100 ms longer."""
    pools = [{"pool_id": "default", "quantum": 1, "max_concurrent": 3}]
    async with TcpProxy(valkey.port) as proxy:
        far = f"valkey://127.0.0.1:{proxy.port}"
        async with stack(valkey.url, f"{stub.url}/v1", through=far, pools=pools) as path:
            proxy.delay_s = 0.1
            yield path, proxy
            proxy.delay_s = 0.0


@pytest.mark.parametrize("count", [150, pytest.param(3_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_clients_that_leave_at_any_moment_leave_no_slot_taken(
    valkey: ValkeyProcess, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """From before the head to after the end, with a slow Valkey: what ends a request must not be ended itself."""
    chance = random.Random(25)
    together = anyio.CapacityLimiter(50)

    async def come_and_leave(port: int) -> None:
        whole = post(CHAT)
        async with together:
            stream = await anyio.connect_tcp("127.0.0.1", port)
            async with stream:
                await stream.send(whole[: chance.randrange(len(whole))] if chance.random() < 0.2 else whole)
                with anyio.move_on_after(chance.uniform(0, 3)):
                    while True:
                        await stream.receive()

    async with StubBackend(Script((Pause(0.02), *OK.steps))) as stub, far_from_valkey(valkey, stub) as (path, proxy):
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(come_and_leave, path.port)
        quiet = stopwatch()
        # Leases last three times as long: what is back by then was given back, and did not run out.
        await until(lambda: counters_above_zero(valkey.url, path.group) == {}, within_s=HEARTBEAT_S)
        assert quiet() < HEARTBEAT_S
        proxy.delay_s = 0.0
        passed = stopwatch()
        assert (await exchange(path.port, post(CHAT))).status == 200
        assert passed() < 1
        ends = {row["ending"] for row in path.section("endings", limit=200)["rows"]}
        assert ends == {"succeeded", "cancelled"}
        assert set(endings_by_request(valkey.url, path.group).values()) == {1}
        assert path.keys("body:") == []
        await until(lambda: stub.open_connections <= 3)
    gc.collect()
    said = [record.getMessage() for record in caplog.records]
    assert not [line for line in said if "never retrieved" in line or "was destroyed but" in line]

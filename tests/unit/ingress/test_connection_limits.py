"""Connections are bounded in number, and one that is slow or silent costs nothing but itself."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import pytest

from dispatch.ingress import IngressSettings, IngressState, create_app
from dispatch.ingress import protocol as protocol_module
from dispatch.ingress.connections import ConnectionLimits, Door
from dispatch.ingress.protocol import HttpProtocol
from tests.support.front import OK_BODY, FakeClient, FakeGateway, Heard, answering, exchange, head, reply, serving
from tests.support.producing import until

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m","messages":[]}'
HEALTH = head([b"GET /healthz HTTP/1.1", b"host: x"])
CALL = head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"content-length: %d" % len(BODY)]) + BODY


@asynccontextmanager
async def limited(client: FakeClient, **limits: Any) -> AsyncIterator[tuple[int, Door]]:
    """Serve within these limits; yields the port and the door."""
    protocol = HttpProtocol.within(ConnectionLimits(**limits))
    settings = IngressSettings(body_idle_s=0.5, body_total_s=1.0, drain_max_s=1.0)
    app = create_app(IngressState(client=client, gateway=FakeGateway(), settings=settings))
    async with serving(app, protocol) as port:
        yield port, protocol.door


async def connect(port: int, address: str = "127.0.0.1") -> anyio.abc.SocketStream:
    return await anyio.connect_tcp("127.0.0.1", port, local_host=address)


async def ask(port: int, address: str = "127.0.0.1") -> int | None:
    """Return the status of a health request over a new connection."""
    async with await connect(port, address) as stream:
        await stream.send(HEALTH)
        try:
            return int((await stream.receive()).split(b" ")[1])
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return None


def told_busy(heard: Heard) -> str:
    assert heard.status == 503
    assert heard.header(b"x-dispatch-reason") == b"rejected-too_many_connections"
    assert (heard.header(b"x-should-retry"), heard.header(b"connection")) == (b"true", b"close")
    error = json.loads(heard.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def test_a_process_holds_so_many_connections_and_tells_the_next_one(client: FakeClient) -> None:
    async with limited(client, connections=3) as (port, door), AsyncExitStack() as stack:
        held = [await stack.enter_async_context(await connect(port)) for _ in range(3)]
        await until(lambda: door.inside == 3)
        assert "3 connections" in told_busy(await exchange(port, CALL))
        await held[0].send(HEALTH)  # those inside are served as before
        assert (await held[0].receive()).startswith(b"HTTP/1.1 200")
        await held[1].aclose()
        await until(lambda: door.inside == 2)
        assert await ask(port) == 200
        assert not client.calls


async def test_one_address_cannot_take_the_room_of_all(client: FakeClient) -> None:
    async with limited(client, per_address=2) as (port, door), AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(await connect(port, "127.0.0.2"))
        await until(lambda: door.inside == 2)
        assert await ask(port, "127.0.0.2") == 503
        assert await ask(port, "127.0.0.3") == 200


async def test_a_trusted_proxy_is_not_one_client(client: FakeClient) -> None:
    networks = (ipaddress.ip_network("127.0.0.2/31"),)
    async with limited(client, per_address=1, trusted=networks) as (port, door), AsyncExitStack() as stack:
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            await stack.enter_async_context(await connect(port, address))
        await until(lambda: door.inside == 3)
        assert [await ask(port, address) for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4")] == [200, 200, 503]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_addresses_of_one_host_count_together(one: str, other: str, same: bool) -> None:
    door = Door(ConnectionLimits(per_address=1))
    assert door.enter(one) is None
    assert (door.enter(other) is not None) is same
    door.leave(one)
    assert door.enter(one) is None


async def test_those_beyond_the_bound_are_few_and_leave_soon(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_module, "TURNED_AWAY_MAX", 2)
    monkeypatch.setattr(protocol_module, "_LINGER_S", 0.5)
    async with limited(client, connections=1) as (port, door), AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await connect(port)) for _ in range(6)]
        with anyio.fail_after(5):  # nobody said anything, and all but the first are let go
            for stream in streams[1:]:
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await stream.receive()
        await until(lambda: door.turned_away == 0)
        assert door.inside == 1


@pytest.mark.parametrize("start", [b"", b"GET /heal", CALL[:-5]], ids=["silent", "half a head", "half a body"])
async def test_slow_clients_cost_nothing_but_their_own_connections(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(HttpProtocol, "head_s", 1.0)
    async with limited(client) as (port, door), AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(await connect(port)) for _ in range(200)]
        for stream in streams:
            await stream.send(start)
        before = time.monotonic()
        assert await ask(port) == 200
        assert time.monotonic() - before < 2
        with anyio.fail_after(20):
            for stream in streams:
                assert (await stream.receive()).startswith(b"HTTP/1.1 408 ")
        await until(lambda: door.inside == 0, within_s=20)
        assert not client.calls


async def test_a_client_that_reads_nothing_is_let_go(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "unread_s", 0.5)
    client.behave = answering(reply(body=b"x" * 32_000_000))
    async with limited(client) as (port, door):
        for asked in (CALL, CALL.replace(b"host: x", b"connection: close"), CALL * 2):
            with socket.socket() as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                raw.setblocking(False)
                await anyio.to_thread.run_sync(raw.connect_ex, ("127.0.0.1", port))
                await until(lambda: door.inside == 1)
                await anyio.wait_writable(raw)
                raw.send(asked)
                await until(lambda: door.inside == 0, within_s=20)
        assert await ask(port) == 200


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpProtocol, "unread_s", 0.5)
    client.behave = answering(reply(body=b"x" * 12_000_000))
    async with limited(client) as (port, _), await connect(port) as stream:
        await stream.send(CALL)
        heard = 0
        started = time.monotonic()
        while heard < 12_000_000:
            heard += len(await stream.receive(500_000))
            await anyio.sleep(0.05)
        assert time.monotonic() - started > 1


async def test_connections_that_come_and_go_are_counted_right(client: FakeClient) -> None:
    async with limited(client, connections=50) as (port, door):

        async def come_and_go(number: int) -> None:
            async with await connect(port) as stream:
                if number % 3 == 0:
                    return
                await stream.send(CALL if number % 3 == 1 else b"garbage\r\n\r\n")
                if number % 2 == 0:
                    assert await stream.receive()

        for _ in range(4):
            async with anyio.create_task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(come_and_go, number)
        await until(lambda: door.inside == 0)
        assert door.turned_away == 0
        heard = await exchange(port, CALL)
        assert (heard.status, heard.body) == (200, OK_BODY)

"""The proxy of the chaos harness does to connections what the schedule says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.support.proxy import TcpProxy
from tests.support.valkey import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1000):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def say(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, text: bytes) -> bytes:
    writer.write(text)
    async with asyncio.timeout(5):
        return await reader.read(1000)


async def connect_and_wait(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(5):
            await reader.read()
    finally:
        writer.close()


async def test_it_passes_on_what_is_said_and_a_polite_end(echo_port: int) -> None:
    async with TcpProxy(echo_port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await say(writer, reader, b"a") == b"a"
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_a_cut_resets_what_is_open_and_new_connections_work(echo_port: int) -> None:
    async with TcpProxy(echo_port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await say(writer, reader, b"a") == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await say(writer, reader, b"b") == b"b"
        writer.close()


async def test_frozen_it_lets_nothing_pass_and_loses_nothing(echo_port: int) -> None:
    async with TcpProxy(echo_port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await say(writer, reader, b"a") == b"a"
        proxy.freeze()
        late_reader, late_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        waiting = asyncio.gather(say(writer, reader, b"b"), say(late_writer, late_reader, b"c"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        proxy.thaw()
        assert list(await waiting) == [b"b", b"c"]
        proxy.freeze()
        proxy.cut()  # a frozen connection can be cut, too
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        late_writer.close()


async def test_refusing_it_resets_everything_until_it_allows_again(echo_port: int) -> None:
    async with TcpProxy(echo_port) as proxy:
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            await connect_and_wait(proxy.port)
        proxy.allow()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await say(writer, reader, b"b") == b"b"
        writer.close()


async def test_a_delay_slows_every_answer_down(echo_port: int) -> None:
    async with TcpProxy(echo_port) as proxy:
        proxy.delay_s = 0.1
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await say(writer, reader, b"a") == b"a"
        assert loop.time() - started >= 0.2
        writer.close()


async def test_a_server_that_is_not_there_is_told_by_a_reset() -> None:
    async with TcpProxy(free_port()) as proxy:
        with pytest.raises(ConnectionResetError):
            await connect_and_wait(proxy.port)

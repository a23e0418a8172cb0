"""A TCP proxy that misbehaves on purpose: it cuts, freezes, refuses and slows down what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Self, cast

_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Listens on an ephemeral port of 127.0.0.1 while its context is open and passes on to `port` of 127.0.0.1.

    The faults may be set from any thread; they act on the event loop in which the context was entered. `delay_s` slows
    both directions, a chunk at a time. A server that is not there is told as it would be without a proxy: by a reset.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        self._target = port
        self._pairs: set[_Pair] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._pairs)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._server.close()
        self._cut()
        self._flowing.set()
        while self._pairs:
            await asyncio.gather(*(pair.done.wait() for pair in tuple(self._pairs)))

    def cut(self) -> None:
        """Reset every connection, on both sides."""
        self._loop.call_soon_threadsafe(self._cut)

    def freeze(self) -> None:
        """Let nothing pass until `thaw`; connections stay open, new ones are accepted and stay silent."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def thaw(self) -> None:
        """Go on after `freeze`; nothing was lost."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def refuse(self) -> None:
        """Reset every connection, and each new one until `allow`."""
        self._refusing = True
        self.cut()

    def allow(self) -> None:
        """Take connections again after `refuse`."""
        self._refusing = False

    def _cut(self) -> None:
        for pair in tuple(self._pairs):
            pair.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = _Pair(reader, writer)
        self._pairs.add(pair)
        try:
            if self._refusing:
                return
            await self._flowing.wait()
            if not pair.ended:
                await pair.connect(self._target)
                await self._relay(pair)
        except OSError:
            return
        finally:
            pair.reset()
            self._pairs.discard(pair)
            pair.done.set()

    async def _relay(self, pair: _Pair) -> None:
        async with asyncio.TaskGroup() as tasks:
            for reader, writer in pair.directions():
                tasks.create_task(self._pass_on(pair, reader, writer))

    async def _pass_on(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._flowing.wait()
                if pair.ended:
                    return
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
            if writer.can_write_eof() and not pair.ended:
                writer.write_eof()
            return
        pair.reset()  # one side broke off: so does the other


class _Pair:
    """A connection and the one behind it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended = False
        self.done = asyncio.Event()
        self._front = (reader, writer)
        self._back: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self, port: int) -> None:
        self._back = await asyncio.open_connection("127.0.0.1", port)
        for _, writer in (self._front, self._back):
            _socket_of(writer).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def directions(self) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        assert self._back is not None
        return [(self._front[0], self._back[1]), (self._back[0], self._front[1])]

    def reset(self) -> None:
        """End both sides with RST; repeatable."""
        self.ended = True
        for side in (self._front, self._back):
            if side is not None and not side[1].transport.is_closing():
                with contextlib.suppress(OSError):
                    _socket_of(side[1]).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                side[1].transport.abort()


def _socket_of(writer: asyncio.StreamWriter) -> socket.socket:
    return cast("socket.socket", writer.get_extra_info("socket"))

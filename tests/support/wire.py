"""One HTTP call on a raw connection, whose answer is read as it comes: bytes, and when they came."""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

PIECE = 1 << 16


@dataclass
class Wire:
    """`async with Wire(port) as wire: await wire.post(body); await wire.head(); await wire.rest()`."""

    port: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    """What came of the body, without its HTTP framing."""
    times: list[float] = field(default_factory=list)
    """When something of the body came, on the monotonic clock."""
    complete: bool = False
    """Whether the body came to its end."""
    _raw: bytearray = field(default_factory=bytearray)
    _left: int | None = None

    async def __aenter__(self) -> Self:
        self._stream = await anyio.connect_tcp("127.0.0.1", self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.aclose()

    async def post(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> None:
        """Send a call. Underscores in header names stand for hyphens."""
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self._stream.send("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> int:
        """Read the head; returns the status."""
        while b"\r\n\r\n" not in self._raw:
            self._raw += await self._stream.receive(PIECE)
        head, _, rest = bytes(self._raw).partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._raw = bytearray(rest)
        if "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
        self._unpack()
        return self.status

    async def more(self) -> bytes:
        """Read what comes next; returns the body so far."""
        self._raw += await self._stream.receive(PIECE)
        self._unpack()
        return bytes(self.body)

    async def rest(self) -> bytes:
        """Read the body to its end."""
        while not self.complete:
            await self.more()
        return bytes(self.body)

    async def until(self, wanted: bytes) -> bytes:
        """Read until `wanted` has come; returns the body so far."""
        while wanted not in self.body:
            await self.more()
        return bytes(self.body)

    async def reset(self) -> None:
        """End with RST."""
        raw: socket.socket = self._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self._stream.aclose()

    def error(self) -> dict[str, Any]:
        """Return the OpenAI error that is the body."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def _unpack(self) -> None:
        before = len(self.body)
        if self._left is not None:
            self.body += self._raw
            self._raw.clear()
            self.complete = len(self.body) >= self._left
        else:
            while not self.complete and (end := self._raw.find(b"\r\n")) >= 0:
                size = int(self._raw[:end], 16)
                if len(self._raw) < end + size + 4:
                    break
                self.body += self._raw[end + 2 : end + 2 + size]
                del self._raw[: end + size + 4]
                self.complete = size == 0
        if len(self.body) > before:
            self.times.append(time.monotonic())

"""A backend that streams numbered chunks at an even pace, each with the time at which it was written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.streams import CHUNKED, DONE, END, data, framed


@dataclass
class Ticking:
    """What a ticking backend does and has seen. Calls are told apart by the member `user` of their body."""

    chunks: int
    every_s: float
    port: int = 0
    begun: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    """When each call was over: written to its end, or its connection closed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:")
                name = json.loads(await reader.readexactly(length))["user"]
                self.begun[name] = time.monotonic()
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await self._stream(writer, gone)
                finally:
                    self.ended[name] = time.monotonic()
                    gone.cancel()
                    await asyncio.wait([gone])
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, gone: asyncio.Future[bytes]) -> None:
        writer.write(CHUNKED)
        due = time.monotonic()
        for number in range(self.chunks):
            due += self.every_s
            done, _ = await asyncio.wait([gone], timeout=max(0.0, due - time.monotonic()))
            if done:
                raise ConnectionError
            writer.write(framed(data(ticked(number, None if number < self.chunks - 1 else "stop"))))
        writer.write(framed(DONE) + END)


def ticked(number: int, finish_reason: str | None) -> bytes:
    """Return a chunk that says its number and when it was written."""
    choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": finish_reason}
    return json.dumps({"id": "c", "model": "m", "n": number, "t": time.monotonic(), "choices": [choice]}).encode()


def read_ticks(events: bytes) -> Iterator[tuple[int, float]]:
    """Yield number and time of each chunk in whole events."""
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: {"):
            document: dict[str, Any] = json.loads(event[6:])
            yield document["n"], document["t"]


@asynccontextmanager
async def ticking(chunks: int, every_s: float) -> Any:
    """Serve on 127.0.0.1 until left."""
    backend = Ticking(chunks, every_s)
    server = await asyncio.start_server(backend.serve, "127.0.0.1", 0, backlog=1024)
    backend.port = server.sockets[0].getsockname()[1]
    try:
        yield backend
    finally:
        server.close()

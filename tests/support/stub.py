"""A scripted backend over real TCP: plays exact bytes, with pauses and bad endings, and records what came in.

    async with StubBackend(json_answer(b'{"choices":[]}')) as stub:
        ...  # call stub.url
        [request] = stub.requests

What it answers is one `Script` for every request, a list of them (one each, the last repeats), or a function of the
request. A script is a tuple of steps; without a closing step at its end the connection is kept for the next request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, cast

import anyio
import anyio.abc
import anyio.lowlevel

CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"
"""A certificate for 127.0.0.1 that nobody trusts, with its key; valid from 2020 to 2120."""


@dataclass(frozen=True)
class Write:
    """One write of these bytes."""

    data: bytes


@dataclass(frozen=True)
class Pause:
    """Wait; the connection stays open and is watched."""

    seconds: float


@dataclass(frozen=True)
class Hold:
    """Send nothing more until the client closes."""


@dataclass(frozen=True)
class Fin:
    """Close in the ordinary way."""


@dataclass(frozen=True)
class Reset:
    """Close with RST."""


Step = Write | Pause | Hold | Fin | Reset


@dataclass(frozen=True)
class Script:
    """`begin`: when the steps begin, after a whole request, after its head, or when the connection is there.

    `deaf`: read nothing of the connection at all (with `begin="connection"`).
    """

    steps: tuple[Step, ...] = ()
    begin: Literal["request", "head", "connection"] = "request"
    deaf: bool = False


@dataclass(frozen=True)
class SeenRequest:
    """One request as it came in; header names in lower case, values as sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    connection: SeenConnection

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass(eq=False)
class SeenConnection:
    """One connection. Times are `time.monotonic()`; `closed_by` is who ended it first, "" while it is open."""

    opened_at: float = field(default_factory=time.monotonic)
    bytes_in: int = 0
    requests: list[SeenRequest] = field(default_factory=list)
    closed_by: Literal["", "client", "stub"] = ""
    closed_at: float | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)


Answers = Script | Sequence[Script] | Callable[[SeenRequest], Script]


class StubBackend:
    """Listens on an ephemeral port of 127.0.0.1 while its context is open; `secure`: with TLS, see `CERTIFICATE`."""

    def __init__(self, answers: Answers, *, secure: bool = False) -> None:
        self._secure = secure
        self.connections: list[SeenConnection] = []
        self._answers = answers
        self._count = 0
        self._changed = asyncio.Event()
        self._stack = AsyncExitStack()
        self.arrivals: asyncio.Queue[_Wire] = asyncio.Queue()
        self.port = 0

    @property
    def url(self) -> str:
        """Base URL without a path."""
        return f"{'https' if self._secure else 'http'}://127.0.0.1:{self.port}"

    @property
    def requests(self) -> list[SeenRequest]:
        """Every request so far, by connection."""
        return [request for connection in self.connections for request in connection.requests]

    @property
    def open_connections(self) -> int:
        return sum(not connection.closed_by for connection in self.connections)

    async def until(self, holds: Callable[[Self], bool], timeout_s: float = 5.0) -> None:
        """Return when `holds(self)` is true; it is asked again whenever something happens on a connection."""
        with anyio.fail_after(timeout_s):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._serve, tasks)
        loop = asyncio.get_running_loop()
        context = None
        if self._secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
        server = await loop.create_server(lambda: _Wire(self), "127.0.0.1", 0, backlog=1024, ssl=context)
        self._stack.callback(server.close)
        self.port = server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.__aexit__(*exc)  # type: ignore[arg-type]  # passed on as it came

    async def _serve(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            tasks.start_soon((await self.arrivals.get()).run)

    def choose(self, request: SeenRequest | None) -> Script:
        """Return the script for the next request (None: asked for a script that begins with the connection)."""
        if isinstance(self._answers, Script):
            return self._answers
        if callable(self._answers):
            return Script() if request is None else self._answers(request)
        script = self._answers[min(self._count, len(self._answers) - 1)]
        self._count += request is not None or script.begin == "connection"
        return script

    def happened(self) -> None:
        self._changed.set()


class _Wire(asyncio.Protocol):
    """One connection: gathers requests, and a task that plays the scripts."""

    def __init__(self, stub: StubBackend) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self._fed = asyncio.Event()
        self._seen = SeenConnection()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none by name
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stub.connections.append(self._seen)
        self._stub.happened()
        self._stub.arrivals.put_nowait(self)  # a callback is outside of any task, so it can start none of a group

    def data_received(self, data: bytes) -> None:
        self._seen.bytes_in += len(data)
        self._buffer += data
        self._fed.set()
        self._stub.happened()

    def eof_received(self) -> None:
        self._ended("client")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's
        self._ended("client")
        self._seen.closed.set()
        self._fed.set()
        self._stub.happened()

    def _ended(self, who: Literal["client", "stub"]) -> None:
        if not self._seen.closed_by:
            self._seen.closed_by = who
            self._seen.closed_at = time.monotonic()
            self._stub.happened()

    async def run(self) -> None:
        try:
            while not self._seen.closed_by and await self._one():
                pass
        finally:
            if not self._seen.closed.is_set():  # a transport that is through with closing does not bear it
                self._transport.abort()

    async def _one(self) -> bool:
        script = self._stub.choose(None) if self._is_scripted_early() else None
        if script is not None and script.begin == "connection":
            if script.deaf:
                self._transport.pause_reading()
            await self._play(script)
            await self._seen.closed.wait()
            return False
        head = await self._until(lambda: self._buffer.find(b"\r\n\r\n") + 1)
        if not head:
            return False
        request = self._parse(bytes(self._buffer[: head - 1]))
        del self._buffer[: head + 3]
        if (request.header("expect") or "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if script is not None and script.begin == "head":
            self._note(request)
            return await self._play(self._stub.choose(request))
        body = await self._body(request)
        if body is None:
            return False
        request = SeenRequest(request.method, request.target, request.headers, body, self._seen)
        self._note(request)
        return await self._play(self._stub.choose(request))

    def _is_scripted_early(self) -> bool:
        return not callable(self._stub._answers) or isinstance(self._stub._answers, Script)

    def _note(self, request: SeenRequest) -> None:
        self._seen.requests.append(request)
        self._stub.happened()

    def _parse(self, head: bytes) -> SeenRequest:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = [line.partition(":") for line in lines if line]
        headers = tuple((name.strip().lower(), value.strip()) for name, _, value in pairs)
        return SeenRequest(method, target, headers, b"", self._seen)

    async def _body(self, request: SeenRequest) -> bytes | None:
        if (request.header("transfer-encoding") or "").lower() != "chunked":
            return await self._take(int(request.header("content-length") or 0))
        body = bytearray()
        while True:
            end = await self._until(lambda: self._buffer.find(b"\r\n") + 1)
            line = await self._take(end + 1) if end else None
            size = int(line.split(b";")[0], 16) if line else 0
            piece = await self._take(size + 2) if line else None
            if piece is None:
                return None
            if not size:
                return bytes(body)
            body += piece[:-2]

    async def _take(self, count: int) -> bytes | None:
        if count and not await self._until(lambda: len(self._buffer) >= count):
            return None
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def _until(self, found: Callable[[], int]) -> int:
        """Wait until `found()` is not 0 and return it; 0 when the connection ended before."""
        while not (value := found()):
            if self._seen.closed_by:
                return 0
            self._fed.clear()
            await self._fed.wait()
        return value

    async def _play(self, script: Script) -> bool:
        """Play the steps; say whether the connection may be used again."""
        for step in script.steps:
            if self._seen.closed_by:
                return False
            match step:
                case Write(data):
                    self._transport.write(data)
                    await anyio.lowlevel.checkpoint()
                case Pause(seconds):
                    with anyio.move_on_after(seconds):
                        await self._seen.closed.wait()
                case Hold():
                    await self._seen.closed.wait()
                case Fin():
                    self._ended("stub")
                    self._transport.close()
                    await self._seen.closed.wait()
                case Reset():
                    self._ended("stub")
                    linger = struct.pack("ii", 1, 0)
                    self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self._transport.abort()
        return True


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens: calls to it are refused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answer_bytes(body: bytes, *, status: str = "200 OK", headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """Return a whole HTTP answer with `content-length`."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers), f"content-length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def json_answer(body: bytes, *, status: str = "200 OK", headers: Sequence[tuple[str, str]] = ()) -> Script:
    """Return the script of a plain JSON answer on a kept connection."""
    return Script((Write(answer_bytes(body, status=status, headers=[("content-type", "application/json"), *headers])),))

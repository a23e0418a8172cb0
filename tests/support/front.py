"""The HTTP front under test: fakes behind it, a real server around it, and a client that says exactly what goes out."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn

from dispatch.backend import Endpoint
from dispatch.contract import Call, Reply, ReplyHead
from dispatch.gateway.status import GatewayStatus
from dispatch.ingress.protocol import HttpProtocol
from dispatch.producer.options import CallOptions

OK_BODY = b'{"id":"c1","object":"chat.completion","choices":[]}'


def reply(**changes: Any) -> Reply:
    """Return a reply that succeeded, with changes."""
    head = ReplyHead(status=200, headers=(("content-type", "application/json"),), gateway_id="gw-1")
    fields = {"request_id": "r1", "pool_id": "default", "ending": "succeeded", "head": head, "body": OK_BODY}
    return Reply(**{**fields, "queue_ms": 3, "execution_ms": 40, **changes})


@dataclass
class FakeClient:
    """Answers calls as told and remembers them; `cancelled` counts callers that went away."""

    behave: Callable[[Call, CallOptions], Awaitable[Reply]] | None = None
    calls: list[tuple[Call, CallOptions]] = field(default_factory=list)
    cancelled: int = 0
    begun: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)

    async def call(self, call: Call, options: CallOptions) -> Reply:
        self.calls.append((call, options))
        self.begun.set()
        try:
            return reply(pool_id=options.pool_id) if self.behave is None else await self.behave(call, options)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            self.gone.set()
            raise

    @property
    def last(self) -> tuple[Call, CallOptions]:
        return self.calls[-1]


@dataclass
class FakeGateway:
    """A gateway that runs, with a bound and endpoints as told."""

    max_payload_bytes: int = 16 * 1024 * 1024
    listed: tuple[Endpoint, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    async def check(self, within_s: float) -> str:
        assert within_s > 0
        return self.problem

    @property
    def running(self) -> bool:
        return self.status().running

    @property
    def draining(self) -> bool:
        return self.status().draining

    def status(self) -> GatewayStatus:
        fixed = {"gateway_id": "gw-1", "fabric_group": "g", "enabled": True, "running": True, "slots": 8}
        return GatewayStatus(**{**fixed, "fabric_reachable": True, **self.facts})

    async def endpoints(self) -> tuple[Endpoint, ...]:
        return self.listed


def failing(error: Exception) -> Callable[[Call, CallOptions], Awaitable[Reply]]:
    """Return a behaviour that raises `error`."""

    async def behave(_call: Call, _options: CallOptions) -> Reply:
        raise error

    return behave


def answering(answer: Reply) -> Callable[[Call, CallOptions], Awaitable[Reply]]:
    """Return a behaviour that answers with `answer`."""

    async def behave(_call: Call, _options: CallOptions) -> Reply:
        return answer

    return behave


@asynccontextmanager
async def serving(app: Any, protocol: type[HttpProtocol] = HttpProtocol) -> AsyncIterator[int]:
    """Serve an ASGI application as the gateway process does; yields the port on 127.0.0.1.

    Without the server's main loop, which only ticks, and without its signal handlers, which belong to pytest here.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=protocol, ws="none", lifespan="on", access_log=False, log_config=None, server_header=False
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    try:
        yield listener.getsockname()[1]
    finally:
        with anyio.CancelScope(shield=True):
            await server.shutdown([listener])


@dataclass(frozen=True)
class Heard:
    """One answer off the wire. `status` None: the connection ended without one."""

    status: int | None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


def head(lines: Iterable[bytes]) -> bytes:
    """Return a request head of raw lines."""
    return b"\r\n".join([*lines, b"", b""])


async def exchange(port: int, *pieces: bytes, half_close: bool = False, then_wait: float = 0.0) -> Heard:
    """Send raw pieces and read one answer meanwhile; a server that stops reading is no error."""
    stream = await anyio.connect_tcp("127.0.0.1", port)
    heard: list[Heard] = []

    async def send() -> None:
        try:
            for piece in pieces:
                await stream.send(piece)
            if half_close:
                await stream.send_eof()
            await anyio.sleep(then_wait)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async with stream, anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        heard.append(await _hear(stream))
        tasks.cancel_scope.cancel()
    return heard[0]


async def _hear(stream: anyio.abc.ByteReceiveStream) -> Heard:
    raw = b""
    try:
        while True:
            while raw.startswith(b"HTTP/1.1 100"):
                raw = raw.partition(b"\r\n\r\n")[2]
            top, whole, body = raw.partition(b"\r\n\r\n")
            if whole:
                first, *lines = top.split(b"\r\n")
                headers = [(n.strip().lower(), v.strip()) for n, _, v in (line.partition(b":") for line in lines)]
                found = Heard(int(first.split(b" ")[1]), headers, body)
                length = int(found.header(b"content-length") or 0)
                if len(body) >= length:
                    return Heard(found.status, headers, body[:length])
            raw += await stream.receive(1 << 20)
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return Heard(None, body=raw)

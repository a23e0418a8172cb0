"""Running the simulated backend over HTTP."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dispatch.backend.simulated.app import SimulatedBackend, create_app
from dispatch.backend.simulated.exchange import TRANSPORT
from dispatch.backend.simulated.options import SimulatorOptions


@asynccontextmanager
async def running_simulator(options: SimulatorOptions | None = None) -> AsyncIterator[str]:
    """Run a simulated backend in this process on an ephemeral port of 127.0.0.1; yields its base URL (`.../v1`).

    Ends within a moment of the block's end: connections are closed, calls still running are given up.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with _served(create_app(options), listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


async def serve_simulator(options: SimulatorOptions, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Run until SIGTERM or SIGINT; calls `ready` when requests are answered."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with _served(create_app(options), listener):
            ready()
            async for _ in signals:
                break


@asynccontextmanager
async def _served(app: SimulatedBackend, listener: socket.socket) -> AsyncIterator[None]:
    # Connections inherit it. asyncio sets it only on sockets that name TCP as their protocol, which this one does not;
    # without it an answer in two writes waits 40 ms for an acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(
        uvicorn.Config(
            app,
            http=_OpenProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [listener])
        await server.ready.wait()
        try:
            yield
        finally:
            server.stopping.set()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, leaves signals alone, and at its end drops what is still connected."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = anyio.Event()
        self.stopping = anyio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: whoever runs the server has them."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """Wait to be stopped, instead of looking ten times a second; there is no date header to keep up."""
        await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


class _OpenProtocol(HttpToolsProtocol):
    """A protocol that lets the application at its transport: scripted faults end connections in ways ASGI has not."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {TRANSPORT: self.transport}
        self.scope["extensions"] = extensions

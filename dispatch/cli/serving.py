"""One process: a gateway, and the HTTP front over a client of the same group, in one event loop."""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import structlog
import uvicorn

from dispatch.cli.http_server import HttpServer
from dispatch.cli.listening import is_loopback, listen, raise_file_limit, url_of
from dispatch.cli.locking import keys_mode, refuse_keys_off
from dispatch.cli.recording import history_of, recording_of
from dispatch.config import GatewaySettings
from dispatch.config.settings import read_networks
from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import key_read
from dispatch.fabric.observing import Observer
from dispatch.fabric.timed import TimedConnection
from dispatch.gateway import Gateway
from dispatch.ingress.app import create_app
from dispatch.ingress.authority import Authority, KeysMode
from dispatch.ingress.connections import ConnectionLimits
from dispatch.ingress.protocol import HttpProtocol
from dispatch.ingress.state import IngressState
from dispatch.ingress.waits import Waits
from dispatch.producer.client import DispatchClient
from dispatch.telemetry.endings_log import EndingsLog
from dispatch.telemetry.metrics.exporting import Metrics
from dispatch.telemetry.metrics.reading import GroupReader
from dispatch.telemetry.recorder import unnoticed
from dispatch.telemetry.tracing import set_up_tracing

log = structlog.get_logger(__name__)

_ADDRESS = ("--host (DISPATCH_HOST)", "--port (DISPATCH_PORT)")
# Parts of the two seconds that a stop may take beyond the drain.
_BROKEN_OFF_TOLD_S = 0.3
_CLIENT_CLOSE_MS = 300
_LAST_ANSWERS_S = 0.2
_CONNECTION_CLOSE_S = 0.1
_TRACES_FLUSH_S = 0.5
_COLLECT_AFTER = 10_000
"""New objects before a collection. Requests make few cycles; with Python's 700 it is a twentieth of their cost."""
_OTHER_FILES = 256
"""Open files that are no connection of a client: Valkey, logs, and what the libraries have open."""


async def serve(settings: GatewaySettings) -> None:
    """Run until SIGTERM or SIGINT; then take no HTTP work, drain, and return. A second signal cuts the drain short.

    Raises:
        ConfigurationError: a setting is missing or wrong, the address cannot be listened on, the login is refused, or
            other machines could connect and no key is asked for.
        LibraryProblem, FabricUnavailable: the fabric group cannot be used; says what to do.
    """
    settings.require_valkey_url()
    with (
        listen(settings.host, settings.port, named=_ADDRESS) as listener,
        anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
    ):
        refuse_keys_off(settings, loopback=is_loopback(listener))
        process = _Process(settings, listener)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.obey, signals)
            await process.run()
            tasks.cancel_scope.cancel()


class _Process:
    """Starts everything in order, waits, and stops everything in order."""

    def __init__(self, settings: GatewaySettings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        # Made first: telemetry is there before anything happens.
        self._tracing = set_up_tracing(settings.gateway_id)
        self._observer: Observer = EndingsLog()
        self._metrics: Metrics | None = None
        if settings.metrics != "off":
            self._metrics = Metrics(self._tracing.resource, settings.fabric_group, then=self._observer)
            self._observer = self._metrics.counting
        heard = unnoticed if self._metrics is None else self._metrics.counting.delivered
        self._recording = recording_of(settings, self._tracing, heard)
        self._history = history_of(settings)  # one to ask: what is written has its own
        self._gateway = Gateway(settings, observer=self._observer)
        self._starting = anyio.CancelScope()
        self._started = False
        self._stop = anyio.Event()
        self._patience = anyio.CancelScope()
        self._http_done = anyio.Event()

    async def obey(self, signals: AsyncIterator[signal.Signals]) -> None:
        """Turn the first signal into a stop in order, the second into a hurried one."""
        async for number in signals:
            log.info("signal_received", signal=number.name, again=self._stop.is_set())
            if self._stop.is_set():
                self._hurry(0)
                await self._gateway.stop(timeout_ms=0)
            self._stop.set()
            if not self._started:
                self._starting.cancel()

    async def run(self) -> None:
        """Serve until told to stop, or until the gateway fails (its error is raised)."""
        async with AsyncExitStack() as stack:
            with self._starting:
                connection = await self._connect(stack)
                if self._history is not None:
                    stack.callback(self._history.close)
                self._show_metrics(connection, stack)
                stack.push_async_callback(self._close_tracing)
                await self._record(stack)
                mode = await keys_mode(self._settings, connection, loopback=is_loopback(self._listener))
                stack.push_async_callback(self._gateway.stop)
                await self._gateway.start()
                client = await stack.enter_async_context(self._client(connection))
                authority = self._authority(connection, mode)
                stack.push_async_callback(authority.aclose)
                self._started = True
            if self._started:
                waits = Waits(client.estimate)
                state = IngressState(
                    client=client,
                    gateway=self._gateway,
                    authority=authority,
                    waits=waits,
                    connection=connection,
                    history=self._history,
                    observer=self._observer,
                    metrics=self._metrics,
                    metrics_open=self._settings.metrics == "open",
                )
                await self._serve_until_stopped(client, self._server(state), mode)

    async def _serve_until_stopped(self, client: DispatchClient, server: HttpServer, mode: KeysMode) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._serve_http, server)
            tasks.start_soon(self._stop_with_the_gateway)
            log.info("listening", url=url_of(self._listener), group=self._settings.fabric_group, keys=mode)
            gc.collect()
            gc.freeze()  # what is loaded by now stays: no collection walks through it again, nor the one at the exit
            gc.set_threshold(_COLLECT_AFTER)
            await self._stop.wait()
            await self._end(server, client)
            tasks.cancel_scope.cancel()

    async def _end(self, server: HttpServer, client: DispatchClient) -> None:
        server.should_exit = True  # no new connections; answers under way go on
        self._hurry(self._settings.drain_timeout_ms)
        async with anyio.create_task_group() as stopping:
            stopping.start_soon(self._gateway.stop)
            with self._patience:  # what runs here, and what other gateways run for our callers
                await self._gateway.wait_stopped()
                await self._http_done.wait()
            await client.aclose()  # callers that still wait are told
        with anyio.move_on_after(_LAST_ANSWERS_S):
            await self._http_done.wait()

    def _hurry(self, drain_ms: int) -> None:
        ends_at = anyio.current_time() + drain_ms / 1000 + _BROKEN_OFF_TOLD_S
        self._patience.deadline = min(self._patience.deadline, ends_at)

    async def _serve_http(self, server: HttpServer) -> None:
        await server.serve([self._listener])
        self._http_done.set()

    async def _stop_with_the_gateway(self) -> None:
        await self._gateway.wait_stopped()
        self._stop.set()

    async def _record(self, stack: AsyncExitStack) -> None:
        """Begin to record; it ends after the gateway has settled its last."""
        await stack.enter_async_context(self._recording)
        if self._metrics is not None:
            for recorder in self._recording.recorders:
                self._metrics.watch(recorder.stats)

    async def _close_tracing(self) -> None:
        with anyio.move_on_after(_TRACES_FLUSH_S, shield=True):
            await anyio.to_thread.run_sync(self._tracing.close, abandon_on_cancel=True)

    async def _connect(self, stack: AsyncExitStack) -> Connection:
        """Open the connection that everything but the gateway itself uses; its waits must not hold others up."""
        settings = self._settings
        connection = await connect(settings.require_valkey_url(), client=settings.valkey_client)

        async def close() -> None:
            with anyio.move_on_after(_CONNECTION_CLOSE_S, shield=True):
                await connection.aclose()

        stack.push_async_callback(close)
        return connection if self._metrics is None else TimedConnection(connection, self._observer)

    def _show_metrics(self, connection: Connection, stack: AsyncExitStack) -> None:
        metrics = self._metrics
        if metrics is not None:
            metrics.attach(self._gateway.status, GroupReader(connection, self._settings.fabric_group))
            stack.push_async_callback(anyio.to_thread.run_sync, metrics.close)

    def _authority(self, connection: Connection, mode: KeysMode) -> Authority:
        group = self._settings.fabric_group
        return Authority(lambda: connection.run(group, key_read()), mode)

    def _client(self, connection: Connection) -> DispatchClient:
        settings = self._settings
        return DispatchClient(
            settings.valkey_url,
            connection=connection,
            fabric_group=settings.fabric_group,
            client=settings.valkey_client,
            close_ms=_CLIENT_CLOSE_MS,
        )

    def _server(self, state: IngressState) -> HttpServer:
        settings = self._settings
        room = raise_file_limit() - settings.slots - _OTHER_FILES
        limits = ConnectionLimits(
            connections=max(1, min(settings.http_max_connections, room)),
            per_address=settings.http_max_connections_per_address,
            trusted=read_networks(settings.http_trusted_proxies),
        )
        return HttpServer(
            uvicorn.Config(
                create_app(state),
                http=HttpProtocol.within(limits),
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,  # where a request says that it comes from is not believed
                timeout_keep_alive=settings.http_keep_alive_s,
            )
        )

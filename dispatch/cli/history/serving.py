"""An embedded history over ClickHouse's HTTP interface: what `dispatch history serve` runs, and `dispatch dev` with it.

A page of a web browser can send requests to any port of its machine, and a statement may read files: nobody is served
without the password.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
import uvicorn

from dispatch.cli.http_server import HttpServer
from dispatch.telemetry.history.engine import Engine, QueryRefused, read_statement

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields = dict[str, str]

_BODY_MAX = 256 * 1024 * 1024
_AT_ONCE = 8
_LOGIN_REFUSED = 516
_STOP_S = 5


class ClickHouseHttp:
    """The ASGI application: `/ping`, and statements at `/` in the URL or the body."""

    def __init__(self, engine: Engine, password: str) -> None:
        self._engine = engine
        self._password = password.encode()
        self._places = anyio.CapacityLimiter(_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status, fields, body = await self._answer(scope, receive)
        headers = {"content-type": "text/plain; charset=UTF-8", "content-length": str(len(body))} | fields
        head = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, Fields, bytes]:
        body = await _read(receive)
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"] == "/ping":
            return HTTPStatus.OK, {}, b"Ok.\n"
        if not self._knows(given):
            return _refusal(_LOGIN_REFUSED, "Code: 516. the password is wrong or missing", HTTPStatus.FORBIDDEN)
        if body is None or given.get("content-encoding", "identity") != "identity":
            return _refusal(0, "a body of this size or encoding is not read", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        statement = read_statement(query, body, given.get("content-type", ""))
        if not statement.text.strip():
            return _refusal(62, "Code: 62. there is no statement", HTTPStatus.BAD_REQUEST)
        try:
            # Not given up when the client is gone: a statement in the engine cannot be taken back.
            answer = await anyio.to_thread.run_sync(self._engine.run, statement, limiter=self._places)
        except QueryRefused as error:
            return _refusal(error.code, str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
        return HTTPStatus.OK, {"x-clickhouse-timezone": "UTC"}, answer

    def _knows(self, given: Fields) -> bool:
        shown = given.get("x-clickhouse-key", "").encode("latin-1")
        kind, _, token = given.get("authorization", "").partition(" ")
        if kind.lower() == "basic":
            try:
                shown = base64.b64decode(token).partition(b":")[2]
            except binascii.Error:
                return False
        return hmac.compare_digest(shown, self._password)


async def serve_history(engine: Engine, password: str, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; calls `ready` when requests are answered."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            server = await tasks.start(run_server, ClickHouseHttp(engine, password), listener)
            ready()
            async for _ in signals:
                server.should_exit = True
                break


async def run_server(
    app: ClickHouseHttp, listener: socket.socket, *, task_status: anyio.abc.TaskStatus[uvicorn.Server]
) -> None:
    """Serve until `should_exit` of the server, which `task_status` gets when requests are answered, is set."""
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "access_log": False, "log_config": None}
    server = _Server(
        uvicorn.Config(app, server_header=False, timeout_graceful_shutdown=_STOP_S, **options), task_status
    )
    await server.serve([listener])


class _Server(HttpServer):
    """It says when it is ready."""

    def __init__(self, config: uvicorn.Config, task_status: anyio.abc.TaskStatus[uvicorn.Server]) -> None:
        super().__init__(config)
        self._task_status = task_status

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._task_status.started(self)


async def _read(receive: Receive) -> bytes | None:
    """Return the body, None = it is too large (what is left of it is read and thrown away)."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        size += len(part)
        if size <= _BODY_MAX:
            parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if size <= _BODY_MAX else None


def _refusal(code: int, text: str, status: int) -> tuple[int, Fields, bytes]:
    return status, {"x-clickhouse-exception-code": str(code)}, text.encode()

"""The adapter that runs calls against OpenAI-compatible endpoints."""

from __future__ import annotations

import asyncio
import functools
import math
from http import HTTPStatus
from types import TracebackType
from typing import Self

import anyio
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.engine_metrics import EngineReading, read_metrics
from dispatch.backend.exchange import UPLOAD_PIECE_BYTES, Answer, Upload, exchange
from dispatch.backend.execution import Execution
from dispatch.backend.failures import Failure, timed_out
from dispatch.backend.gauge import Gauge
from dispatch.backend.journal import note_failure
from dispatch.backend.probing import Probe, read_probe
from dispatch.backend.reading import read_answer, read_failure
from dispatch.backend.streaming import BackendStream
from dispatch.backend.transport import open_transport, proxy_for
from dispatch.contract import Call

_USER_AGENT = "fabric-dispatch"


class EndpointClient:
    """Runs calls against any number of endpoints over shared, kept connections. One per event loop.

    Usable as `async with EndpointClient() as client`. A call is sent once: nothing is retried, no redirect followed, no
    cookie kept. There is no bound on concurrent calls; whoever admits them decides that.
    """

    def __init__(self) -> None:
        self._transports: dict[tuple[bool, str | None], AiohttpTransport] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; calls still running fail. May be called twice; cancellation does not cut it short."""
        self._closed = True
        transports, self._transports = list(self._transports.values()), {}
        with anyio.CancelScope(shield=True):
            for transport in transports:
                await transport.aclose()

    async def execute(self, endpoint: Endpoint, call: Call, *, deadline_s: float) -> Execution:
        """Send `call` once and say how it ended; `deadline_s` = seconds from now until the request's deadline.

        The body travels byte for byte, with the endpoint's own Authorization and no header of the caller's; of
        ours the call's trace context. Never
        raises for what the network or the endpoint does. Cancel safe: the connection is closed at once, so that the
        endpoint stops working on it. A deadline that has passed ends `expired` without a call.

        Raises:
            RuntimeError: the client is closed.
        """
        return await self._run(endpoint, _call_request(endpoint, call), deadline_s)

    def stream(self, endpoint: Endpoint, call: Call, *, deadline_s: float) -> BackendStream:
        """Return the handle of a call whose answer is a stream; entering it sends the call, once. See `BackendStream`.

        Promises as `execute`; the body must ask for a stream.

        Raises:
            RuntimeError: the client is closed.
            ValueError: the operation has no stream form.
        """
        request = _call_request(endpoint, call)
        request.headers["accept-encoding"] = "identity"  # compressing token by token costs more than it saves
        transport = self._transport(request.url, use_proxy=endpoint.use_proxy)
        return BackendStream(transport, request, endpoint, call, deadline_s)

    async def models(self, endpoint: Endpoint, *, deadline_s: float) -> Execution:
        """Ask for the endpoint's models (`GET /models`): the list for callers, and a probe that costs no generation.

        Promises and raises as `execute`.
        """
        return await self._run(endpoint, _request(endpoint, "GET", "models", b""), deadline_s)

    async def probe(self, endpoint: Endpoint, *, within_s: float) -> Probe:
        """Ask for the endpoint's models to learn whether it is back; no answer within `within_s` is a failure of it.

        Promises and raises as `execute`.
        """
        return read_probe(await self._ask(endpoint, _request(endpoint, "GET", "models", b""), within_s), endpoint)

    async def gauge(self, gauge: Gauge, *, within_s: float) -> EngineReading | str:
        """Read the metrics of an endpoint's engine; a text says why there are none.

        Promises and raises as `execute`.
        """
        found = await self._ask(gauge.endpoint, gauge.request(), within_s)
        if isinstance(found, Failure):
            return f"its metrics did not come within {within_s:g} s" if found.expired else found.message
        if found.status != HTTPStatus.OK:
            return f"its metrics page answers {found.status}"
        return read_metrics(found.body, gauge.names)

    async def _run(self, endpoint: Endpoint, request: httpx.Request, deadline_s: float) -> Execution:
        now = asyncio.get_running_loop().time
        started = now()
        found = await self._ask(endpoint, request, deadline_s)
        execution = read_failure(found, endpoint) if isinstance(found, Failure) else read_answer(found, endpoint)
        note_failure(endpoint, execution.head.error)
        elapsed_ms = math.ceil((now() - started) * 1000)
        return msgspec.structs.replace(execution, execution_ms=elapsed_ms)

    async def _ask(self, endpoint: Endpoint, request: httpx.Request, within_s: float) -> Answer | Failure:
        if not within_s > 0:  # also when it is no number
            return timed_out(endpoint, None, expired=True)
        transport = self._transport(request.url, use_proxy=endpoint.use_proxy)
        return await exchange(transport, request, endpoint, asyncio.get_running_loop().time() + within_s)

    def _transport(self, url: httpx.URL, *, use_proxy: bool) -> AiohttpTransport:
        if self._closed:
            raise RuntimeError("the EndpointClient is closed")
        key = (url.scheme == "https", proxy_for(url) if use_proxy else None)
        transport = self._transports.get(key)
        if transport is None:
            transport = self._transports[key] = open_transport(secure=key[0], proxy=key[1])
        return transport


_url = functools.lru_cache(maxsize=4096)(httpx.URL)


@functools.lru_cache(maxsize=1024)
def _headers(method: str, authorization: str) -> httpx.Headers:
    """Return the headers that every call to an endpoint carries, encoded once."""
    headers = {"accept": "application/json", "accept-encoding": "gzip", "user-agent": _USER_AGENT}
    if authorization:
        headers["authorization"] = authorization
    if method == "POST":
        headers["content-type"] = "application/json"
    return httpx.Headers(headers)


def _call_request(endpoint: Endpoint, call: Call) -> httpx.Request:
    request = _request(endpoint, "POST", call.operation.path, call.body)
    if call.traceparent is not None:
        request.headers["traceparent"] = call.traceparent
        if call.tracestate is not None:
            request.headers["tracestate"] = call.tracestate
    return request


def _request(endpoint: Endpoint, method: str, path: str, body: bytes) -> httpx.Request:
    headers = _headers(method, endpoint.authorization)
    content: bytes | Upload = body
    if len(body) > UPLOAD_PIECE_BYTES:
        headers = httpx.Headers([*headers.raw, (b"content-length", str(len(body)).encode())])
        content = Upload(body)
    connect_s = endpoint.connect_timeout_ms / 1000
    return httpx.Request(
        method,
        _url(endpoint.url_of(path)),
        headers=headers,
        content=content,
        # "pool" bounds name look-up, TCP and TLS together. Reading has clocks of its own (see exchange).
        extensions={"timeout": {"connect": connect_s, "pool": connect_s}},
    )

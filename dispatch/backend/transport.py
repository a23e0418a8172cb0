"""Connections to endpoints: aiohttp's pool under the httpx transport interface.

Why this pair: httpx's own pool is quadratic in open connections and keeps slots of requests that were cancelled while
connecting. The transport is driven directly, without `httpx.AsyncClient` on top: the client's redirects, cookies and
authorization are what must not happen here, and it costs as much CPU as the rest of a call.

What is adjusted, all through aiohttp's public parameters: no bound on connections (admission is decided elsewhere, a
second limit would be an invisible queue), no cookie jar (a backend's cookie must not meet the next caller), an early
end resets the connection at once even while a body is being sent, and a reason phrase in any encoding is harmless.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import struct
import urllib.request
import weakref

import aiohttp
import certifi
import httpx
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport

KEEPALIVE_S = 3.0
"""How long an idle connection is kept. Below the 5 s after which common engines' servers close theirs: a request
written into a connection that is being closed is lost, and it cannot be known whether it was read."""


def open_transport(*, secure: bool, proxy: str | None) -> AiohttpTransport:
    """Make a transport with a pool of its own; `secure` = for https, `proxy` = URL of an HTTP proxy.

    The session starts with the first request, in the event loop that runs then. The first https transport of a process
    reads the trust store, which blocks for some 10 ms.
    """
    context = _trust() if secure else None

    def start_session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0,
            limit_per_host=0,
            keepalive_timeout=KEEPALIVE_S,
            ssl=True if context is None else context,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            proxy=proxy,
            response_class=_PromptlyClosingResponse,
            timeout=aiohttp.ClientTimeout(),
            trust_env=False,
        )

    return AiohttpTransport(
        # Only spares it a trust store of its own: the session's connector has the say, and checks certificates.
        verify=False if context is None else context,
        trust_env=False,
        client=start_session,
    )


def proxy_for(url: httpx.URL) -> str | None:
    """Return the proxy that the environment (`http_proxy`, `https_proxy`, `no_proxy`) names for `url`, if any."""
    if urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


@functools.cache
def _trust() -> ssl.SSLContext:
    """Trust the system's store (a company may have its own) and the packaged one (bare containers have none)."""
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=certifi.where())
    return context


_LINGER_NOT = struct.pack("ii", 1, 0)


class _LosslessReader(aiohttp.StreamReader):
    """A body that gives out what it has before it tells that it broke off.

    aiohttp's own tells at once, and what had come while nobody waited for it is lost: the whole events of a stream that
    was cut while its reader was busy.
    """

    __slots__ = ()

    async def read(self, n: int = -1) -> bytes:
        if self._exception is not None and self._buffer:
            return self._read_nowait(n)
        return await super().read(n)


class _PromptlyClosingResponse(aiohttp.ClientResponse):
    """A response whose connection is reset, not flushed, when the call ends before the answer was complete.

    A plain close first delivers what is still to be sent, for which a stuck backend lets us and itself wait; a reset
    reaches it at once. The same where an answer is complete while the request is still being sent. The reason phrase
    becomes plain ASCII: nobody reads it, and the transport's encoding of it as UTF-8 fails on other bytes. What came of
    a body before it broke off is read before that is told.
    """

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        transport = connection.transport
        try:
            started = await super().start(connection)
        except BaseException:
            _reset(transport)
            raise
        if type(self.content) is aiohttp.StreamReader:
            self.content.__class__ = _LosslessReader
        if self.reason:
            self.reason = self.reason.encode("ascii", "replace").decode("ascii")
        drop_if_busy = functools.partial(_reset_if_busy, transport, self)
        if self.connection is None:  # the whole answer had come with its head, the connection is released already
            drop_if_busy()
        else:
            connection.add_callback(drop_if_busy)
            _tell_when_lost(connection, self.content)
        return started


_watched: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()
_bodies: dict[ResponseHandler, aiohttp.StreamReader] = {}
"""The body that a watched connection is giving now."""


def _tell_when_lost(connection: aiohttp.connector.Connection, body: aiohttp.StreamReader) -> None:
    """Make sure that the end of a connection ends the wait for its body.

    aiohttp closes a connection on which nonsense comes between two pieces of a body, but leaves who waits for the next.
    """
    protocol = connection.protocol
    lost = None if protocol is None else protocol.closed
    if protocol is None or lost is None:
        return
    _bodies[protocol] = body
    connection.add_callback(functools.partial(_forget, protocol))
    if protocol not in _watched:
        _watched.add(protocol)
        lost.add_done_callback(functools.partial(_tell_lost, weakref.ref(protocol)))


def _forget(protocol: ResponseHandler) -> None:
    _bodies.pop(protocol, None)


def _tell_lost(protocol: weakref.ref[ResponseHandler], lost: asyncio.Future[None]) -> None:
    if not lost.cancelled():
        lost.exception()  # seen: it is told with the body, if at all
    connection = protocol()
    body = None if connection is None else _bodies.get(connection)
    if body is not None and not body.is_eof() and body.exception() is None:
        body.set_exception(aiohttp.ClientPayloadError("the connection ended inside the body"))


def _reset_if_busy(transport: asyncio.Transport | None, response: aiohttp.ClientResponse) -> None:
    if transport is not None and (not response.content.is_eof() or transport.get_write_buffer_size() > 0):
        _reset(transport)


def _reset(transport: asyncio.Transport | None) -> None:
    if transport is None or transport.is_closing():
        return
    connected = transport.get_extra_info("socket")
    if connected is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    transport.abort()

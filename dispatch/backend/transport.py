"""Connections to endpoints: aiohttp's pool under the httpx transport interface.

Why this pair: httpx's own pool is quadratic in open connections and keeps slots of requests that were cancelled while
connecting. The transport is driven directly, without `httpx.AsyncClient` on top: the client's redirects, cookies and
authorization are what must not happen here, and it costs as much CPU as the rest of a call.

What is adjusted, all through aiohttp's public parameters: no bound on connections (admission is decided elsewhere, a
second limit would be an invisible queue), no cookie jar (a backend's cookie must not meet the next caller), an early
end drops the connection at once even while a body is being sent, and a reason phrase in any encoding is harmless.
"""

from __future__ import annotations

import base64
import functools
import ssl
import urllib.request

import aiohttp
import certifi
import httpx
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
            request_class=_PromptlyClosingRequest,
            response_class=_TolerantResponse,
            timeout=aiohttp.ClientTimeout(),
            trust_env=False,
        )

    return AiohttpTransport(
        verify=False if context is None else context,
        trust_env=False,
        proxy=None if proxy is None else _proxy(proxy),
        client=start_session,
    )


def proxy_for(url: httpx.URL) -> str | None:
    """Return the proxy that the environment (`http_proxy`, `https_proxy`, `no_proxy`) names for `url`, if any."""
    if urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


def _proxy(url: str) -> httpx.Proxy:
    proxy = httpx.Proxy(url)
    if proxy.raw_auth is None:
        return proxy
    # As a header: the transport would hand credentials to a parameter that aiohttp is removing.
    credentials = base64.b64encode(b":".join(proxy.raw_auth)).decode()
    return httpx.Proxy(proxy.url, headers={"Proxy-Authorization": f"Basic {credentials}"})


@functools.cache
def _trust() -> ssl.SSLContext:
    """Trust the system's store (a company may have its own) and the packaged one (bare containers have none)."""
    context = ssl.create_default_context()
    context.load_verify_locations(cafile=certifi.where())
    return context


class _PromptlyClosingRequest(aiohttp.ClientRequest):
    """A request whose connection is aborted, not flushed, when it is given up before the answer was complete.

    A plain close first writes out what is buffered, for which a stuck backend lets us wait for ever.
    """

    async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        response = await super().send(conn)
        conn.add_callback(functools.partial(_abort_unless_complete, conn, response))
        return response


def _abort_unless_complete(conn: aiohttp.connector.Connection, response: aiohttp.ClientResponse) -> None:
    transport = conn.transport
    if transport is None:
        return
    complete = response.content is not None and response.content.is_eof()
    if not complete or transport.get_write_buffer_size() > 0:
        transport.abort()


class _TolerantResponse(aiohttp.ClientResponse):
    """A response whose reason phrase is plain ASCII: nobody reads it, and the transport encodes it as UTF-8."""

    async def start(self, connection: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        started = await super().start(connection)
        if self.reason:
            self.reason = self.reason.encode("ascii", "replace").decode("ascii")
        return started

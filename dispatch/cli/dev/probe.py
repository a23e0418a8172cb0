"""Looking at ports and HTTP servers, before and while they start."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from dispatch.errors import ConfigurationError, DispatchError

LOOPBACK = "127.0.0.1"
_POLL_S = 0.03
_MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What an HTTP server said to a GET."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the decoded body; None when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


async def get(url: str, *, authorization: str = "", timeout_s: float = 2.0) -> Answer:
    """Ask `url` once, past any proxy.

    Raises:
        OSError: no connection, or no HTTP answer in time.
    """
    return await anyio.to_thread.run_sync(_get, url, authorization, timeout_s, abandon_on_cancel=True)


async def wait_for(url: str, name: str, *, seconds: float) -> Answer:
    """Ask `url` until it answers 200.

    Raises:
        DispatchError: it did not within `seconds`; says what it said last.
    """
    last = "no answer"
    with anyio.move_on_after(seconds):
        while True:
            try:
                answer = await get(url)
            except OSError as error:
                last = str(error)
            else:
                if answer.status == http.client.OK:
                    return answer
                last = f"status {answer.status} {answer.body[:200].decode(errors='replace')}".strip()
            await anyio.sleep(_POLL_S)
    raise DispatchError(f"{name} was not ready within {seconds:g} s ({url}: {last})")


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that were free a moment ago, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def require_free(ports: Sequence[int], option: str) -> None:
    """Make sure that a server could listen on each of `ports`.

    Raises:
        ConfigurationError: one is in use or out of range; names it and the option that chooses another.
    """
    for port in ports:
        if not 0 < port < 65_536:
            raise ConfigurationError(f"there is no port {port}; choose others with {option}")
        with socket.socket() as probe:
            # As servers do it: a port in TIME_WAIT is free, one that is listened on is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
                raise ConfigurationError(f"port {port} {reason}; free it, or choose another with {option}") from error


def _get(url: str, authorization: str, timeout_s: float) -> Answer:
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=ssl.create_default_context())
        if parts.scheme == "https"
        else http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
    )
    headers = {"Accept": "application/json", "Connection": "close"}
    if authorization:
        headers["Authorization"] = authorization
    try:
        connection.request("GET", f"{parts.path or '/'}", headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(_MAX_ANSWER_BYTES))
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer ({type(error).__name__})") from error
    finally:
        connection.close()

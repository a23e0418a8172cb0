"""Listening for HTTP: the first thing a serving command does, so that a busy port is the first thing it says."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from dispatch.errors import ConfigurationError

_BACKLOG = 2048


@contextmanager
def listen(host: str, port: int, *, named: tuple[str, str] = ("--host", "--port")) -> Iterator[socket.socket]:
    """Open the listening socket; port 0 = any free one. `named` is how people name the two settings.

    Raises:
        ConfigurationError: the address cannot be listened on; says why and which setting to change.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(_why_not(error, host, port, named)) from error
    with listener:
        yield listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of what listens here, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why_not(error: OSError, host: str, port: int, named: tuple[str, str]) -> str:
    host_setting, port_setting = named
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with {port_setting}"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be used by this user; choose another with {port_setting}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host!r} is no address of this machine; choose another with {host_setting}"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"

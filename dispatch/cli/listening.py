"""Listening for HTTP: the first thing a serving command does, so that a busy port is the first thing it says."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dispatch.errors import ConfigurationError

_BACKLOG = 2048
_FILES_MAX = 1_048_576
_DEAD_AFTER = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""A client that is gone without a word (its machine, its network) is noticed after two minutes, seconds and probes."""


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
        _notice_the_dead(listener)
        yield listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of what listens here, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Say whether only this machine can connect to what listens here."""
    ip = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def raise_file_limit() -> int:
    """Allow this process as many open files as it may allow itself; returns how many these are.

    The usual limit is low for the sake of programs that cannot count further, and each connection is a file.
    """
    if sys.platform == "win32":
        return _FILES_MAX
    import resource  # noqa: PLC0415 - not on every platform

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return _FILES_MAX if soft == resource.RLIM_INFINITY else soft


def _notice_the_dead(listener: socket.socket) -> None:
    """Have the kernel ask clients that say nothing whether they are there; accepted connections inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _DEAD_AFTER:
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def _why_not(error: OSError, host: str, port: int, named: tuple[str, str]) -> str:
    host_setting, port_setting = named
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with {port_setting}"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} may not be used by this user; choose another with {port_setting}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host!r} is no address of this machine; choose another with {host_setting}"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"

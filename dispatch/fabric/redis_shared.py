"""What the blocking and the async redis-py connection share: how to connect, and how to read an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import exceptions

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric.address import Address
from dispatch.fabric.calls import FunctionCall, T
from dispatch.fabric.connection import CONNECT_TIMEOUT_S
from dispatch.fabric.faults import ServerFault, plain_reason, to_error


def options(address: Address, timeout_s: float | None) -> dict[str, Any]:
    """Return the keyword arguments with which any redis-py client speaks to `address`; None = reads never time out.

    Raises:
        ConfigurationError: the CA file cannot be read.
    """
    found: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }
    if address.tls:
        found["ssl"] = True
        if (pem := address.ca_pem()) is not None:
            found["ssl_ca_data"] = pem.decode("ascii")
    return found


@contextmanager
def redis_errors(address: Address | str, function: str = "") -> Iterator[None]:
    """Raise this package's error for whatever redis-py raises inside; `function` is what is called, if one is."""
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise read_error(error, address, function) from error


def read_error(error: Exception, address: Address | str, function: str = "") -> DispatchError:
    """Return what an exception of redis-py means."""
    code = getattr(error, "status_code", None)
    text = str(error)
    if code is None and isinstance(error, exceptions.ResponseError):
        code, _, text = text.partition(" ")
    if code is not None:
        return to_error(ServerFault(code, text, function, str(address)))
    timed_out = isinstance(error, exceptions.TimeoutError)
    reason = "it took too long" if timed_out else plain_reason(error)
    return FabricUnavailable(f"Valkey at {address} does not answer: {reason}")


def outcome(call: FunctionCall[T], answer: Any, address: Address) -> T | DispatchError:
    """Return what one call of a pipeline came to: its decoded answer, or the error that stands in its place."""
    if isinstance(answer, Exception):
        return read_error(answer, address, call.function)
    return call.outcome(answer)

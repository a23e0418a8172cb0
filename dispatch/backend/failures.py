"""Calls that got no complete answer: what happened, in our words, and what may be concluded.

Texts of the layers below are not passed on: they may quote headers. What a person needs of them (refused, no such host,
certificate) is named here.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Self

import aiohttp
import httpx
from aiohttp.http import RawResponseMessage

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.execution import ErrorType, Verdict

_OUR_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class BodyTooLarge(Exception):
    """The answer is larger than the endpoint's bound; raised and caught inside this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no complete answer. `status` is set when the answer's head had come."""

    type: ErrorType
    message: str
    status: int | None = None
    verdict: Verdict = "failure"
    retryable: bool = False

    @classmethod
    def too_large(cls, endpoint: Endpoint, status: int | None) -> Self:
        """Make the failure of an answer beyond `max_response_bytes`; it says nothing about the endpoint's health."""
        return cls(
            type=ErrorType.TOO_LARGE,
            message=f"endpoint {endpoint.endpoint_id!r} answered with more than {endpoint.max_response_bytes} bytes",
            status=status,
            verdict="neutral",
        )

    @property
    def expired(self) -> bool:
        """Whether the request's own deadline ended the call."""
        return self.type is ErrorType.DEADLINE


def timed_out(endpoint: Endpoint, status: int | None, *, expired: bool) -> Failure:
    """Make the failure of a call that was ended by a clock: the request's deadline, or the endpoint's own bounds.

    Never retryable: the endpoint may still be working on it.
    """
    name = f"endpoint {endpoint.endpoint_id!r}"
    if expired:
        return Failure(
            type=ErrorType.DEADLINE,
            message=f"the request's deadline passed while {name} worked on it",
            status=status,
            verdict="neutral",
        )
    what = (
        f"sent no head within {endpoint.first_byte_timeout_ms} ms"
        if status is None
        else f"paused for more than {endpoint.idle_timeout_ms} ms in its answer"
    )
    return Failure(type=ErrorType.TIMEOUT, message=f"{name} {what}", status=status)


def failure_of(error: Exception, endpoint: Endpoint, status: int | None, received_bytes: int) -> Failure:
    """Classify what the layers below raised; `received_bytes` counts the body.

    Retryable only while nothing was answered: no connection, or one that ended before a byte of the answer (of its
    body, when the head had come).
    """
    cause = _cause(error)
    name = f"endpoint {endpoint.endpoint_id!r}"
    if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.ClientHttpProxyError):
        what = _why_unreachable(cause, endpoint)
        return Failure(
            type=ErrorType.UNREACHABLE,
            message=f"{name} cannot be reached: {what}",
            verdict="neutral" if _is_ours(cause) else "failure",
            retryable=True,
        )
    if _is_disconnect(cause, status):
        nothing = received_bytes == 0 and not _has_partial_head(cause)
        what = (
            "ended the connection before it answered"
            if status is None
            else f"broke off after {received_bytes} bytes of its answer"
        )
        return Failure(
            type=ErrorType.DISCONNECTED,
            message=f"{name} {what}",
            status=status,
            retryable=nothing,
        )
    what = "does not fit its content encoding" if isinstance(error, httpx.DecodingError) else "is not readable as HTTP"
    return Failure(
        type=ErrorType.UNREADABLE,
        message=f"{name} answered with something that {what}",
        status=status,
    )


def _cause(error: Exception) -> BaseException:
    """Return what aiohttp raised: the transport maps several different faults to one httpx error."""
    if isinstance(error, httpx.HTTPError) and error.__cause__ is not None:
        return error.__cause__
    return error


def _is_disconnect(cause: BaseException, status: int | None) -> bool:
    if isinstance(cause, aiohttp.ClientPayloadError):
        return status is not None
    return isinstance(cause, aiohttp.ClientConnectionError | OSError)


def _has_partial_head(cause: BaseException) -> bool:
    return isinstance(cause, aiohttp.ServerDisconnectedError) and isinstance(cause.message, RawResponseMessage)


def _is_ours(cause: BaseException) -> bool:
    """Say whether the fault is this machine's: no socket, no memory, no port. The endpoint was not asked at all."""
    inner = cause.os_error if isinstance(cause, aiohttp.ClientConnectorError) else cause
    return isinstance(inner, OSError) and inner.errno in _OUR_ERRNOS


def _why_unreachable(cause: BaseException, endpoint: Endpoint) -> str:
    inner = cause.os_error if isinstance(cause, aiohttp.ClientConnectorError) else cause
    if isinstance(cause, aiohttp.ConnectionTimeoutError):
        return f"no connection within {endpoint.connect_timeout_ms} ms"
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({inner.verify_message})"
    if isinstance(inner, ssl.SSLError):
        return "TLS could not be agreed on"
    if isinstance(inner, socket.gaierror) or isinstance(cause, aiohttp.ClientConnectorDNSError):
        return "its host name is not known"
    if isinstance(cause, aiohttp.ClientHttpProxyError | aiohttp.ClientProxyConnectionError):
        return "the proxy does not let us through"
    return os.strerror(inner.errno).lower() if isinstance(inner, OSError) and inner.errno else "no connection"

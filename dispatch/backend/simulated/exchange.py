"""One HTTP exchange of the simulated backend, at ASGI level: raw speed where nothing is scripted, and bad endings."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
from starlette.types import Receive, Scope, Send

from dispatch.backend.simulated.calls import CallRefused

TRANSPORT = "dispatch.transport"
"""Key under the scope's `extensions`: the connection's transport, put there by the simulator's own server."""

_JSON = (b"content-type", b"application/json")
_BEFORE_RESET_S = 0.05
_LINGER_NOT = struct.pack("ii", 1, 0)

RawHeaders = Sequence[tuple[bytes, bytes]]


class Exchange:
    """Reads a request and writes its answer. `dropped` = we ended the connection ourselves."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.dropped = False

    def header(self, name: bytes) -> bytes:
        """Return the first value of a header (lower case), or b""."""
        return next((value for key, value in self._scope["headers"] if key == name), b"")

    async def body(self) -> bytes | None:
        """Read the request's body; None when the client left before it was through."""
        pieces: list[bytes] = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def disconnected(self) -> None:
        """Return when the client has gone; to be called after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: RawHeaders) -> None:
        """Send the head."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes, *, more: bool = False) -> None:
        """Send a piece of the body, the last one unless `more`."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, body: bytes, *, status: int = 200, headers: RawHeaders = ()) -> None:
        """Send a whole JSON answer."""
        await self.start(status, [_JSON, (b"content-length", b"%d" % len(body)), *headers])
        await self.write(body)

    async def refuse(self, error: CallRefused, *, headers: RawHeaders = ()) -> None:
        """Send an OpenAI error."""
        await self.json(error_body(error), status=error.status, headers=headers)

    async def drop(self, *, reset: bool) -> None:
        """End the connection in the middle of whatever was being sent: after what is written so far, or by a reset."""
        self.dropped = True
        transport: asyncio.Transport | None = (self._scope.get("extensions") or {}).get(TRANSPORT)
        if transport is None:
            return
        if reset:
            # Time for what was written to be read: a reset throws away what the other side has not taken yet.
            await anyio.sleep(_BEFORE_RESET_S)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            transport.abort()
        else:
            transport.close()
        # The server takes a return without an answer for a fault of ours, unless it knows that the client has gone.
        await self.disconnected()


def error_body(error: CallRefused) -> bytes:
    """Return an OpenAI error."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status) or (
        "invalid_request_error" if error.status < 500 else "server_error"
    )
    members: dict[str, Any] = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": members})

"""Reading a call's body within its bounds: form, size, time, and the memory that all bodies together may take."""

from __future__ import annotations

import asyncio
import io
from types import TracebackType
from typing import Self

import anyio
from starlette.types import Receive

from dispatch.errors import RequestRefused
from dispatch.ingress.state import IngressSettings
from dispatch.producer.call_headers import Headers


class ClientGone(Exception):
    """The client closed the connection (or its sending half) before the answer; nobody is left to tell."""


class BodyTooSlow(Exception):
    """The body did not come within its time."""


class Held:
    """The bodies this process holds, in bytes. Used by one event loop. `turn` is for whoever works on a large one."""

    def __init__(self, limit_bytes: int) -> None:
        self.turn = anyio.Lock()
        self._limit = limit_bytes
        self.bytes = 0

    def share(self) -> Share:
        """Begin a share of nothing; `with` gives it back however the call ends."""
        return Share(self)

    def take(self, size: int) -> None:
        """Add `size` bytes.

        Raises:
            RequestRefused: the bodies would take too much memory.
        """
        if self.bytes + size > self._limit:
            raise RequestRefused(
                "gateway_full",
                value=self.bytes,
                limit=self._limit,
                message=f"this gateway holds {self.bytes} bytes of calls, at most {self._limit} are allowed",
            )
        self.bytes += size

    def give_back(self, size: int) -> None:
        """Take `size` bytes off again."""
        self.bytes -= size


class Share:
    """What one call holds of `Held`."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._bytes = 0

    def grow(self, size: int) -> None:
        """Hold `size` bytes more.

        Raises:
            RequestRefused: the bodies would take too much memory.
        """
        self._held.take(size)
        self._bytes += size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.give_back(self._bytes)
        self._bytes = 0


class Upload:
    """One body on its way. `read` it, or `drain` it when the answer went out before its end."""

    def __init__(self, headers: Headers, receive: Receive, settings: IngressSettings) -> None:
        self._headers = headers
        self._receive = receive
        self._settings = settings
        self._begun = False
        self.complete = False

    def announced(self, otherwise: int) -> int:
        """Return the length the client announced, `otherwise` if it announced none (chunked)."""
        values = self._headers.get(b"content-length", ())
        if len(values) == 1 and values[0].isdigit() and len(values[0]) < 20:
            return int(values[0])
        return otherwise if b"transfer-encoding" in self._headers else 0

    async def read(self, limit: int, share: Share) -> bytes:
        """Read the body; nothing of it is kept when this raises.

        Raises:
            RequestRefused: it is larger than `limit` (also when it only says so), or memory is short.
            BodyTooSlow: a pause or the whole took too long.
            ClientGone: the client closed the connection.
        """
        if (announced := self.announced(0)) > limit:
            raise _too_large(announced, limit)
        # BytesIO grows in place and hands its buffer out, so that a body exists once however it was cut.
        buffer = io.BytesIO()
        now = asyncio.get_running_loop().time
        ends_at, idle_s = now() + self._settings.body_total_s, self._settings.body_idle_s
        try:
            # Not a scope of anyio's: most bodies are there already, and that was a thirtieth of a call's whole cost.
            async with asyncio.timeout(min(self._settings.body_total_s, idle_s)) as bound:
                while not self.complete:
                    piece = await self._next()
                    size = buffer.tell() + len(piece)
                    if size > limit:
                        raise _too_large(size, limit)
                    share.grow(len(piece))
                    buffer.write(piece)
                    if not self.complete:
                        bound.reschedule(min(ends_at, now() + idle_s))
        except TimeoutError:
            raise BodyTooSlow from None
        return buffer.getvalue()

    async def drain(self) -> None:
        """Read on after the answer went out, within bounds and keeping nothing, so that the client gets to read it.

        A socket closed with unread bytes in it is reset, and a reset throws the answer away at the client. A client
        that asked for leave to send (`Expect: 100-continue`) and did not get it sends nothing.
        """
        if not self._begun and b"expect" in self._headers:
            return
        left = self._settings.drain_max_bytes
        with anyio.move_on_after(self._settings.drain_max_s):
            try:
                while left > 0 and not self.complete:
                    left -= len(await self._next())
            except ClientGone:
                return

    async def _next(self) -> bytes:
        self._begun = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.complete = not message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece


def _too_large(size: int, limit: int) -> RequestRefused:
    return RequestRefused(
        "body_too_large",
        value=size,
        limit=limit,
        message=f"the body has {size} bytes or more, at most {limit} are allowed",
    )

"""Reply bodies that were too large for a frame: read from their own key by whoever waits, then released."""

from __future__ import annotations

import anyio
import msgspec

from dispatch.contract.reply import Reply
from dispatch.errors import DispatchError, FabricUnavailable, OutcomeUnknown
from dispatch.fabric.connection import Connection
from dispatch.fabric.frames import Frame
from dispatch.fabric.schema import key

BODIES_AT_ONCE = 4
"""Large bodies on their way to or from the server at one time: more would hold up the small calls behind them."""

RETRY_S = 0.1


class Bodies:
    """Reads bodies beside the pump, a few at a time."""

    def __init__(self, connection: Connection, group: str) -> None:
        self._connection = connection
        self._group = group
        self._places = anyio.CapacityLimiter(BODIES_AT_ONCE)

    async def read(self, frame: Frame) -> Reply:
        """Read the body of `frame`, repeated until the server answers (the caller sets a bound).

        Raises:
            OutcomeUnknown: it is gone.
        """
        while True:
            try:
                async with self._places:
                    body = await self._connection.get(body_key(self._group, frame))
            except FabricUnavailable:
                await anyio.sleep(RETRY_S)
            else:
                return with_body(frame, body)

    async def release(self, frame: Frame) -> None:
        """Free the body's memory: it has no other reader, and waiting out the expiry would keep it for minutes."""
        try:
            await self._connection.put(body_key(self._group, frame), b"", ttl_ms=1)
        except DispatchError:
            return  # the key has an expiry anyway


def body_key(group: str, frame: Frame) -> str:
    """Return where the body of `frame` stands."""
    return key(group, "reply_body", id=frame.reply.request_id)


def with_body(frame: Frame, body: bytes | None) -> Reply:
    """Return the reply of `frame` with its body.

    Raises:
        OutcomeUnknown: there is none.
    """
    reply = frame.reply
    if body is None:
        name = f"request {reply.request_id} (ended {reply.ending})"
        if reply.replayed:
            raise OutcomeUnknown(f"the stored reply of {name} cannot be repeated: its body is gone; nothing was queued")
        raise OutcomeUnknown(f"the body of the reply to {name} is gone: it was not read within its expiry")
    return msgspec.structs.replace(reply, body=body)

"""Reply bodies that were too large for a frame: read from their own key, then released."""

from __future__ import annotations

import anyio
import msgspec

from dispatch.errors import DispatchError, FabricError, FabricUnavailable
from dispatch.fabric.connection import Connection
from dispatch.fabric.frames import Frame
from dispatch.fabric.schema import key
from dispatch.producer.inbox import Inbox, Outcome

BODIES_AT_ONCE = 4
_RETRY_S = 0.1


class Bodies:
    """Fetches bodies side by side with the pump, a few at a time."""

    def __init__(self, connection: Connection, group: str, inbox: Inbox) -> None:
        self._connection = connection
        self._group = group
        self._inbox = inbox
        self._places = anyio.CapacityLimiter(BODIES_AT_ONCE)

    async def fetch(self, frame: Frame) -> None:
        """Read the body of `frame` for whoever waits, repeated until the server answers or nobody waits any more."""
        reply = frame.reply
        body_key = key(self._group, "reply_body", id=reply.request_id)
        while self._inbox.wanted(reply.request_id):
            try:
                async with self._places:
                    body = await self._connection.get(body_key)
            except FabricUnavailable:
                await anyio.sleep(_RETRY_S)
            except DispatchError as error:
                self._inbox.settle(reply.request_id, error)
            else:
                self._inbox.settle(reply.request_id, with_body(frame, body))
        await self._release(body_key)

    async def _release(self, body_key: str) -> None:
        # One reader only, and it has the body: waiting out the expiry would keep large bodies in memory for minutes.
        try:
            await self._connection.put(body_key, b"", ttl_ms=1)
        except DispatchError:
            return  # the key has an expiry anyway


def with_body(frame: Frame, body: bytes | None) -> Outcome:
    """Return the reply of `frame` with its body, or the error that it is gone."""
    if body is None:
        return FabricError(
            f"the body of the reply to request {frame.reply.request_id} (ended {frame.reply.ending}) is gone: "
            "it was not read within its expiry"
        )
    return msgspec.structs.replace(frame.reply, body=body)

"""Telling those who watch the group that its state has changed. The server lets one gateway do it for all.

A look costs the server some tens of microseconds; nothing else of a gateway waits for it.
"""

from __future__ import annotations

import random

import anyio
import structlog

from dispatch.fabric.functions import snapshot_publish
from dispatch.gateway.link import PROBLEMS, Link

log = structlog.get_logger(__name__)

_PAUSE_S = 1.0  # after a call that was not answered
_LONGEST_S = 2.0


class Publisher:
    """Looks at the group whenever the server says that it is this gateway's turn to."""

    def __init__(self, link: Link, gateway_id: str) -> None:
        self._link = link
        self._gateway_id = gateway_id

    async def run(self) -> None:
        """Publish until cancelled, whatever the server does."""
        while True:
            try:
                answer = await self._link.once(snapshot_publish(self._gateway_id))
                pause = min(answer.value.again_ms / 1000, _LONGEST_S)
            except PROBLEMS as error:
                log.debug("snapshot_not_published", error=str(error))
                pause = _PAUSE_S * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            await anyio.sleep(pause)

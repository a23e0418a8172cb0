"""Requests past their deadline without a reply: the group is asked to end them now, not at a gateway's next heartbeat.

The server's clock decides which are past it; this process only chooses when to ask.
"""

from __future__ import annotations

import asyncio

import structlog

from dispatch.errors import DispatchError
from dispatch.fabric import functions
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Reaped
from dispatch.fabric.schema import LIMITS

_log = structlog.get_logger(__name__)

ROUNDS_MAX = 50
"""Calls in a row, each of a bounded batch, before the callers look whether theirs was among them."""


class Overdue:
    """Asks once for all callers that want to know at the same time."""

    def __init__(self, connection: Connection, group: str) -> None:
        self._connection = connection
        self._group = group
        self._wanted = asyncio.Event()

    def ask(self) -> None:
        """Have what is overdue ended soon."""
        self._wanted.set()

    async def run(self) -> None:
        """Pass the questions on until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                for _ in range(ROUNDS_MAX):
                    if not (await self._connection.run(self._group, end_overdue())).more:
                        break
            except DispatchError as error:
                _log.debug("overdue_not_ended", reason=str(error))  # whoever still waits asks again


def end_overdue() -> FunctionCall[Reaped]:
    """Make the call that ends what is past its deadline."""
    return functions.lease_reap(limit=LIMITS["reap_max"])

"""redis-py connections that leave a server which says that it is a read-only replica.

After a failover the address leads to another server, but a connection that is open stays with the old one, which would
refuse every write for ever. So the next command after such an answer goes over a new connection.
"""

from __future__ import annotations

from typing import Any

from redis import connection as blocking
from redis.asyncio import connection as waiting
from redis.exceptions import ReadOnlyError

from dispatch.fabric.patience import Impatient


class _Leaving:
    _demoted = False

    def read_response(self, *args: Any, **more: Any) -> Any:
        try:
            return super().read_response(*args, **more)  # type: ignore[misc]  # mixed into a connection
        except ReadOnlyError:
            self._demoted = True
            raise

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._demoted:
            self._demoted = False
            self.disconnect()  # type: ignore[attr-defined]  # of the connection it is mixed into
        super().send_packed_command(command, check_health)  # type: ignore[misc]  # mixed into a connection


class _LeavingAsync:
    _demoted = False

    async def read_response(self, *args: Any, **more: Any) -> Any:
        try:
            return await super().read_response(*args, **more)  # type: ignore[misc]  # mixed into a connection
        except ReadOnlyError:
            self._demoted = True
            raise

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._demoted:
            self._demoted = False
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]  # of the connection it is mixed into
        await super().send_packed_command(command, check_health)  # type: ignore[misc]  # mixed into a connection


class BlockingConnection(_Leaving, Impatient, blocking.Connection):
    """A plain blocking connection."""


class BlockingTLSConnection(_Leaving, Impatient, blocking.SSLConnection):
    """A blocking connection over TLS."""


class AsyncConnection(_LeavingAsync, waiting.Connection):
    """A plain async connection."""


class AsyncTLSConnection(_LeavingAsync, waiting.SSLConnection):
    """An async connection over TLS."""

"""The blocking connection behind the async protocol, so that one suite runs on all three."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import anyio

from dispatch.fabric.sync import BlockingConnection, BlockingWaiter

TIMEOUT_S = 5.0


class AsyncView:
    """Runs every method of a blocking object in a thread."""

    def __init__(self, blocking: BlockingConnection | BlockingWaiter) -> None:
        self._blocking = blocking

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._blocking, "close" if name == "aclose" else name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await anyio.to_thread.run_sync(functools.partial(method, *args, **kwargs))

        return call

    def waiter(self) -> AsyncView:
        assert isinstance(self._blocking, BlockingConnection)
        return AsyncView(self._blocking.waiter())


async def connect_blocking(url: str) -> AsyncView:
    """Open a blocking connection as `connect` opens an async one: the server has answered once."""
    connection = await anyio.to_thread.run_sync(lambda: BlockingConnection(url, timeout_s=TIMEOUT_S))
    await anyio.to_thread.run_sync(connection.get, "{}")
    return AsyncView(connection)

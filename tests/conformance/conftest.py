"""Every test here runs on each client: what a connection promises does not depend on who keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis

from dispatch.fabric.connecting import connect
from tests.support.blocking import connect_blocking
from tests.support.valkey import ValkeyProcess

CLIENTS = ("glide", "redis", "blocking")

Opener = Callable[[str], Awaitable[Any]]


@pytest.fixture(params=CLIENTS)
def client_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def open_connection(client_name: str) -> AsyncIterator[Opener]:
    """Open connections that are closed when the test ends."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_(url: str) -> Any:
            opened = await (connect_blocking(url) if client_name == "blocking" else connect(url, client=client_name))
            stack.push_async_callback(opened.aclose)
            return opened

        yield open_


@pytest.fixture
async def connection(valkey: ValkeyProcess, open_connection: Opener) -> Any:
    return await open_connection(valkey.url)


@pytest.fixture
def eye(valkey: ValkeyProcess) -> Any:
    """A plain client beside the connection under test: it prepares and looks."""
    with redis.Redis(port=valkey.port) as client:
        yield client

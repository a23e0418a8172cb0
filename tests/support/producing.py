"""What the producer tests share: groups with room, an eye of their own, and things to wait for."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import redis

from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Lease
from dispatch.fabric.schema import key
from tests.support.echo_gateway import Scripted
from tests.support.groups import configure, default_document, unique_group

MESSAGES = [{"role": "user", "content": "hello"}]


def wide_document(**changes: Any) -> dict[str, Any]:
    """Return the default config with room for many running requests."""
    return default_document() | {"total_concurrent_dispatch": 1000} | changes


def wide_group(url: str, **changes: Any) -> str:
    """Configure a new group with room for many running requests."""
    name = unique_group()
    configure(url, name, wide_document(**changes))
    return name


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """Connect to a server of the test's own."""
    connection = await connect(url)
    try:
        yield connection
    finally:
        await connection.aclose()


def eye(url: str) -> redis.Redis:
    """Return an independent client."""
    return redis.Redis.from_url(url.replace("valkey://", "redis://"))


def say(text: str) -> list[dict[str, str]]:
    """Return messages of one user turn."""
    return [{"role": "user", "content": text}]


def said(body: bytes) -> str:
    """Return the text that `say` put into `body`."""
    return str(json.loads(body)["messages"][0]["content"])


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    """Wait until `condition` holds; for states of other processes that announce nothing."""
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - the state is another process's, there is nothing to await
            await anyio.sleep(0.01)


def after(low_s: float, high_s: float) -> Callable[[Lease, bytes], Awaitable[Scripted]]:
    """Return a script that echoes after a random time."""
    chance = random.Random(7)

    async def script(_lease: Lease, body: bytes) -> Scripted:
        await anyio.sleep(chance.uniform(low_s, high_s))
        return Scripted(body=body)

    return script


async def never(_lease: Lease, _body: bytes) -> Scripted:
    """Run until cancelled."""
    await anyio.sleep_forever()
    raise AssertionError


def frames_left(url: str, group: str, producer_id: str) -> int:
    """Return the length of a producer's reply list."""
    with eye(url) as client:
        return int(client.llen(key(group, "replies", producer=producer_id)))


def owner(url: str, group: str, producer_id: str) -> bytes | None:
    """Return the session that owns a producer, None when it is not alive."""
    with eye(url) as client:
        found: bytes | None = client.get(key(group, "alive", producer=producer_id))
        return found


def stopwatch() -> Callable[[], float]:
    """Return a function that says how many seconds have passed since now."""
    started = time.monotonic()
    return lambda: time.monotonic() - started

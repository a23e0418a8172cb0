"""Waiting for tokens: what comes, what must not be lost, and that no wait lasts for ever."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import redis

from dispatch.errors import FabricUnavailable
from dispatch.fabric.connection import WAIT_MARGIN_S, WAIT_MAX_S, WAIT_MIN_S, bounded_wait

pytestmark = pytest.mark.anyio

ASYNC_CLIENTS = pytest.mark.parametrize("client_name", ["glide", "redis"])


@pytest.fixture
async def waiter(connection) -> AsyncIterator[Any]:
    made = connection.waiter()
    yield made
    await made.aclose()


@pytest.fixture
def key(group: str) -> str:
    return f"{{{group}}}:tokens"


async def until(condition: Any) -> None:
    """Look again until the server shows what is waited for."""
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 - a server has no event to await
            await anyio.sleep(0.005)


def blocked(eye: Any) -> int:
    return int(eye.info("clients")["blocked_clients"])


async def test_a_token_that_is_there_comes_at_once(waiter, connection, key, eye) -> None:
    await connection.push_token(key)
    await connection.push_token(key)
    assert await waiter.wait(key, 5) is True
    assert eye.llen(key) == 1


async def test_a_token_pushed_while_waiting_wakes(waiter, connection, key, eye) -> None:
    started = time.monotonic()

    async def push() -> None:
        await until(lambda: blocked(eye) == 1)
        await connection.push_token(key)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(push)
        assert await waiter.wait(key, 8) is True
    assert time.monotonic() - started < 4


async def test_a_list_is_read_with_the_token_that_tells_of_it(waiter, connection, key, eye) -> None:
    replies = key.replace("tokens", "list")

    async def push() -> None:
        await until(lambda: blocked(eye) == 1)
        eye.rpush(replies, b"first", b"second", b"third")
        await connection.push_token(key)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(push)
        assert await waiter.wait_then_read(key, 8, replies, 2) == [b"first", b"second"]
    assert eye.llen(key) == 0
    assert eye.llen(replies) == 3


async def test_a_list_is_read_after_the_time_without_a_token(waiter, key, eye) -> None:
    replies = key.replace("tokens", "list")
    assert await waiter.wait_then_read(key, 0.1, replies, 10) == []
    eye.rpush(replies, b"first")
    assert await waiter.wait_then_read(key, 0.1, replies, 10) == [b"first"]


async def test_no_token_is_false_after_the_time(waiter, key) -> None:
    started = time.monotonic()
    assert await waiter.wait(key, 0.3) is False
    assert 0.25 < time.monotonic() - started < 1.5


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
async def test_no_wait_lasts_for_ever(waiter, key, seconds) -> None:
    with anyio.fail_after(2):
        assert await waiter.wait(key, seconds) is False


def test_waits_are_bounded() -> None:
    assert bounded_wait(math.inf) == WAIT_MAX_S
    assert bounded_wait(-math.inf) == bounded_wait(0) == bounded_wait(math.nan) == WAIT_MIN_S
    assert bounded_wait(1.5) == 1.5


async def test_a_wait_may_be_longer_than_a_call(waiter, key, monkeypatch) -> None:
    for module in ("glide", "redis_client", "sync"):
        monkeypatch.setattr(f"dispatch.fabric.{module}.REQUEST_TIMEOUT_S", 0.2)
    assert await waiter.wait(key, 1.0) is False
    assert await waiter.wait_then_read(key, 1.0, key + "-list", 1) == []


async def test_a_waiter_serves_one_wait_after_the_other(waiter, connection, key) -> None:
    for _ in range(3):
        assert await waiter.wait(key, 0.05) is False
        await connection.push_token(key)
        assert await waiter.wait(key, 5) is True


async def test_waiting_does_not_hold_up_calls(waiter, connection, key, eye) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiter.wait, key, 5)
        await until(lambda: blocked(eye) == 1)
        with anyio.fail_after(2):
            await connection.get(key + ":other")
            await connection.push_token(key)


@ASYNC_CLIENTS
async def test_an_abandoned_wait_does_not_swallow_the_next_token(waiter, connection, key, eye) -> None:
    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiter.wait, key, 30)
            await until(lambda: blocked(eye) == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: blocked(eye) == 0)
        await connection.push_token(key)
        assert eye.llen(key) == 1
        assert await waiter.wait(key, 5) is True


@ASYNC_CLIENTS
async def test_a_wait_under_way_ends_when_its_waiter_is_closed(waiter, key, eye) -> None:
    outcome: list[Any] = []

    async def wait() -> None:
        try:
            outcome.append(await waiter.wait(key, 30))
        except FabricUnavailable as error:
            outcome.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: blocked(eye) == 1)
            await waiter.aclose()
    assert outcome[0] is False or isinstance(outcome[0], FabricUnavailable)
    await until(lambda: blocked(eye) == 0)


async def test_a_server_that_stops_answering_ends_the_wait(start_valkey, open_connection) -> None:
    server = start_valkey(library=False)
    connection = await open_connection(server.url)
    waiter = connection.waiter()
    assert await waiter.wait("{g}:t", 0.05) is False
    server.pause()
    started = time.monotonic()
    with pytest.raises(FabricUnavailable):
        await waiter.wait("{g}:t", 0.3)
    assert time.monotonic() - started < 0.3 + WAIT_MARGIN_S + 1
    server.resume()
    with redis.Redis(port=server.port) as eye:
        await until(lambda: blocked(eye) == 0)
    await connection.push_token("{g}:t")
    assert await waiter.wait("{g}:t", 5) is True
    await waiter.aclose()


async def test_a_server_that_dies_ends_the_wait_and_a_new_one_is_found(start_valkey, open_connection) -> None:
    server = start_valkey(library=False)
    connection = await open_connection(server.url)
    waiter = connection.waiter()

    async def kill() -> None:
        await anyio.sleep(0.2)
        server.kill()

    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(FabricUnavailable):
                await waiter.wait("{g}:t", 3)
    server.start()
    assert await waiter.wait("{g}:t", 0.05) is False
    await waiter.aclose()

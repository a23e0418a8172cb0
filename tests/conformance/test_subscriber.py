"""Hearing a channel: what is said while one listens comes in order, and nothing of it is lost by waiting badly."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
import redis

from dispatch.errors import FabricUnavailable
from dispatch.fabric.connecting import connect
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("client_name", ["glide", "redis"])]


@pytest.fixture
def channel(group: str) -> str:
    return f"{{{group}}}:channel"


@pytest.fixture
async def subscriber(connection, channel) -> AsyncIterator[Any]:
    made = connection.subscriber(channel)
    yield made
    await made.aclose()


async def listening(subscriber: Any, channel: str, eye: Any) -> None:
    """Subscribe, and wait until the server knows."""
    assert await subscriber.next(0.05) is None
    with anyio.fail_after(5):
        while eye.pubsub_numsub(channel)[0][1] == 0:  # noqa: ASYNC110 - a server has no event to await
            await anyio.sleep(0.005)


async def test_messages_come_in_order(subscriber, channel, eye) -> None:
    await listening(subscriber, channel, eye)
    said = [f"message {number}".encode() for number in range(50)]
    for text in said:
        assert eye.publish(channel, text) == 1
    assert [await subscriber.next(5) for _ in said] == said
    assert await subscriber.next(0.05) is None


async def test_other_channels_are_not_heard(subscriber, channel, eye) -> None:
    await listening(subscriber, channel, eye)
    eye.publish(f"{channel}:other", b"no")
    eye.publish(channel, b"yes")
    assert await subscriber.next(5) == b"yes"


async def test_a_message_wakes_who_waits(subscriber, channel, eye) -> None:
    await listening(subscriber, channel, eye)
    heard: list[bytes | None] = []

    async def wait() -> None:
        heard.append(await subscriber.next(20))

    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.05)
        eye.publish(channel, b"now")
    assert heard == [b"now"]
    assert time.monotonic() - started < 10


async def test_a_wait_that_is_cancelled_loses_no_message(subscriber, channel, eye) -> None:
    await listening(subscriber, channel, eye)
    for number in range(20):
        with anyio.move_on_after(0.001):
            await subscriber.next(10)
        eye.publish(channel, b"%d" % number)
        assert await subscriber.next(5) == b"%d" % number


async def test_closing_is_repeatable_and_the_next_wait_subscribes_again(subscriber, channel, eye) -> None:
    await listening(subscriber, channel, eye)
    await subscriber.aclose()
    await subscriber.aclose()
    with anyio.fail_after(5):
        while eye.pubsub_numsub(channel)[0][1] != 0:  # noqa: ASYNC110 - as above
            await anyio.sleep(0.005)
    await listening(subscriber, channel, eye)
    eye.publish(channel, b"again")
    assert await subscriber.next(5) == b"again"


async def test_without_a_server_it_is_said(client_name: str, start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(library=False)
    connection = await connect(server.url, client=client_name)
    subscriber = connection.subscriber("channel")
    server.kill()
    with pytest.raises(FabricUnavailable):
        await subscriber.next(0.05)
    await subscriber.aclose()
    await connection.aclose()


async def test_it_hears_again_when_the_server_is_back(
    client_name: str, start_valkey: Callable[..., ValkeyProcess]
) -> None:
    server = start_valkey(library=False)
    connection = await connect(server.url, client=client_name)
    subscriber = connection.subscriber("channel")
    assert await subscriber.next(0.05) is None
    server.kill()
    server.restart()
    with redis.Redis(port=server.port) as eye, anyio.fail_after(20):
        while (heard := await next_or_none(subscriber)) is None:
            eye.publish("channel", b"back")
    assert heard == b"back"
    await subscriber.aclose()
    await connection.aclose()


async def next_or_none(subscriber: Any) -> bytes | None:
    try:
        found: bytes | None = await subscriber.next(0.1)
    except FabricUnavailable:
        await anyio.sleep(0.05)
        return None
    return found

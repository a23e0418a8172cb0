"""Keys and levels from the SDK's arguments to the order in which a gateway runs the calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dispatch.config import GatewaySettings
from dispatch.errors import InvalidRequest
from dispatch.gateway import Gateway
from dispatch.producer.client import DispatchClient
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.by_hand import ByHand
from tests.support.executors import HeldExecutor
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio


class OneAtATime:
    """A group that runs one call at a time, with a call in front of all others that ends when it is told to."""

    def __init__(self, hand: ByHand, client: DispatchClient, executor: HeldExecutor) -> None:
        self.hand = hand
        self._client = client
        self._executor = executor
        self._calls: list[asyncio.Task[Any]] = []

    async def send(self, name: str, **options: Any) -> None:
        """Send a call and wait until it is queued."""
        waiting = self.hand.pool("default")["pending"]
        call = self._client.complete(model="m", messages=MESSAGES, request_id=name, timeout=30, **options)
        self._calls.append(asyncio.create_task(call))
        with anyio.fail_after(5):
            while self.hand.pool("default")["pending"] == waiting:  # noqa: ASYNC110 - the server's state announces nothing
                await anyio.sleep(0.002)

    async def order(self) -> Sequence[str]:
        """Let everything run and return in which order it began."""
        self._executor.release()
        await asyncio.gather(*self._calls)
        return list(self._executor.begun)[1:]


@asynccontextmanager
async def one_at_a_time(valkey: ValkeyProcess) -> AsyncIterator[OneAtATime]:
    group = unique_group()
    configure(valkey.url, group, default_document() | {"total_concurrent_dispatch": 1})
    hand, executor = ByHand(valkey.url, group), HeldExecutor()
    settings = GatewaySettings(valkey_url=valkey.url, fabric_group=group, drain_timeout_ms=1000)
    async with (
        Gateway(settings, executor=executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(client.complete(model="m", messages=MESSAGES, request_id="in-front", timeout=30))
        await executor.until_begun(1)
        yield OneAtATime(hand, client, executor)
    hand.close()


async def test_a_user_who_floods_the_pool_does_not_hold_up_another(valkey: ValkeyProcess) -> None:
    async with one_at_a_time(valkey) as group:
        for number in range(12):
            await group.send(f"flood-{number}", fairness_key="anna")
        for number in range(4):
            await group.send(f"few-{number}", fairness_key="ben")
        order = await group.order()
    users = [name.partition("-")[0] for name in order]
    assert users[:8] in (["flood", "few"] * 4, ["few", "flood"] * 4)
    assert users[8:] == ["flood"] * 8
    assert [name for name in order if name.startswith("flood")] == [f"flood-{number}" for number in range(12)]


async def test_calls_without_a_key_share_one_flow_beside_the_keys(valkey: ValkeyProcess) -> None:
    async with one_at_a_time(valkey) as group:
        for number in range(6):
            await group.send(f"plain-{number}")
        for number in range(3):
            await group.send(f"keyed-{number}", fairness_key="ben")
        order = [name.partition("-")[0] for name in await group.order()]
    assert order[:6].count("keyed") == 3


async def test_a_better_level_goes_first_among_the_calls_of_a_key(valkey: ValkeyProcess) -> None:
    async with one_at_a_time(valkey) as group:
        for level in (3, 2, None, 1, 0):
            await group.send(f"level-{level}", priority=level, fairness_key="anna")
        order = await group.order()
    assert order == ["level-0", "level-None", "level-1", "level-2", "level-3"]


def test_what_waited_long_enough_goes_before_a_better_level(valkey: ValkeyProcess) -> None:
    group = unique_group()
    document = default_document()
    document["pools"][3]["priority_ageing_ms"] = 100
    configure(valkey.url, group, document)
    hand = ByHand(valkey.url, group)
    [old] = hand.submit(priority=3)
    [urgent] = hand.submit(priority=0)
    time.sleep(0.31)  # the time itself is what is tried: three levels at 100 ms
    [late] = hand.submit(priority=0)
    assert [lease.request_id for lease in hand.claim(3)] == [urgent, old, late]
    hand.close()


async def test_keys_and_levels_are_seen_while_a_request_waits_and_in_its_envelope(valkey: ValkeyProcess) -> None:
    async with one_at_a_time(valkey) as group:
        await group.send("told", fairness_key="anna", priority=2)
        [row] = group.hand.section("waiting", subject="default")["rows"]
        assert (row["request_id"], row["fairness_key"], row["priority"]) == ("told", "anna", 2)
        await group.order()


async def test_items_of_a_batch_have_their_own_keys(valkey: ValkeyProcess) -> None:
    async with one_at_a_time(valkey) as group:
        items = [{"model": "m", "messages": MESSAGES, "fairness_key": name, "priority": 0} for name in ("anna", "b b")]
        batch = asyncio.create_task(group._client.batch_generate(items))
        with anyio.fail_after(5):
            while group.hand.pool("default")["pending"] == 0:  # noqa: ASYNC110 - the server's state announces nothing
                await anyio.sleep(0.002)
        [row] = group.hand.section("waiting", subject="default")["rows"]
        assert (row["fairness_key"], row["priority"]) == ("anna", 0)
        await group.order()
        reply, error = await batch
    assert reply.succeeded
    assert isinstance(error, InvalidRequest)
    assert error.param == "fairness_key"


def test_the_blocking_client_takes_them_too(valkey: ValkeyProcess, group: str) -> None:
    with BlockingClient(valkey.url, fabric_group=group) as client, pytest.raises(InvalidRequest) as caught:
        client.complete(model="m", messages=MESSAGES, priority=4)
    assert caught.value.param == "priority"

from __future__ import annotations

from typing import Any

import anyio
import pytest

from dispatch.contract import Reply, ReplyHead
from dispatch.errors import ConfigurationError, FabricError
from dispatch.producer.batch import Item, run_batch

pytestmark = pytest.mark.anyio


def reply(item: Item) -> Reply:
    return Reply(request_id=str(item["n"]), pool_id="default", ending="succeeded", head=ReplyHead())


ITEMS = [{"n": number} for number in range(10)]


async def test_order_is_kept_and_no_more_run_than_allowed() -> None:
    running = most = 0

    async def complete(item: Item) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001 * (10 - item["n"]))
        running -= 1
        if item["n"] == 3:
            raise FabricError("three")
        return reply(item)

    results = await run_batch(ITEMS, complete, None, 4)
    names = [str(result) if isinstance(result, Exception) else result.request_id for result in results]
    assert names == ["0", "1", "2", "three", "4", "5", "6", "7", "8", "9"]
    assert most == 4


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_progress_is_told_one_at_a_time_and_in_order(asynchronous: bool) -> None:
    told: list[tuple[int, int]] = []

    async def slowly(done: int, total: int) -> None:
        await anyio.sleep(0.001)
        told.append((done, total))

    def at_once(done: int, total: int) -> None:
        told.append((done, total))

    async def complete(item: Item) -> Reply:
        return reply(item)

    await run_batch(ITEMS, complete, slowly if asynchronous else at_once, 10)
    assert told == [(done, 10) for done in range(1, 11)]


async def test_an_error_of_progress_comes_out_as_itself_and_cancels_the_rest() -> None:
    cancelled: list[Any] = []

    async def complete(item: Item) -> Reply:
        if item["n"] == 0:
            return reply(item)
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(item["n"])

    def fail(_done: int, _total: int) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await run_batch(ITEMS, complete, fail, 3)
    assert sorted(cancelled) == [1, 2]


async def test_nothing_is_nothing() -> None:
    async def complete(item: Item) -> Reply:
        return reply(item)

    assert await run_batch([], complete, None, 5) == []


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5])
async def test_the_bound_has_to_be_one(concurrency: Any) -> None:
    async def complete(item: Item) -> Reply:
        return reply(item)

    with pytest.raises(ConfigurationError, match="concurrency"):
        await run_batch(ITEMS, complete, None, concurrency)

"""Looking at a group for many watchers: one look for all, and what may be missing between two looks is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from dispatch.errors import FabricUnavailable
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.schema import key
from dispatch.ingress.control.watching import NOTHING, Look, Watch, event_id

pytestmark = pytest.mark.anyio


class FakeGroup:
    """A group with so many events, the newest of which are `1-n`; `oldest` is the first that is still there."""

    def __init__(self, count: int, oldest: int = 1) -> None:
        self.ids = [f"1-{number}" for number in range(oldest, count + 1)][::-1]
        self.reads = 0
        self.problem: Exception | None = None

    async def run(self, call: FunctionCall[Any]) -> Any:
        self.reads += 1
        section, cursor, limit, _ = call.args
        if section == "group":
            return {"server_ms": 7, "generation": 1, "pending": 0}
        start = self.ids.index(str(cursor)) + 1 if cursor else 0
        rows = [{"event_id": name} for name in self.ids[start : start + int(limit)]]
        return {"rows": rows, "cursor": rows[-1]["event_id"] if len(rows) == limit else ""}

    async def run_many(self, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        await anyio.lowlevel.checkpoint()
        if self.problem is not None:
            raise self.problem
        return [await self.run(call) for call in calls]


def watch(group: FakeGroup, every_s: float = 3600.0) -> Watch:
    return Watch(group, every_s)  # type: ignore[arg-type]  # it has what is asked of it


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [event_id(row["event_id"])[1] for row in rows]


async def test_however_many_watch_the_group_is_looked_at_once() -> None:
    group = FakeGroup(3)
    watching = watch(group)
    looks: list[Look] = []

    async def one() -> None:
        looks.append(await watching.look())

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(one)
    assert group.reads == 2
    assert len({id(look) for look in looks}) == 1
    assert (looks[0].newest, looks[0].whole, looks[0].totals["pending"]) == ((1, 3), True, 0)


async def test_what_the_server_does_is_part_of_the_look() -> None:
    group = FakeGroup(3)
    group.problem = FabricUnavailable("away")
    watching = watch(group, 0.0)
    assert (await watching.look()).problem == "away"
    group.problem = None
    assert (await watching.look()).problem == ""


@pytest.mark.parametrize(
    ("count", "oldest", "last", "first", "complete"),
    [
        (3, 1, (1, 1), 2, True),
        (3, 1, (1, 3), None, True),
        (3, 1, NOTHING, 1, True),  # there was none before
        (3, 2, (1, 1), 2, False),  # it was trimmed, and perhaps others with it
        (500, 1, (1, 100), 101, True),
        (500, 300, (1, 100), 300, False),
        (5000, 1, (1, 100), 2951, False),  # too far behind for one answer: a bounded number of pages is read
    ],
)
async def test_the_events_since_the_last_one_come_in_order_and_gaps_are_known(
    count: int, oldest: int, last: tuple[int, int], first: int | None, complete: bool
) -> None:
    group = FakeGroup(count, oldest)
    watching = watch(group)
    rows, whole = await watching.since(last, await watching.look())
    assert numbers(rows) == ([] if first is None else list(range(first, count + 1)))
    assert whole is complete
    assert group.reads <= 12


async def test_a_group_without_events_has_nothing_new() -> None:
    watching = watch(FakeGroup(0))
    look = await watching.look()
    assert look.newest == NOTHING
    assert await watching.since(NOTHING, look) == ([], True)


class FakeChannel:
    """A channel that says what a test says, and an error when it is told to."""

    def __init__(self) -> None:
        self.messages: list[bytes | Exception | None] = []
        self.more = anyio.Event()
        self.closed = False

    def say(self, *messages: bytes | Exception | None) -> None:
        self.messages += messages
        self.more.set()

    def subscriber(self, channel: str) -> FakeChannel:
        assert channel == key("g", "snapshot_channel")
        return self

    async def next(self, _seconds: float) -> bytes | None:
        while not self.messages:
            self.more = anyio.Event()
            await self.more.wait()
        found = self.messages.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def aclose(self) -> None:
        self.closed = True


def message(sequence: int, *changed: str) -> bytes:
    return msgspec.json.encode({"sequence": sequence, "changed": changed, "pending": 1})


async def settle() -> None:
    """Let the listener take in what was said."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_the_channel_says_when_to_look() -> None:
    group, channel = FakeGroup(3), FakeChannel()
    group.name, group.connection = "g", channel  # type: ignore[attr-defined]  # it has what is asked of it
    watching = watch(group, 0.0)
    async with watching.watching():
        first = await watching.look()
        assert await watching.look() is not first  # nobody is heard: it has to look
        channel.say(message(7))
        await settle()
        assert watching.heard
        seen = await watching.look()
        assert [await watching.look() for _ in range(5)] == [seen] * 5
        channel.say(message(8))  # a repetition
        await settle()
        assert await watching.look() is seen
        for told in (message(9, "events"), message(11)):  # a change, and a message after one that was lost
            channel.say(told)
            await settle()
            newer = await watching.look()
            assert newer is not seen
            seen = newer
        channel.say(b"not ours", message(12))
        await settle()
        assert await watching.look() is seen
    await settle()
    assert channel.closed


@pytest.mark.parametrize("trouble", [None, FabricUnavailable("away")])
async def test_a_channel_that_is_silent_or_away_is_not_relied_on(trouble: Exception | None) -> None:
    group, channel = FakeGroup(3), FakeChannel()
    group.name, group.connection = "g", channel  # type: ignore[attr-defined]  # as above
    watching = watch(group, 0.0)
    async with watching.watching():
        channel.say(message(7))
        await settle()
        seen = await watching.look()
        channel.say(trouble)
        await settle()
        assert not watching.heard
        assert await watching.look() is not seen


async def test_a_wait_ends_with_a_change_and_not_before() -> None:
    group, channel = FakeGroup(3), FakeChannel()
    group.name, group.connection = "g", channel  # type: ignore[attr-defined]  # as above
    watching = watch(group)
    async with watching.watching():
        channel.say(message(7))
        await settle()
        seen = await watching.look()
        with anyio.move_on_after(0.05) as waited:
            await watching.wait(seen)
        assert waited.cancelled_caught
        channel.say(message(8, "pools"))
        with anyio.fail_after(5):
            await watching.wait(seen)
            newer = await watching.look()
            await watching.wait(seen)  # somebody else has looked meanwhile
        assert newer is not seen

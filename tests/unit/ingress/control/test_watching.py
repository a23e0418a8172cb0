"""Looking at a group for many watchers: one look for all, and what may be missing between two looks is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from dispatch.errors import FabricUnavailable
from dispatch.fabric.calls import FunctionCall
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

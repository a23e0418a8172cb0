from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from dispatch.errors import DispatchError, FabricUnavailable, RequestRefused
from dispatch.fabric import functions
from dispatch.fabric.records import Cancellation
from dispatch.producer.pipeline import CALLS_MAX, Pipeline, Ticket
from tests.support.fake_group import GROUP, FakeGroup, Lost

pytestmark = pytest.mark.anyio


def cancel(pipeline: Pipeline, name: str) -> Ticket[Cancellation]:
    return pipeline.enter(functions.request_cancel(name, actor="t"))


async def test_what_arrives_while_a_batch_is_under_way_rides_in_the_next_one() -> None:
    group = FakeGroup()
    group.held_back = anyio.Event()
    pipeline = Pipeline(group, GROUP)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        first = cancel(pipeline, "a")
        await anyio.wait_all_tasks_blocked()
        rest = [cancel(pipeline, f"r{number}") for number in range(CALLS_MAX + 5)]
        await anyio.wait_all_tasks_blocked()
        assert [len(batch) for batch in group.batches] == [1]
        group.held_back.set()
        for ticket in (first, *rest):
            await ticket.answer.wait()
        tasks.cancel_scope.cancel()
    assert [len(batch) for batch in group.batches] == [1, CALLS_MAX, 5]
    assert group.cancels == ["a", *(f"r{number}" for number in range(CALLS_MAX + 5))]


async def test_a_withdrawn_call_is_never_sent() -> None:
    group = FakeGroup()
    group.held_back = anyio.Event()
    pipeline = Pipeline(group, GROUP)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        first = cancel(pipeline, "a")
        await anyio.wait_all_tasks_blocked()
        second = cancel(pipeline, "b")
        assert not first.withdraw()
        assert second.withdraw()
        group.held_back.set()
        assert isinstance(await second.answer.wait(), FabricUnavailable)
        tasks.cancel_scope.cancel()
    assert group.cancels == ["a"]


async def test_a_lost_answer_is_told_to_each_with_an_error_of_its_own() -> None:
    group = FakeGroup()
    group.faults.append(Lost("request_cancel", done=True))
    pipeline = Pipeline(group, GROUP)
    async with anyio.create_task_group() as tasks:
        tickets = [cancel(pipeline, name) for name in "abc"]
        tasks.start_soon(pipeline.run)
        answers = [await ticket.answer.wait() for ticket in tickets]
        tasks.cancel_scope.cancel()
    assert [type(answer) for answer in answers] == [FabricUnavailable] * 3
    assert len({id(answer) for answer in answers}) == 3


async def test_an_error_that_hides_the_other_answers_makes_each_call_be_asked_alone() -> None:
    class Hiding(FakeGroup):
        async def run_many(self, group, calls):
            await super().run_many(group, calls)
            raise RequestRefused("memory_full")

    group = Hiding()
    pipeline = Pipeline(group, GROUP)
    async with anyio.create_task_group() as tasks:
        tickets = [cancel(pipeline, name) for name in "ab"]
        tasks.start_soon(pipeline.run)
        answers = [await ticket.answer.wait() for ticket in tickets]
        alone = await cancel(pipeline, "c").answer.wait()
        tasks.cancel_scope.cancel()
    assert answers == [Cancellation("UNKNOWN")] * 2
    assert isinstance(alone, RequestRefused)


async def test_whoever_still_waits_at_the_end_is_answered() -> None:
    group = FakeGroup()
    group.held_back = anyio.Event()
    pipeline = Pipeline(group, GROUP)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        sent = cancel(pipeline, "a")
        await anyio.wait_all_tasks_blocked()
        waiting = cancel(pipeline, "b")
        tasks.cancel_scope.cancel()
    late = cancel(pipeline, "c")
    answers: list[Cancellation | DispatchError] = [await ticket.answer.wait() for ticket in (sent, waiting, late)]
    assert [type(answer) for answer in answers] == [FabricUnavailable] * 3
    assert (sent.sent, waiting.sent, late.sent) == (True, False, False)

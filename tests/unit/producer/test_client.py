"""The asynchronous client on a group in memory: what a real server does too rarely to wait for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from dispatch import DispatchClient
from dispatch.contract import Operation, Reply, read_call
from dispatch.errors import (
    ContractError,
    ContractMismatch,
    DispatchError,
    FabricError,
    FabricUnavailable,
    InvalidRequest,
    LibraryProblem,
    PoolUnknown,
    RequestEnded,
    RequestRefused,
    StateConflict,
)
from dispatch.fabric.schema import key
from dispatch.producer import errand as errand_module
from dispatch.producer.options import CallOptions
from dispatch.producer.pipeline import SENDERS
from tests.support.fake_group import GROUP, FakeGroup, Lost
from tests.support.producing import MESSAGES, said, say, stopwatch, until

pytestmark = pytest.mark.anyio

NOWHERE = "valkey://127.0.0.1:1"  # only for signs of life, which are far apart here


def client_of(group: FakeGroup, **options: Any) -> DispatchClient:
    return DispatchClient(NOWHERE, fabric_group=GROUP, connection=group, **options)


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
async def client(group: FakeGroup) -> AsyncIterator[DispatchClient]:
    async with client_of(group) as opened:
        yield opened


async def test_concurrent_submits_ride_together(group: FakeGroup, client: DispatchClient) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(_echoes, client, str(number))
    assert len(group.requests) == 50
    assert group.calls.count("request_submit") < 5


async def _echoes(client: DispatchClient, text: str) -> None:
    reply = await client.complete(model="m", messages=say(text))
    assert said(reply.body) == text


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("size", [10, 5_000])
async def test_a_submit_whose_answer_is_lost_is_repeated_and_never_a_second_request(
    group: FakeGroup, client: DispatchClient, done: bool, size: int
) -> None:
    group.auto = False
    group.faults += [Lost("request_submit", done=done), Lost("request_submit", done=True)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_echoes, client, "x" * size)
        await until(lambda: group.calls.count("request_submit") == (3 if done else 2))
        [held] = group.requests.values()
        group.end(held.request_id, body=held.body)
    assert len(group.requests) == 1
    # Stored once: storing it again would shorten the expiry that admission has set.
    assert len([put for put in group.puts if put[2] > 1]) == (1 if size > 4096 else 0)


async def test_a_reply_that_is_faster_than_the_submits_answer_is_taken(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.faults += [Lost("request_submit", done=True)] * 50
    reply = await client.complete(model="m", messages=MESSAGES)
    assert reply.succeeded
    assert len(group.faults) > 40


async def test_a_stored_body_that_expired_before_the_submit_is_stored_again(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.refuse.append(["REFUSED", "body_missing", 0, 5000, -1])
    await _echoes(client, "x" * 5000)
    assert [size > 5000 for _, size, ttl_ms in group.puts if ttl_ms > 1] == [True, True]


async def test_a_body_that_cannot_be_stored_is_tried_again_before_anything_is_submitted(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.faults += [Lost("put", done=False)] * 2
    await _echoes(client, "x" * 5000)
    assert group.calls.count("request_submit") == 1


async def test_no_answer_within_the_bound_is_said_and_the_request_is_cancelled(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.auto = False
    group.faults += [Lost("request_submit", done=True)] * 100
    call = read_call(Operation.CHAT_COMPLETIONS, b'{"model":"m","messages":[]}')
    passed = stopwatch()
    with pytest.raises(FabricUnavailable, match="not known whether it was queued; if it was, it is cancelled"):
        await client.call(call, CallOptions(request_id="r", admission_ms=200))
    assert passed() < 0.5
    await _until_cancelled(group, "r")


async def test_no_answer_at_all_is_bounded_too(group: FakeGroup, client: DispatchClient) -> None:
    group.held_back = anyio.Event()
    passed = stopwatch()
    with pytest.raises(FabricUnavailable, match="not known"):
        await client.complete(model="m", messages=MESSAGES, timeout=0.2)
    assert passed() < 1.0
    group.held_back.set()
    await until(lambda: bool(group.cancels))


async def test_a_caller_that_leaves_before_its_submit_is_sent_leaves_nothing(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.held_back = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for number in range(SENDERS):
            tasks.start_soon(_echoes, client, f"under way {number}")
            await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.05):
            await client.complete(model="m", messages=MESSAGES, request_id="second")
        group.held_back.set()
    assert list(group.requests) != []
    assert "second" not in group.requests
    assert group.cancels == []


async def test_a_caller_that_leaves_while_its_submit_is_under_way_is_cancelled_after_the_answer(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.auto = False
    group.held_back = anyio.Event()
    with anyio.move_on_after(0.05):
        await client.complete(model="m", messages=MESSAGES, request_id="r")
    assert group.requests == {}
    group.held_back.set()
    await _until_cancelled(group, "r")


async def test_leaving_never_cancels_another_clients_request_of_the_same_id(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.auto = False
    async with client_of(group, producer_id="other") as other, anyio.create_task_group() as tasks:

        async def first() -> None:
            assert (await other.complete(model="m", messages=MESSAGES, request_id="same")).succeeded

        tasks.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(StateConflict):
            await client.complete(model="m", messages=MESSAGES, request_id="same")
        group.faults += [Lost("request_submit", done=True)] * 100
        with pytest.raises(FabricUnavailable):
            await client.complete(model="m", messages=MESSAGES, request_id="same", timeout=0.1)
        await anyio.sleep(0.1)  # its farewell looks whose request that is
        assert group.cancels == []
        group.session = other._path.session.session_id
        group.end("same")


async def test_a_lost_acknowledgement_hands_nothing_over_twice(group: FakeGroup, client: DispatchClient) -> None:
    group.faults += [Lost("reply_ack", done=False)] * 3
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(_echoes, client, str(number))
    await until(lambda: group.frames == [])


async def test_failed_waits_and_reads_delay_but_lose_nothing(group: FakeGroup, client: DispatchClient) -> None:
    for what in ("wait", "read_frames", "wait", "read_frames"):
        group.faults.append(Lost(what, done=False))
        await _echoes(client, what)


@pytest.mark.parametrize("size", [70_000, 300_000])
async def test_a_large_reply_is_read_in_spite_of_lost_answers_and_then_freed(
    group: FakeGroup, client: DispatchClient, size: int
) -> None:
    group.faults += [Lost("get", done=False)] * 2
    await _echoes(client, "x" * size)
    await anyio.wait_all_tasks_blocked()
    assert not any(":reply:" in name for name in group.strings)


async def test_a_reply_body_that_is_gone_is_an_error(group: FakeGroup, client: DispatchClient) -> None:
    group.auto = False
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(FabricError, match=r"ended succeeded\) is gone"):
                await client.complete(model="m", messages=MESSAGES, request_id="r")

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.end("r", large=True)
        group.strings.pop(key(GROUP, "reply_body", id="r"))


async def test_frames_of_another_contract_fail_their_request_only(group: FakeGroup, client: DispatchClient) -> None:
    group.auto = False
    async with anyio.create_task_group() as tasks:

        async def wait(request_id: str, kind: type[DispatchError]) -> None:
            with pytest.raises(kind):
                await client.complete(model="m", messages=MESSAGES, request_id=request_id)

        tasks.start_soon(wait, "newer", ContractMismatch)
        tasks.start_soon(wait, "damaged", ContractError)
        tasks.start_soon(_echoes, client, "well")
        await anyio.wait_all_tasks_blocked()
        group.push("newer", "succeeded", b"{}\n{}", contract=2)
        group.push("damaged", "succeeded", b"no json\n{}")
        [well] = set(group.requests) - {"newer", "damaged"}
        group.end(well, body=group.requests[well].body)


async def test_nobody_waits_longer_than_the_deadline_and_its_grace(
    group: FakeGroup, client: DispatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errand_module, "GRACE_S", 0.7)
    group.auto = False
    with pytest.raises(RequestEnded, match="no reply came by the deadline") as caught:
        await client.complete(model="m", messages=MESSAGES, request_id="r", timeout=0.1)
    assert caught.value.reply.ending == "expired"
    await _until_cancelled(group, "r")
    group.faults += [Lost("wait", done=False), Lost("read_frames", done=False)] * 100
    with pytest.raises(FabricUnavailable, match="Valkey has not answered for"):
        await client.complete(model="m", messages=MESSAGES, timeout=0.1)
    group.faults.clear()


async def test_refusals_and_unknown_pools_leave_nothing_behind(group: FakeGroup, client: DispatchClient) -> None:
    group.refuse.append(["REFUSED", "pool_full", 5, 5, 1200])
    with pytest.raises(RequestRefused) as caught:
        await client.complete(model="m", messages=MESSAGES)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("pool_full", 1200)
    group.faults.append(Lost("request_submit", done=False, error=PoolUnknown("no such pool", known=("a",))))
    with pytest.raises(PoolUnknown):
        await client.complete(model="m", messages=MESSAGES, pool="b")
    with pytest.raises(InvalidRequest):
        await client.complete(model="m", messages=MESSAGES, stream=True)
    assert not client._path.inbox.busy()
    assert group.cancels == []


async def test_requests_the_group_forgot_or_ended_untold_are_told_after_an_interruption(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.auto = False
    outcomes: dict[str, Reply | DispatchError] = {}
    call = read_call(Operation.CHAT_COMPLETIONS, b'{"model":"m","messages":[]}')

    async def wait(request_id: str) -> None:
        try:
            outcomes[request_id] = await client.call(call, CallOptions(request_id=request_id))
        except DispatchError as error:
            outcomes[request_id] = error

    async with anyio.create_task_group() as tasks:
        for name in ("forgotten", "gone", "told", "waits"):
            tasks.start_soon(wait, name)
        await anyio.wait_all_tasks_blocked()
        del group.requests["forgotten"]
        group.requests["gone"].state, group.requests["gone"].ending = "ended", "producer_gone"
        group.faults += [Lost("fabric_snapshot", done=False), Lost("wait", done=False), Lost("read_frames", done=False)]
        group.end("told")
        await until(lambda: len(outcomes) == 3)
        group.end("waits")
    assert isinstance(outcomes["forgotten"], FabricUnavailable)
    gone, told, waits = outcomes["gone"], outcomes["told"], outcomes["waits"]
    assert isinstance(gone, Reply)
    assert isinstance(told, Reply)
    assert isinstance(waits, Reply)
    assert (gone.ending, told.ending, waits.ending) == ("producer_gone", "succeeded", "succeeded")


async def test_another_session_takes_the_producer_over(group: FakeGroup, client: DispatchClient) -> None:
    group.auto = False
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(StateConflict, match="another session owns producer"):
                await client.complete(model="m", messages=MESSAGES, request_id="r")

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.session = "another"
        group.push("unknown", "succeeded", b"{}\n{}")
    with pytest.raises(StateConflict, match="another session owns producer"):
        await client.complete(model="m", messages=MESSAGES)
    await _until_cancelled(group, "r")


async def test_an_error_leaves_the_client_as_itself_and_a_given_connection_open(group: FakeGroup) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client_of(group):
            _ = 1 / 0
    assert not group.closed


async def test_a_client_may_be_opened_and_closed_in_different_tasks(group: FakeGroup) -> None:
    client = client_of(group)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.__aenter__)
    await _echoes(client, "x")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.aclose)
    await client.aclose()
    with pytest.raises(StateConflict, match="not open"):
        await client.complete(model="m", messages=MESSAGES)


async def test_a_cancelled_owner_still_closes_in_order(group: FakeGroup) -> None:
    group.auto = False
    with anyio.move_on_after(0.1):
        async with client_of(group) as client:
            await client.complete(model="m", messages=MESSAGES, request_id="r")
    assert group.requests["r"].ending == "cancelled"


async def test_a_missing_library_is_said_and_nothing_is_started(group: FakeGroup) -> None:
    group.faults.append(Lost("library_version", done=False, error=LibraryProblem("run: dispatch scripts load")))
    client = client_of(group)
    with pytest.raises(LibraryProblem):
        await client.__aenter__()
    assert group.beats == []
    async with client:
        await _echoes(client, "later it works")


async def test_the_first_sign_of_life_is_given_at_the_start(group: FakeGroup) -> None:
    async with client_of(group, liveness_ms=9000, replies_ttl_ms=50_000):
        assert group.beats == [(9000, 50_000)]


async def _until_cancelled(group: FakeGroup, request_id: str) -> None:
    await until(lambda: request_id in group.requests and group.requests[request_id].ending == "cancelled")

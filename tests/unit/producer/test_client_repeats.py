"""The asynchronous client and repeated calls, lapses and leaving, on a group in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from dispatch import DispatchClient
from dispatch.contract import Operation, Reply, read_call
from dispatch.errors import IdempotencyConflict, OutcomeUnknown, RequestEnded, RequestInProgress, StateConflict
from dispatch.fabric.schema import key
from dispatch.producer.options import CallOptions
from tests.support.fake_group import GROUP, FakeGroup
from tests.support.producing import MESSAGES, say

pytestmark = pytest.mark.anyio

FRAME = b"1|0|terminal|first|%s|default|1|2|3|%d|\n{}\n"
CALL = read_call(Operation.CHAT_COMPLETIONS, b'{"model":"m","messages":[]}')


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
async def client(group: FakeGroup) -> AsyncIterator[DispatchClient]:
    async with DispatchClient("valkey://127.0.0.1:1", fabric_group=GROUP, connection=group) as opened:
        yield opened


def replays(group: FakeGroup, ending: bytes = b"succeeded", body: bytes = b"", *, large: bool = False) -> None:
    group.refuse.append([b"REPLAY", b"first", FRAME % (ending, large) + body, b"", b""])


async def test_a_stored_reply_is_handed_over_as_it_is(group: FakeGroup, client: DispatchClient) -> None:
    replays(group, body=b"stored\nbody")
    reply = await client.complete(model="m", messages=MESSAGES, request_id="again")
    assert (reply.request_id, reply.body, reply.replayed) == ("first", b"stored\nbody", True)
    replays(group, ending=b"failed")
    with pytest.raises(RequestEnded) as caught:
        await client.complete(model="m", messages=MESSAGES, request_id="again")
    assert (caught.value.reply.ending, caught.value.reply.replayed) == ("failed", True)
    assert (group.cancels, group.requests) == ([], {})


async def test_a_large_stored_body_is_read_and_stays_for_the_next(group: FakeGroup, client: DispatchClient) -> None:
    where = key(GROUP, "reply_body", id="first")
    group.strings[where] = b"x" * 100_000
    for _ in range(2):
        replays(group, large=True)
        assert len((await client.complete(model="m", messages=MESSAGES, request_id="again")).body) == 100_000
    await anyio.wait_all_tasks_blocked()
    assert where in group.strings
    del group.strings[where]
    replays(group, large=True)
    with pytest.raises(OutcomeUnknown, match=r"stored reply of request first \(ended succeeded\) .* its body is gone"):
        await client.complete(model="m", messages=MESSAGES, request_id="again")


async def test_the_first_ones_large_body_stays_for_its_repeats(group: FakeGroup, client: DispatchClient) -> None:
    await client.complete(model="m", messages=say("x" * 70_000), request_id="first")
    await anyio.wait_all_tasks_blocked()
    assert key(GROUP, "reply_body", id="first") in group.strings


async def test_an_id_this_client_waits_for_is_the_same_call_or_another(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.auto = False
    async with anyio.create_task_group() as tasks:

        async def first() -> None:
            await client.complete(model="m", messages=MESSAGES, request_id="r")

        tasks.start_soon(first)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RequestInProgress, match="this client waits"):
            await client.complete(model="m", messages=MESSAGES, request_id="r")
        with pytest.raises(IdempotencyConflict, match="it is another call"):
            await client.complete(model="m", messages=say("else"), request_id="r")
        group.end("r")


async def test_leaving_cancels_a_named_call_but_not_one_with_a_key(group: FakeGroup, client: DispatchClient) -> None:
    group.auto = False
    for options in (CallOptions(request_id="named"), CallOptions(request_id="keyed", idempotency_key="k")):
        with anyio.move_on_after(0.1):
            await client.call(CALL, options)
    with anyio.fail_after(5):
        while not group.cancels:  # noqa: ASYNC110 - the fake announces nothing
            await anyio.sleep(0.01)
    assert group.cancels == ["named"]
    assert group.requests["keyed"].state == "queued"


async def test_closing_tells_who_waits_with_a_key_and_lets_the_call_go_on(group: FakeGroup) -> None:
    group.auto = False
    told: list[str] = []
    async with DispatchClient("valkey://127.0.0.1:1", fabric_group=GROUP, connection=group) as client:

        async def wait() -> None:
            try:
                await client.call(CALL, CallOptions(idempotency_key="k"))
            except StateConflict as error:
                told.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(1):
                await client.aclose()
    assert told == ["the client was closed; the request goes on: repeat it with its idempotency key"]
    assert group.cancels == []


async def test_a_submit_that_finds_the_marker_gone_looks_after_earlier_requests(
    group: FakeGroup, client: DispatchClient
) -> None:
    """The group took the producer for gone between two signs of life, and the submit has revived it already."""
    group.auto = False
    replies: list[Reply] = []
    async with anyio.create_task_group() as tasks:

        async def wait() -> None:
            replies.append(await client.call(CALL, CallOptions(request_id="dropped")))

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.requests["dropped"].state, group.requests["dropped"].ending = "ended", "producer_gone"
        group.auto, group.lapsed = True, 1
        with anyio.fail_after(5):
            await client.complete(model="m", messages=MESSAGES)
            while not replies:  # noqa: ASYNC110 - told by a task of the client's
                await anyio.sleep(0.01)
    assert [reply.ending for reply in replies] == ["producer_gone"]

"""A request id names one call: the SDK's clients get the first one's reply, or are told that it runs or is another."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dispatch import DispatchClient
from dispatch.contract import Reply
from dispatch.errors import DispatchError, IdempotencyConflict, RequestEnded, RequestInProgress, StateConflict
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Lease, Outcome
from dispatch.fabric.schema import key
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.echo_gateway import EchoGateway, Scripted, echo
from tests.support.leftovers import keys_without_expiry
from tests.support.lossy import LossyConnection
from tests.support.producing import MESSAGES, eye, never, said, say, until, wide_group
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

Complete = Callable[..., Any]


@pytest.fixture(params=["asynchronous", "blocking"])
async def complete(request: pytest.FixtureRequest, valkey: ValkeyProcess, group: str) -> AsyncIterator[Complete]:
    """`complete()` of a client of either kind."""
    if request.param == "asynchronous":
        async with DispatchClient(valkey.url, fabric_group=group) as client:
            yield client.complete
        return
    blocking = BlockingClient(valkey.url, fabric_group=group)
    await anyio.to_thread.run_sync(blocking.__enter__)

    async def run(**arguments: Any) -> Reply:
        return await anyio.to_thread.run_sync(partial(blocking.complete, **arguments))

    yield run
    await anyio.to_thread.run_sync(blocking.close)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_the_same_call_again_gets_the_first_ones_reply(
    valkey: ValkeyProcess, group: str, connection: Connection, complete: Complete, size: int
) -> None:
    async with EchoGateway(connection, group) as gateway:
        first = await complete(model="m", messages=say("x" * size), request_id="r", timeout=30)
        async with DispatchClient(valkey.url, fabric_group=group) as other:
            again = [
                await one(model="m", messages=say("x" * size), request_id="r") for one in (complete, other.complete)
            ]
    assert (first.replayed, [reply.replayed for reply in again]) == (False, [True, True])
    assert {reply.body for reply in again} == {first.body}
    assert {(reply.request_id, reply.attempt, reply.tries) for reply in again} == {("r", 1, ())}
    assert gateway.runs == {"r": 1}
    assert keys_without_expiry(valkey.url, group) == []


async def test_while_it_runs_and_with_another_body_the_errors_say_so(
    group: str, connection: Connection, valkey: ValkeyProcess, complete: Complete
) -> None:
    release = anyio.Event()

    async def held(_lease: Lease, body: bytes) -> Scripted:
        await release.wait()
        return Scripted(body=body)

    async def first() -> None:
        async with DispatchClient(valkey.url, fabric_group=group) as other:
            assert said((await other.complete(model="m", messages=MESSAGES, request_id="r")).body) == "hello"

    async with EchoGateway(connection, group, held) as gateway:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first)
            await until(lambda: "r" in gateway.leases)
            with pytest.raises(RequestInProgress) as running:
                await complete(model="m", messages=MESSAGES, request_id="r")
            assert (running.value.request_id, running.value.state) == ("r", "leased")
            with pytest.raises(IdempotencyConflict) as other_call:
                await complete(model="m", messages=say("else"), request_id="r")
            assert other_call.value.request_id == "r"
            with pytest.raises(IdempotencyConflict):
                await complete(model="m", messages=MESSAGES, request_id="r", pool="backfill")
            release.set()
        assert (await complete(model="m", messages=MESSAGES, request_id="r")).replayed
        with pytest.raises(IdempotencyConflict):
            await complete(model="m", messages=say("else"), request_id="r")
        assert (gateway.runs, gateway.cancelled) == ({"r": 1}, [])


async def test_a_reply_that_did_not_succeed_is_repeated_too(
    group: str, connection: Connection, complete: Complete
) -> None:
    async def fail(_lease: Lease, _body: bytes) -> Scripted:
        return Scripted(body=b'{"error":{}}', outcome=Outcome.FAILED, status=500)

    async with EchoGateway(connection, group, fail) as gateway:
        replies: list[Reply] = []
        for _ in range(2):
            with pytest.raises(RequestEnded) as caught:
                await complete(model="m", messages=MESSAGES, request_id="r")
            replies.append(caught.value.reply)
    assert [(reply.ending, reply.status, reply.replayed) for reply in replies] == [
        ("failed", 500, False),
        ("failed", 500, True),
    ]
    assert gateway.runs == {"r": 1}


async def test_an_id_whose_request_never_ran_is_told_and_can_be_used_again_when_its_record_is_gone(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    group = wide_group(valkey.url, retention_ms=1_000)
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        with pytest.raises(RequestEnded) as caught:
            await client.complete(model="m", messages=MESSAGES, request_id="r", timeout=0.1)
        assert caught.value.reply.ending == "expired"
        with pytest.raises(StateConflict, match="that request is ended, and its reply is not kept"):
            await client.complete(model="m", messages=MESSAGES, request_id="r")
        with eye(valkey.url) as look:
            await until(lambda: not look.exists(key(group, "request", id="r")), within_s=10)
        async with EchoGateway(connection, group):
            assert not (await client.complete(model="m", messages=MESSAGES, request_id="r")).replayed


async def test_a_submit_whose_answer_was_lost_never_meets_itself(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    """However often it is repeated, also after its request has ended: it is the same submit, not a repeated call."""
    lossy = LossyConnection(connection, loses=frozenset({"request_submit"}), seed=3, part=0.6)
    outcomes: list[Reply | DispatchError] = []
    chance = random.Random(5)

    async def one(client: DispatchClient, number: int) -> None:
        await anyio.sleep(chance.uniform(0, 0.3))
        try:
            outcomes.append(await client.complete(model="m", messages=say("x"), request_id=f"r{number}", timeout=30))
        except DispatchError as error:
            outcomes.append(error)

    async with EchoGateway(connection, group, echo) as gateway:
        client = DispatchClient(valkey.url, fabric_group=group, connection=lossy)  # type: ignore[arg-type]  # a proxy
        async with client, anyio.create_task_group() as tasks:
            lossy.on = True
            for number in range(60):
                tasks.start_soon(one, client, number)
    assert [outcome for outcome in outcomes if not isinstance(outcome, Reply)] == []
    assert {reply.replayed for reply in outcomes if isinstance(reply, Reply)} == {False}
    assert set(gateway.runs.values()) == {1}
    assert len(gateway.runs) == 60
    assert lossy.lost["request_submit"] > 3


async def test_a_cancelled_named_call_is_stopped_and_stays_cancelled(
    group: str, connection: Connection, valkey: ValkeyProcess
) -> None:
    async with (
        EchoGateway(connection, group, never) as gateway,
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        with anyio.move_on_after(0.5):
            await client.complete(model="m", messages=MESSAGES, request_id="r")
        await until(lambda: gateway.cancelled == ["r"])
        with eye(valkey.url) as look:
            await until(lambda: look.hget(key(group, "request", id="r"), "ending") == b"cancelled")
        with pytest.raises(RequestEnded) as caught:
            await client.complete(model="m", messages=MESSAGES, request_id="r")
    assert (caught.value.reply.ending, caught.value.reply.replayed) == ("cancelled", True)

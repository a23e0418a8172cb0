"""The asynchronous client against a real server, the gateway played by a script."""

from __future__ import annotations

import json

import anyio
import msgspec
import pytest

from dispatch import DispatchClient
from dispatch.contract import Operation, ReplyError, RequestEnvelope, read_call
from dispatch.errors import (
    FabricUnavailable,
    GroupUnknown,
    IdempotencyConflict,
    InvalidRequest,
    LibraryProblem,
    PoolUnknown,
    RequestEnded,
    RequestInProgress,
    RequestRefused,
    StateConflict,
)
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Lease, Outcome
from dispatch.fabric.schema import key
from dispatch.producer.options import CallOptions
from tests.support.echo_gateway import EchoGateway, Scripted
from tests.support.groups import unique_group
from tests.support.producing import (
    MESSAGES,
    eye,
    frames_left,
    never,
    owner,
    said,
    say,
    stopwatch,
    until,
    wide_group,
)
from tests.support.valkey import ValkeyProcess, free_port

pytestmark = pytest.mark.anyio


async def test_a_completion_comes_back_with_its_facts(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async with EchoGateway(connection, group) as gateway, DispatchClient(valkey.url, fabric_group=group) as client:
        reply = await client.complete(
            model="m",
            messages=MESSAGES,
            pool="interactive",
            metadata={"tenant": "a", "image_count": 2, "page_count": 9},
            timeout=30,
            request_id="r-1",
            temperature=0.5,
            extra_body={"x_vendor": {"k": 10**30}},
        )
        producer_id = client.producer_id
    assert reply.succeeded
    assert (reply.request_id, reply.pool_id, reply.attempt, reply.status) == ("r-1", "interactive", 1, 200)
    assert reply.queue_ms is not None
    assert reply.execution_ms is not None
    sent = (
        b'{"messages":[{"role":"user","content":"hello"}],"model":"m","temperature":0.5,"x_vendor":{"k":1' + b"0" * 30
    )
    sent += b"}}"
    assert gateway.bodies["r-1"] == sent
    assert reply.body == sent
    envelope = msgspec.json.decode(gateway.leases["r-1"].envelope, type=RequestEnvelope)
    assert envelope == RequestEnvelope(
        contract=1,
        request_id="r-1",
        producer_id=producer_id or "",
        pool_id="interactive",
        operation=Operation.CHAT_COMPLETIONS,
        model="m",
        message_count=1,
        image_count=2,
        page_count=9,
        timeout_ms=30_000,
        metadata={"tenant": "a", "image_count": 2, "page_count": 9},
    )
    assert gateway.leases["r-1"].cost == 1 + 2 * 2 + 2


async def test_500_calls_at_once_each_get_their_own_reply(valkey: ValkeyProcess, connection: Connection) -> None:
    group = wide_group(valkey.url)
    texts: dict[int, str] = {}

    async def one(number: int) -> None:
        reply = await client.complete(model="m", messages=say(f"call {number}"), timeout=30)
        texts[number] = said(reply.body)

    async with EchoGateway(connection, group) as gateway, DispatchClient(valkey.url, fabric_group=group) as client:
        async with anyio.create_task_group() as tasks:
            for number in range(500):
                tasks.start_soon(one, number)
        producer_id = client.producer_id or ""
        await until(lambda: frames_left(valkey.url, group, producer_id) == 0)
    assert texts == {number: f"call {number}" for number in range(500)}
    assert set(gateway.runs.values()) == {1}


@pytest.mark.parametrize("size", [4_096, 4_097, 70_000, 6_000_000])
async def test_bodies_of_any_size_travel_both_ways_and_are_freed(
    valkey: ValkeyProcess, group: str, connection: Connection, size: int
) -> None:
    frame = json.dumps({"messages": say(""), "model": "m"}, separators=(",", ":"))
    text = "x" * (size - len(frame))
    async with EchoGateway(connection, group), DispatchClient(valkey.url, fabric_group=group) as client:
        reply = await client.complete(model="m", messages=say(text), timeout=30)
        assert len(reply.body) == size
        assert said(reply.body) == text
        with eye(valkey.url) as look:
            await until(lambda: not list(look.scan_iter(f"{{{group}}}:body:*", count=1000)))


async def test_an_unknown_pool_is_an_error_that_names_the_known_ones(valkey: ValkeyProcess, group: str) -> None:
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        with pytest.raises(PoolUnknown) as caught:
            await client.complete(model="m", messages=MESSAGES, pool="nope")
    assert set(caught.value.known) == {"interactive", "document-extract", "backfill", "default"}


async def test_an_unknown_group_is_an_error(valkey: ValkeyProcess) -> None:
    async with DispatchClient(valkey.url, fabric_group=unique_group()) as client:
        with pytest.raises(GroupUnknown):
            await client.complete(model="m", messages=MESSAGES)


async def test_a_refusal_has_reason_value_and_limit_and_queues_nothing(valkey: ValkeyProcess) -> None:
    group = wide_group(
        valkey.url, pools=[{"pool_id": "small", "max_queue_depth": 1}, {"pool_id": "default"}], max_payload_bytes=10_000
    )
    async with DispatchClient(valkey.url, fabric_group=group) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(_end_quietly, client, "small", "first")
        await until(lambda: _queued(valkey.url, group, "small") == 1)
        with pytest.raises(RequestRefused) as full:
            await client.complete(model="m", messages=MESSAGES, pool="small")
        refused = full.value
        assert (refused.reason, refused.pool_id, refused.value, refused.limit) == ("pool_full", "small", 1, 1)
        with pytest.raises(RequestRefused) as large:
            await client.complete(model="m", messages=say("x" * 10_000))
        assert (large.value.reason, large.value.limit) == ("body_too_large", 10_000)
        assert large.value.value is not None
        assert large.value.value > 10_000
        with eye(valkey.url) as look:
            assert len(list(look.scan_iter(f"{{{group}}}:hash:llm:request:*", count=1000))) == 1
            assert not list(look.scan_iter(f"{{{group}}}:body:*", count=1000))
        tasks.cancel_scope.cancel()


async def test_a_request_id_in_use_is_refused_and_the_first_request_is_untouched(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    replies: list[str] = []
    release = anyio.Event()

    async def held(_lease: Lease, body: bytes) -> Scripted:
        await release.wait()
        return Scripted(body=body)

    async def first(client: DispatchClient) -> None:
        reply = await client.complete(model="m", messages=say("first"), request_id="same", timeout=30)
        replies.append(said(reply.body))

    async with (
        EchoGateway(connection, group, held) as gateway,
        DispatchClient(valkey.url, fabric_group=group) as one,
        DispatchClient(valkey.url, fabric_group=group) as other,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(first, one)
        await until(lambda: "same" in gateway.leases)
        with pytest.raises(IdempotencyConflict, match="this client waits for that request's reply, and it is another"):
            await one.complete(model="m", messages=say("second"), request_id="same")
        with pytest.raises(IdempotencyConflict, match="used for another call"):
            await other.complete(model="m", messages=say("third"), request_id="same")
        with pytest.raises(RequestInProgress, match="this client waits"):
            await one.complete(model="m", messages=say("first"), request_id="same", timeout=30)
        with pytest.raises(RequestInProgress, match="that request is leased"):
            await other.complete(model="m", messages=say("first"), request_id="same", timeout=30)
        release.set()
    assert replies == ["first"]
    assert gateway.cancelled == []


async def test_an_ending_other_than_succeeded_is_raised_with_the_reply(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    error = ReplyError(type="endpoint_failed", message="boom", source="endpoint")

    async def fail(_lease: Lease, _body: bytes) -> Scripted:
        return Scripted(body=b'{"error":{}}', outcome=Outcome.FAILED, status=500, error=error)

    async with EchoGateway(connection, group, fail), DispatchClient(valkey.url, fabric_group=group) as client:
        with pytest.raises(RequestEnded, match="boom") as caught:
            await client.complete(model="m", messages=MESSAGES)
        reply = caught.value.reply
        assert (reply.ending, reply.status, reply.error) == ("failed", 500, error)
        call = read_call(Operation.CHAT_COMPLETIONS, b'{"model":"m","messages":[]}')
        assert (await client.call(call, CallOptions(pool_id="backfill"))).ending == "failed"


async def test_a_batch_keeps_order_and_shows_failures_at_their_place(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async def odd_ones_fail(_lease: Lease, body: bytes) -> Scripted:
        return Scripted(body=body, outcome=Outcome.FAILED if int(said(body)) % 2 else Outcome.SUCCEEDED)

    items = [{"model": "m", "messages": say(str(number)), "pool": "backfill"} for number in range(40)]
    items[4] = {"model": "m", "messages": MESSAGES, "pool": "nope"}
    items[6] = {"model": "m", "messages": say("x"), "temperature": float("nan")}
    steps: list[tuple[int, int]] = []
    async with EchoGateway(connection, group, odd_ones_fail), DispatchClient(valkey.url, fabric_group=group) as client:
        results = await client.batch_generate(items, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 40) for done in range(1, 41)]
    assert isinstance(results[4], PoolUnknown)
    assert isinstance(results[6], InvalidRequest)
    for number in set(range(40)) - {4, 6}:
        result = results[number]
        if number % 2:
            assert isinstance(result, RequestEnded)
            assert said(result.reply.body) == str(number)
        else:
            assert not isinstance(result, Exception)
            assert said(result.body) == str(number)


async def test_a_deadline_ends_the_wait_although_nobody_serves_the_group(valkey: ValkeyProcess, group: str) -> None:
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        passed = stopwatch()
        with pytest.raises(RequestEnded) as caught:
            await client.complete(model="m", messages=MESSAGES, timeout=0.2)
        assert caught.value.reply.ending == "expired"
        assert 0.2 <= passed() < 3.5


async def test_two_clients_under_one_producer_id_are_told_apart(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async with (
        EchoGateway(connection, group, never) as gateway,
        DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=600) as older,
    ):
        errors: list[StateConflict] = []

        async def wait() -> None:
            with pytest.raises(StateConflict, match="another session owns producer 'p'") as caught:
                await older.complete(model="m", messages=MESSAGES, request_id="old")
            errors.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: "old" in gateway.leases)
            async with DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=600):
                newest = owner(valkey.url, group, "p")
                await until(lambda: bool(errors))
                await until(lambda: gateway.cancelled == ["old"])
                with pytest.raises(StateConflict, match="another session owns producer 'p'"):
                    await older.complete(model="m", messages=MESSAGES)
                await anyio.sleep(0.5)  # longer than two beats: the older one must not take it back
                assert owner(valkey.url, group, "p") == newest


async def test_a_client_that_cannot_work_says_so_at_its_start(valkey: ValkeyProcess, start_valkey) -> None:
    bare = start_valkey(library=False)
    with pytest.raises(LibraryProblem, match="dispatch scripts load"):
        async with DispatchClient(bare.url, fabric_group="g"):
            pass
    with pytest.raises(FabricUnavailable, match="does not answer"):
        async with DispatchClient(f"valkey://127.0.0.1:{free_port()}", fabric_group="g"):
            pass
    with pytest.raises(InvalidRequest, match="fabric_group"):
        DispatchClient(valkey.url, fabric_group="no{braces}")


async def _end_quietly(client: DispatchClient, pool: str, request_id: str) -> None:
    with pytest.raises((RequestEnded, StateConflict)):
        await client.complete(model="m", messages=MESSAGES, pool=pool, request_id=request_id)


def _queued(url: str, group: str, pool: str) -> int:
    with eye(url) as look:
        return int(look.llen(key(group, "requests", pool=pool)))

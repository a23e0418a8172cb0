"""Submit now, fetch later with both clients: the request is nobody's, and its reply stays for whoever has the id."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from dispatch import DispatchClient, errors
from dispatch.contract import Operation, ReplyError, read_call
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Lease, Outcome
from dispatch.fabric.schema import key
from dispatch.producer.detached import Handle
from dispatch.producer.options import CallOptions
from dispatch.producer.request_ids import is_made_for
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.echo_gateway import EchoGateway, Scripted
from tests.support.leftovers import keys_without_expiry
from tests.support.producing import MESSAGES, eye, said, say, until, wide_group
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000


@pytest.fixture
def wide(valkey: ValkeyProcess) -> str:
    return wide_group(valkey.url)


def client(valkey: ValkeyProcess, group: str) -> DispatchClient:
    return DispatchClient(valkey.url, fabric_group=group)


async def submit_and_leave(valkey: ValkeyProcess, group: str, **arguments: Any) -> Handle:
    """Submit with a client that is closed, and forgotten by the group, when this returns."""
    async with client(valkey, group) as opened:
        handle = await opened.submit(**({"model": "m", "messages": MESSAGES} | arguments))
        producer = opened.producer_id
    with eye(valkey.url) as look:
        look.delete(key(group, "alive", producer=producer or ""))
    return handle


@pytest.mark.parametrize("size", [10, 100_000], ids=["small", "by-reference"])
async def test_a_request_runs_without_its_producer_and_is_fetched_by_another(
    valkey: ValkeyProcess, connection: Connection, wide: str, size: int
) -> None:
    handle = await submit_and_leave(valkey, wide, messages=say("x" * size))
    assert not handle.repeated
    async with EchoGateway(connection, wide) as gateway, client(valkey, wide) as other:
        replies = [await other.result(handle.id, timeout=20) for _ in range(2)]
        state = await other.status(handle.id)
    assert [said(reply.body) for reply in replies] == ["x" * size] * 2
    assert (state.state, state.ending, state.reply_kept, state.ended) == ("ended", "succeeded", True, True)
    assert gateway.runs == {handle.id: 1}
    assert keys_without_expiry(valkey.url, wide) == []
    with eye(valkey.url) as look:
        assert 23 * HOUR_MS < look.pttl(key(wide, "result", id=handle.id)) <= 24 * HOUR_MS
        if size > 65_536:
            assert 23 * HOUR_MS < look.pttl(key(wide, "reply_body", id=handle.id)) <= 24 * HOUR_MS


async def test_the_reply_is_there_when_the_record_is_not_any_more(
    valkey: ValkeyProcess, connection: Connection, wide: str
) -> None:
    async with EchoGateway(connection, wide), client(valkey, wide) as opened:
        handle = await opened.submit(model="m", messages=MESSAGES)
        await opened.result(handle.id, timeout=20)
        with eye(valkey.url) as look:
            look.delete(key(wide, "request", id=handle.id))
        assert (await opened.result(handle.id, timeout=0)).succeeded
        state = await opened.status(handle.id)
    assert (state.state, state.ending, state.pool_id, state.deadline_ms) == ("ended", "succeeded", "default", None)


async def test_status_says_where_it_is(valkey: ValkeyProcess, connection: Connection, wide: str) -> None:
    finish = anyio.Event()

    async def script(_lease: Lease, body: bytes) -> Scripted:
        await finish.wait()
        return Scripted(body=body)

    async with client(valkey, wide) as opened:
        handle = await opened.submit(model="m", messages=MESSAGES, timeout=60)
        waiting = await opened.status(handle.id)
        assert (waiting.state, waiting.gateway_id, waiting.claimed_ms, waiting.attempt) == ("queued", None, None, 0)
        assert waiting.deadline_ms == handle.deadline_ms == (waiting.submitted_ms or 0) + 60_000
        with pytest.raises(TimeoutError, match="it goes on"):
            await opened.result(handle.id, timeout=0)
        async with EchoGateway(connection, wide, script) as gateway:
            await until(lambda: gateway.runs != {}, within_s=20)
            running = await opened.status(handle.id)
            assert (running.state, running.gateway_id) == ("leased", gateway.gateway_id)
            finish.set()
            assert (await opened.result(handle.id)).succeeded


async def test_many_wait_for_theirs_while_they_run(valkey: ValkeyProcess, connection: Connection, wide: str) -> None:
    async with EchoGateway(connection, wide), client(valkey, wide) as opened:
        handles = [await opened.submit(model="m", messages=say(str(number))) for number in range(40)]
        texts: dict[int, str] = {}

        async def fetch(number: int) -> None:
            texts[number] = said((await opened.result(handles[number].id, timeout=30)).body)

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(fetch, number)
    assert texts == {number: str(number) for number in range(40)}


async def test_what_ended_otherwise_is_told_as_of_a_call(
    valkey: ValkeyProcess, connection: Connection, wide: str
) -> None:
    async def fail(_lease: Lease, _body: bytes) -> Scripted:
        error = ReplyError(type="endpoint_error", message="no", source="endpoint")
        return Scripted(body=b'{"error":{}}', outcome=Outcome.FAILED, status=400, error=error)

    async with EchoGateway(connection, wide, fail), client(valkey, wide) as opened:
        handle = await opened.submit(model="m", messages=MESSAGES)
        with pytest.raises(errors.RequestEnded) as caught:
            await opened.result(handle.id, timeout=20)
    assert (caught.value.reply.ending, caught.value.reply.status) == ("failed", 400)


async def test_its_deadline_ends_it_without_any_gateway(valkey: ValkeyProcess, wide: str) -> None:
    handle = await submit_and_leave(valkey, wide, timeout=0.05)
    async with client(valkey, wide) as opened:
        with pytest.raises(errors.RequestEnded) as caught:
            await opened.result(handle.id)
    assert caught.value.reply.ending == "expired"


async def test_the_same_request_id_is_the_same_request(
    valkey: ValkeyProcess, connection: Connection, wide: str
) -> None:
    async with client(valkey, wide) as opened:
        first = await opened.submit(model="m", messages=MESSAGES, request_id="mine")
        again = await opened.submit(model="m", messages=MESSAGES, request_id="mine")
        assert (first.id, first.repeated, again.id, again.repeated) == ("mine", False, "mine", True)
        with pytest.raises(errors.IdempotencyConflict):
            await opened.submit(model="other", messages=MESSAGES, request_id="mine")
        async with EchoGateway(connection, wide) as gateway:
            await opened.result("mine", timeout=20)
            ended = await opened.submit(model="m", messages=MESSAGES, request_id="mine")
            called = await opened.complete(model="m", messages=MESSAGES, request_id="mine")
    assert (ended.id, ended.repeated, called.replayed) == ("mine", True, True)
    assert gateway.runs == {"mine": 1}


async def test_what_was_not_submitted_is_unknown_and_what_was_called_is_not_kept(
    valkey: ValkeyProcess, connection: Connection, wide: str
) -> None:
    async with EchoGateway(connection, wide), client(valkey, wide) as opened:
        with pytest.raises(errors.RequestUnknown, match="'nothing' is not known"):
            await opened.status("nothing")
        with pytest.raises(errors.RequestUnknown) as caught:
            await opened.result("nothing", timeout=5)
        assert caught.value.ending == ""
        reply = await opened.complete(model="m", messages=MESSAGES)
        with pytest.raises(errors.RequestUnknown, match="no reply of it is kept") as caught:
            await opened.result(reply.request_id)
    assert caught.value.ending == "succeeded"


async def test_a_body_that_is_gone_is_told(valkey: ValkeyProcess, connection: Connection, wide: str) -> None:
    async with EchoGateway(connection, wide), client(valkey, wide) as opened:
        handle = await opened.submit(model="m", messages=say("x" * 100_000))
        await opened.result(handle.id, timeout=20)
        with eye(valkey.url) as look:
            look.delete(key(wide, "reply_body", id=handle.id))
        with pytest.raises(errors.OutcomeUnknown, match="body"):
            await opened.result(handle.id, timeout=20)


async def test_any_operation_can_be_submitted_but_no_stream(
    valkey: ValkeyProcess, connection: Connection, wide: str
) -> None:
    embeddings = read_call(Operation.EMBEDDINGS, b'{"model":"m","input":["a"]}')
    async with EchoGateway(connection, wide) as gateway, client(valkey, wide) as opened:
        handle = await opened.submit_call(embeddings, CallOptions(scope="k1"))
        assert is_made_for("k1", handle.id)
        assert (await opened.result(handle.id, timeout=20)).body == embeddings.body
        assert msgspec.json.decode(gateway.leases[handle.id].envelope)["operation"] == "embeddings"
        with pytest.raises(errors.InvalidRequest, match="whole answer") as caught:
            await opened.submit(model="m", messages=MESSAGES, stream=True)
        assert caught.value.param == "stream"
        with pytest.raises(errors.PoolUnknown):
            await opened.submit(model="m", messages=MESSAGES, pool="nowhere")


async def test_cancelling_a_submit_leaves_nothing_queued_that_nobody_knows_of(valkey: ValkeyProcess, wide: str) -> None:
    async with client(valkey, wide) as opened:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await opened.submit(model="m", messages=MESSAGES)
        assert scope.cancelled_caught
        handle = await opened.submit(model="m", messages=MESSAGES)
        with anyio.fail_after(20):  # what was cut off is cancelled in the background
            while (estimate := await opened.estimate()).pending != 1:  # noqa: ASYNC110 - the state is the server's, there is nothing to await
                await anyio.sleep(0.02)
    assert (estimate.pending, estimate.in_flight, estimate.wait_ms) == (1, 0, None)
    assert handle.deadline_ms is not None


async def test_a_direct_client_has_no_queue() -> None:
    async with DispatchClient(direct=True, endpoint="http://127.0.0.1:9/v1") as direct:
        with pytest.raises(errors.StateConflict, match="no queue"):
            await direct.submit(model="m", messages=MESSAGES)
        with pytest.raises(errors.StateConflict, match="no queue"):
            await direct.estimate("default")


async def test_the_blocking_client_does_the_same(valkey: ValkeyProcess, connection: Connection, wide: str) -> None:
    def work() -> tuple[Handle, Handle]:
        with BlockingClient(valkey.url, fabric_group=wide) as opened:
            small = opened.submit(model="m", messages=say("a"), request_id="mine")
            assert opened.status(small.id).state == "queued"
            assert opened.submit(model="m", messages=say("a"), request_id="mine").repeated
            assert opened.estimate().pending == 1
            with pytest.raises(TimeoutError):
                opened.result(small.id, timeout=0.1)
            with pytest.raises(errors.InvalidRequest, match="whole answer"):
                opened.submit(model="m", messages=MESSAGES, stream=True)
            with pytest.raises(errors.RequestUnknown):
                opened.result("nothing")
            return small, opened.submit(model="m", messages=say("b" * 100_000))

    def fetch(small: Handle, large: Handle) -> list[str]:
        with BlockingClient(valkey.url, fabric_group=wide) as opened:
            return [said(opened.result(handle.id, timeout=20).body) for handle in (small, large)]

    handles = await anyio.to_thread.run_sync(work)
    async with EchoGateway(connection, wide):
        texts = await anyio.to_thread.run_sync(fetch, *handles)
    assert texts == ["a", "b" * 100_000]


async def test_an_outage_is_waited_out_within_the_callers_time(start_valkey: Any, anyio_backend: str) -> None:
    assert anyio_backend == "asyncio"
    server = start_valkey(aof=True)
    group = wide_group(server.url)
    async with client(server, group) as opened:
        handle = await opened.submit(model="m", messages=MESSAGES, timeout=60)
        server.kill()
        with pytest.raises(errors.FabricUnavailable):
            await opened.result(handle.id, timeout=0.2)
        server.start()
        with pytest.raises(TimeoutError):
            await opened.result(handle.id, timeout=5)

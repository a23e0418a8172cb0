"""Streams of the asynchronous client, on a group in memory."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from dispatch.contract import Chunk, Operation, read_call
from dispatch.errors import (
    ContractError,
    FabricUnavailable,
    InvalidRequest,
    RequestEnded,
    RequestInProgress,
    RequestRefused,
    StateConflict,
    StreamBroken,
    StreamTooSlow,
)
from dispatch.producer import errand as errand_module
from dispatch.producer.client import DispatchClient
from dispatch.producer.options import CallOptions
from tests.support.fake_group import GROUP, FakeGroup, Lost
from tests.support.producing import MESSAGES, until
from tests.support.streams import chunk

pytestmark = pytest.mark.anyio

CALL = read_call(Operation.CHAT_COMPLETIONS, b'{"model":"m","messages":[],"stream":true}')


@pytest.fixture
def group() -> FakeGroup:
    group = FakeGroup()
    group.auto = False
    return group


@pytest.fixture
async def client(group: FakeGroup) -> AsyncIterator[DispatchClient]:
    url = "valkey://127.0.0.1:9"
    async with DispatchClient(url, connection=group, fabric_group=GROUP, close_ms=100) as opened:
        yield opened


def begin(client: DispatchClient, **more: Any) -> Any:
    return client.stream(model="m", messages=MESSAGES, request_id="r", **more)


async def queued(group: FakeGroup, request_id: str = "r") -> None:
    await until(lambda: request_id in group.requests)


async def test_chunks_come_as_they_are_pushed_and_the_reply_after_them(
    group: FakeGroup, client: DispatchClient
) -> None:
    stream = begin(client, temperature=0.5)
    assert group.requests == {}
    with pytest.raises(StateConflict, match="has not ended"):
        _ = stream.reply
    texts: list[str] = []

    async def read() -> None:
        async for each in stream:
            assert isinstance(each, Chunk)
            texts.append(each.text)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await queued(group)
        group.push_chunks("r", 0, chunk("a"))
        await until(lambda: texts == ["a"])
        group.push_chunks("r", 1, chunk("b"), chunk("\u2028"))
        group.end("r", body=b"")
    assert texts == ["a", "b", "\u2028"]
    assert stream.ended
    assert (stream.reply.ending, stream.reply.request_id, stream.reply.body) == ("succeeded", "r", b"")
    assert [each async for each in stream] == []
    body = json.loads(group.requests["r"].body)
    assert list(body) == ["messages", "model", "stream", "temperature"]
    assert body["stream"] is True
    assert group.requests["r"].envelope["stream"] is True
    assert group.cancels == []


async def test_all_that_is_there_is_read_at_once_and_a_wait_can_end_without_a_chunk(
    group: FakeGroup, client: DispatchClient
) -> None:
    async with begin(client) as stream:
        assert await stream.read(within_s=0.05) == []
        assert not stream.ended
        group.push_chunks("r", 0, b"{}", b"[]", event="e")
        group.push_chunks("r", 2, b"1", event="f")
        assert await stream.read() == [Chunk(b"{}", "e"), Chunk(b"[]", "e"), Chunk(b"1", "f")]
        group.end("r")
        assert await stream.read() == []
        assert stream.ended
    assert group.cancels == []


async def test_frames_that_come_twice_are_given_out_once(group: FakeGroup, client: DispatchClient) -> None:
    async with begin(client) as stream:
        await stream.read(within_s=0)
        group.faults.append(Lost("reply_ack", done=False))  # so the same frames are read again
        group.push_chunks("r", 0, b"0")
        group.push_chunks("r", 1, b"1")
        assert [each.data for each in await stream.read()] == [b"0", b"1"]
        await until(lambda: group.frames == [])
        group.push_chunks("r", 1, b"1")
        group.push_chunks("r", 2, b"2")
        group.end("r")
        assert [each.data async for each in stream] == [b"2"]


async def test_what_complete_raises_before_a_reply_is_raised_with_the_first_chunk(
    group: FakeGroup, client: DispatchClient
) -> None:
    group.refuse.append(["REFUSED", "pool_full", 5, 5, 1200])
    with pytest.raises(RequestRefused):
        await anext(begin(client))
    with pytest.raises(InvalidRequest, match="'stream' must be true"):
        client.stream(model="m", messages=MESSAGES, stream=False)
    with pytest.raises(InvalidRequest, match=r"stream\(\) or stream_call\(\)"):
        await client.call(CALL)
    with pytest.raises(InvalidRequest) as caught:
        client.stream_call(CALL, CallOptions(idempotency_key="k"))
    assert caught.value.code == "stream_not_repeatable"
    assert not client._path.inbox.busy()
    assert group.cancels == []


@pytest.mark.parametrize("chunks", [0, 2])
async def test_an_ending_that_is_no_success_is_raised_after_the_chunks(
    group: FakeGroup, client: DispatchClient, chunks: int
) -> None:
    stream = begin(client)
    await stream.read(within_s=0)
    if chunks:
        group.push_chunks("r", 0, *[b"{}"] * chunks)
    group.end("r", "failed", b"x" * 10_000, large=not chunks)
    assert [(await anext(stream)).data for _ in range(chunks)] == [b"{}"] * chunks
    with pytest.raises(RequestEnded) as caught:
        await anext(stream)
    assert caught.value.reply.ending == "failed"
    assert caught.value.reply == stream.reply
    assert len(stream.reply.body) == 10_000


async def test_a_raw_call_ends_whatever_its_ending(group: FakeGroup, client: DispatchClient) -> None:
    stream = client.stream_call(CALL, CallOptions(request_id="r", pool_id="default"))
    await stream.read(within_s=0)
    group.push_chunks("r", 0, b"{}")
    group.end("r", "lost")
    assert [each.data async for each in stream] == [b"{}"]
    assert stream.reply.ending == "lost"


async def test_leaving_the_loop_cancels_the_request(group: FakeGroup, client: DispatchClient) -> None:
    async def leave() -> None:
        async for _ in begin(client):
            break

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)
        await queued(group)
        group.push_chunks("r", 0, b"{}")
    await until(lambda: group.cancels == ["r"])
    await until(lambda: not client._path.inbox.busy())


async def test_an_error_in_the_loop_cancels_the_request(group: FakeGroup, client: DispatchClient) -> None:
    async def fail() -> None:
        async for _ in begin(client):
            raise KeyError("mine")

    task = asyncio.create_task(fail())
    await queued(group)
    group.push_chunks("r", 0, b"{}")
    with pytest.raises(KeyError):
        await task
    del task
    gc.collect()  # the error's traceback held the loop
    await until(lambda: group.cancels == ["r"])


@pytest.mark.parametrize("chunks", [0, 1])
async def test_cancelling_the_task_cancels_the_request(group: FakeGroup, client: DispatchClient, chunks: int) -> None:
    stream = begin(client)

    async def read() -> None:
        async for _ in stream:
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await queued(group)
        if chunks:
            group.push_chunks("r", 0, b"{}")
            await until(lambda: group.frames == [])
        tasks.cancel_scope.cancel()
    await until(lambda: group.cancels == ["r"])
    assert await stream.read() == []


async def test_closing_a_stream_cancels_the_request_once(group: FakeGroup, client: DispatchClient) -> None:
    async with begin(client) as stream:
        await stream.read(within_s=0)
    await stream.aclose()
    await until(lambda: not client._path.inbox.busy())
    assert group.cancels == ["r"]
    unread = begin(client)
    await unread.aclose()  # never begun
    assert await unread.read() == []


async def test_a_stream_nobody_reads_is_stopped_and_holds_up_no_other(group: FakeGroup) -> None:
    url = "valkey://127.0.0.1:9"
    async with DispatchClient(
        url, connection=group, fabric_group=GROUP, close_ms=100, stream_unread_bytes=4000
    ) as client:
        slow = client.stream(model="m", messages=MESSAGES, request_id="slow")
        fast = client.stream(model="m", messages=MESSAGES, request_id="fast")
        await slow.read(within_s=0)
        await fast.read(within_s=0)
        for number in range(20):
            group.push_chunks("slow", number, b"s" * 1000)
            group.push_chunks("fast", number, b"f")
            assert [each.data for each in await fast.read()] == [b"f"]
        await until(lambda: group.cancels == ["slow"])  # by the pump: nobody reads it
        group.end("fast")
        assert await fast.read() == []
        with pytest.raises(StreamTooSlow, match="4000 bytes") as caught:
            await slow.read()
        assert caught.value.request_id == "slow"
        assert client._path.reservoir.bytes == 0
        await until(lambda: not client._path.inbox.busy())


async def test_missing_chunks_are_an_error_and_stop_the_request(group: FakeGroup, client: DispatchClient) -> None:
    async with begin(client) as stream:
        await stream.read(within_s=0)
        group.push_chunks("r", 0, b"0")
        assert len(await stream.read()) == 1
        group.push_chunks("r", 2, b"2")
        with pytest.raises(StreamBroken, match="chunks 1 to 1"):
            await stream.read()
    await until(lambda: group.cancels == ["r"])


async def test_a_damaged_chunk_is_an_error_of_its_stream(group: FakeGroup, client: DispatchClient) -> None:
    async with begin(client) as stream:
        await stream.read(within_s=0)
        group.frames.append(b"1|900|chunks|r|0\nno bar")
        with pytest.raises(ContractError, match="damaged chunk"):
            await stream.read()
    await until(lambda: group.cancels == ["r"])


async def test_a_stream_that_the_group_took_for_too_slow_is_told_so(group: FakeGroup, client: DispatchClient) -> None:
    stream = begin(client)
    await stream.read(within_s=0)
    head = b'{"error":{"type":"slow_consumer","message":"too little was read","source":"dispatch"}}\n'
    group.push("r", "failed", head)
    with pytest.raises(StreamTooSlow, match="too little was read"):
        await stream.read()


async def test_no_word_by_the_deadline_ends_a_stream(
    group: FakeGroup, client: DispatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errand_module, "GRACE_S", 0.8)  # longer than the pump's waits: the server is not silent
    stream = begin(client, timeout=0.1)
    await stream.read(within_s=0)
    group.push_chunks("r", 0, b"{}")
    with pytest.raises(RequestEnded, match="no reply came by the deadline"):
        [each async for each in stream]
    assert stream.reply.ending == "expired"
    await until(lambda: group.cancels == ["r"])
    assert "lease_reap" in group.calls


async def test_one_id_is_one_stream_at_a_time(group: FakeGroup, client: DispatchClient) -> None:
    async with begin(client) as first:
        await first.read(within_s=0)
        with pytest.raises(RequestInProgress):
            await begin(client).read()
        group.push_chunks("r", 0, b"{}")
        assert len(await first.read()) == 1
    await until(lambda: group.cancels == ["r"])


async def test_closing_the_client_ends_its_streams(group: FakeGroup, client: DispatchClient) -> None:
    stream = begin(client)
    await stream.read(within_s=0)
    group.push_chunks("r", 0, b"{}")
    await until(lambda: group.frames == [])
    await client.aclose()
    with pytest.raises(RequestEnded, match="cancelled"):
        assert [each.data async for each in stream] == [b"{}"]
    late = client.stream
    with pytest.raises(StateConflict):
        late(model="m", messages=MESSAGES)


async def test_where_a_request_is(group: FakeGroup, client: DispatchClient) -> None:
    async with begin(client) as stream:
        await stream.read(within_s=0)
        waiting = await stream.whereabouts()
        assert (waiting.running_ms, waiting.queue_ms) == (None, None)
        group.requests["r"].state = "leased"
        running = await stream.whereabouts()
        assert (running.running_ms, running.queue_ms) == (2_300, 700)
        group.faults.append(Lost("fabric_snapshot", done=False, error=FabricUnavailable("away")))
        assert await stream.whereabouts() is None


async def test_a_whole_reply_is_not_disturbed_by_chunks(group: FakeGroup, client: DispatchClient) -> None:
    async def complete() -> None:
        reply = await client.complete(model="m", messages=MESSAGES, request_id="r")
        assert reply.body == b"{}"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(complete)
        await queued(group)
        group.push_chunks("r", 0, b"{}")
        group.end("r")
    assert client._path.inbox.dropped == 1

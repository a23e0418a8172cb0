"""Leaving a streamed call, and what becomes of its connection: over real sockets."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from dispatch.backend import EndpointClient
from tests.support.calls import endpoint_at
from tests.support.streams import CHAT, CHUNKED, DONE, END, chunk, data, framed, gone, pinging, run
from tests.support.stub import Hold, Pause, Script, Step, StubBackend, Write

pytestmark = pytest.mark.anyio

A, F = data(chunk("a")), data(chunk(None, "stop"))
WHOLE = Script((Write(CHUNKED + framed(A) + framed(F) + framed(DONE) + END),))


async def test_a_connection_is_used_again_after_a_stream(client: EndpointClient) -> None:
    late_end = Script((Write(CHUNKED + framed(A + F + DONE)), Pause(0.01), Write(END)))
    async with StubBackend([WHOLE, late_end, WHOLE]) as stub:
        for _ in range(3):
            assert (await run(client, endpoint_at(stub.url))).execution.outcome == "succeeded"
        assert len(stub.connections) == 1


async def test_a_backend_that_keeps_the_connection_after_done_delays_nobody(client: EndpointClient) -> None:
    async with StubBackend(Script((Write(CHUNKED + framed(A + F + DONE)), *pinging(100)))) as stub:
        async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=20) as stream:
            async for _ in stream:
                pass
            assert stream.execution.execution_ms < 2_000
        await gone(stub.connections[0], within_s=3)


CANCELS: dict[str, tuple[Step, ...]] = {
    "before-head": (Hold(),),
    "after-head": (Write(CHUNKED), Hold()),
    "between": (Write(CHUNKED + framed(A)), Hold()),
    "inside-an-event": (Write(CHUNKED + framed(A + b'data: {"id')), Hold()),
    "finished": (Write(CHUNKED + framed(A + F)), Hold()),
    "while-it-comes": (Write(CHUNKED), *(Write(framed(A)) for _ in range(500)), *pinging(200, piece=A)),
}


@pytest.mark.parametrize("steps", CANCELS.values(), ids=CANCELS)
@pytest.mark.parametrize("way", ["scope", "task", "break"])
async def test_leaving_closes_the_connection_at_once(client: EndpointClient, steps: tuple[Step, ...], way: str) -> None:
    entered = anyio.Event()

    async def stream_on() -> None:
        async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=60) as stream:
            entered.set()
            async for _ in stream:
                pass

    async with StubBackend(Script(steps)) as stub:
        if way == "break" and steps[0] != Hold():
            async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=60) as stream:
                if A in b"".join(step.data for step in steps if isinstance(step, Write)):
                    assert (await anext(stream)).data == chunk("a")
                    assert (stream.chunk_count >= 1, stream.head.response_id) == (True, "c1")
        elif way == "scope":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream_on)
                await stub.until(lambda seen: len(seen.requests) == 1)
                await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
        else:
            task = asyncio.ensure_future(stream_on())
            await stub.until(lambda seen: len(seen.requests) == 1)
            await anyio.sleep(0.05)
            task.cancel()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        await gone(stub.connections[0])
    assert entered.is_set() or steps[0] == Hold() or way == "break"


async def test_a_wait_that_was_cancelled_ends_the_stream(client: EndpointClient) -> None:
    async with StubBackend(Script((Write(CHUNKED + framed(A)), Hold()))) as stub:
        async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=60) as stream:
            await anext(stream)
            with anyio.move_on_after(0.05):
                await anext(stream)
            with pytest.raises(anyio.ClosedResourceError):
                await anext(stream)
        with pytest.raises(anyio.ClosedResourceError):
            await anext(stream)
        await gone(stub.connections[0])


async def test_payloads_that_came_together_can_be_taken_together(client: EndpointClient) -> None:
    script = Script((Write(CHUNKED + framed(A * 3)), Pause(0.2), Write(framed(A + F + DONE) + END)))
    async with StubBackend(script) as stub:
        batches = []
        async with client.stream(endpoint_at(stub.url), CHAT, deadline_s=20) as stream:
            async for payload in stream:
                batches.append([payload, *stream.take_ready()])
                assert stream.take_ready() == []
    assert [len(batch) for batch in batches] == [3, 2]
    assert (stream.execution.outcome, stream.execution.chunk_count) == ("succeeded", 5)

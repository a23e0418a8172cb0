"""Refusals for want of room: what they say to people and programs, and how callers bound and spend their waiting."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import httpx
import pytest

from dispatch import DispatchClient
from dispatch.errors import InvalidRequest, RequestEnded, RequestRefused, StateConflict
from dispatch.fabric import functions
from dispatch.fabric.connection import Connection
from dispatch.fabric.sync import BlockingConnection
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.echo_gateway import EchoGateway
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES, after, said, say, until
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": say("x")}
SLACK_S = 3.0
"""What a busy machine may take on top of each bound."""


def pools(**fields: Any) -> list[dict[str, Any]]:
    return [{"pool_id": "default", "quantum": 1, **fields}, {"pool_id": "other", "quantum": 1}]


def pause(path: Stack, pool: str = "default") -> None:
    with BlockingConnection(path.valkey_url) as connection:
        connection.run(path.group, functions.pool_pause(pool, "pause", actor="test"))


def refused(answer: httpx.Response, status: int, reason: str) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, reason), answer.text
    assert answer.headers["x-dispatch-reason"] == f"rejected-{reason}"
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@asynccontextmanager
async def waiting(path: Stack, count: int, **more: Any) -> AsyncIterator[None]:
    """Have `count` calls wait, or run, until left."""
    before = path.submitted()
    async with httpx.AsyncClient(base_url=path.url, timeout=60) as client, anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(lambda: client.post(CHAT, json=BODY | more))
        await until(lambda: path.submitted() == before + count, within_s=15)
        yield
        tasks.cancel_scope.cancel()


# ---- what a refusal says


async def test_a_full_pool_says_which_how_full_and_what_to_do(valkey: ValkeyProcess) -> None:
    async with stack(valkey.url, "http://127.0.0.1:9/v1", pools=pools(max_queue_depth=2)) as path:
        pause(path)
        async with waiting(path, 2), httpx.AsyncClient(base_url=path.url) as client:
            answer = await client.post(CHAT, json=BODY)
            told = refused(answer, 429, "pool_full")
            assert told == (
                "refused (pool_full): 2 requests wait in pool 'default', 2 are allowed (max_queue_depth); nothing was "
                "queued: try again later, or use another pool"
            )
            facts = [answer.headers[f"x-dispatch-{name}"] for name in ("pool", "depth", "limit")]
            assert facts == ["default", "2", "2"]
            assert answer.headers["x-should-retry"] == "true"
            # Nothing was launched lately: nobody knows when there will be room.
            assert not {"retry-after", "retry-after-ms"} & set(answer.headers)
            assert path.submitted() == 2


@pytest.mark.parametrize(
    ("fields", "document", "words"),
    [
        ({"max_queue_bytes": 100}, {}, ("pool_bytes_full", 429, "bytes of bodies wait in pool 'default', 100 are")),
        ({}, {"max_queued": 1}, ("group_full", 429, "1 requests wait in the group of pool 'default', 1 are allowed")),
        ({"enabled": False}, {}, ("pool_disabled", 503, "pool 'default' takes no requests")),
        ({}, {"max_payload_bytes": 70}, ("body_too_large", 413, "at most 70 are allowed")),
    ],
    ids=["bytes", "group", "disabled", "body"],
)
async def test_every_bound_has_its_words(
    valkey: ValkeyProcess, fields: dict[str, Any], document: dict[str, Any], words: tuple[str, int, str]
) -> None:
    reason, status, text = words
    async with stack(valkey.url, "http://127.0.0.1:9/v1", pools=pools(**fields), **document) as path:
        pause(path)
        async with httpx.AsyncClient(base_url=path.url) as client, anyio.create_task_group() as tasks:
            if reason in ("pool_bytes_full", "group_full"):
                tasks.start_soon(lambda: client.post(CHAT, json=BODY, timeout=60))
                await until(lambda: path.submitted() == 1)
            answer = await client.post(CHAT, json=BODY | {"user": "x" * 20})
            assert text in refused(answer, status, reason)
            tasks.cancel_scope.cancel()


async def test_when_to_come_back_follows_from_how_fast_the_pool_drains(valkey: ValkeyProcess) -> None:
    def script(request: SeenRequest) -> Script:
        return Script((Hold(),)) if b"hold" in request.body else json_answer(COMPLETION)

    bounds = pools(max_queue_depth=3, max_concurrent=1)
    async with (
        StubBackend(script) as stub,
        stack(valkey.url, f"{stub.url}/v1", pools=bounds) as path,
        httpx.AsyncClient(base_url=path.url) as client,
    ):
        for _ in range(20):
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        async with waiting(path, 1, user="hold"):
            await until(lambda: len(stub.requests) == 21)
            async with waiting(path, 3, user="hold"):
                answer = await client.post(CHAT, json=BODY)
                told = refused(answer, 429, "pool_full")
                seconds, ms = answer.headers["retry-after"], int(answer.headers["retry-after-ms"])
                assert 1_000 <= ms <= 30_000
                assert seconds == str(-(-ms // 1000))
                assert f"try again in {seconds} s" in told


# ---- do not queue longer than


@pytest.mark.parametrize("value", ["0", "-1", "0.5", "soon", "", "99999999", "1e3", "NaN"])
async def test_what_is_no_bound_on_waiting_is_a_400(valkey: ValkeyProcess, value: str) -> None:
    async with stack(valkey.url, "http://127.0.0.1:9/v1") as path, httpx.AsyncClient(base_url=path.url) as client:
        answer = await client.post(CHAT, json=BODY, headers={"x-dispatch-max-wait-ms": value})
        assert "X-Dispatch-Max-Wait-Ms" in refused(answer, 400, "invalid_header")
        assert path.submitted() == 0


async def test_a_call_is_not_queued_longer_than_it_says(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(lambda _: Script((Hold(),))) as stub,
        stack(valkey.url, f"{stub.url}/v1", pools=pools(max_concurrent=1)) as path,
        httpx.AsyncClient(base_url=path.url, timeout=30) as client,
        waiting(path, 1),
    ):
        await until(lambda: len(stub.requests) == 1)
        for body in (BODY, BODY | {"stream": True}):
            started = time.monotonic()
            answer = await client.post(CHAT, json=body, headers={"x-dispatch-max-wait-ms": "300"})
            assert 0.3 <= time.monotonic() - started < 1.3 + SLACK_S
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (429, "max_wait_exceeded")
            assert answer.headers["x-dispatch-reason"] == "rejected-max_wait"
            assert answer.headers["x-should-retry"] == "true"
            assert "in pool 'default'. Nothing was done" in error["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 30  # one was launched: the pool's pace is known
        assert len(stub.requests) == 1


async def test_nobody_is_told_to_come_back_to_a_pool_that_stands_still(valkey: ValkeyProcess) -> None:
    async with stack(valkey.url, "http://127.0.0.1:9/v1") as path:
        pause(path)
        async with httpx.AsyncClient(base_url=path.url, timeout=30) as client:
            for header in ("x-dispatch-max-wait-ms", "x-dispatch-timeout-ms"):
                answer = await client.post(CHAT, json=BODY, headers={header: "100"})
                assert answer.status_code == 429
                assert "retry-after" not in answer.headers


async def test_a_call_that_was_launched_in_time_may_run_longer_than_it_would_have_waited(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async with (
        EchoGateway(connection, group, after(0.5, 0.6)),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        reply = await client.complete(model="m", messages=say("hi"), max_wait=0.4)
        assert said(reply.body) == "hi"


async def test_both_clients_end_a_call_that_waited_too_long(valkey: ValkeyProcess, group: str) -> None:
    def blocking() -> RequestEnded:
        with BlockingClient(valkey.url, fabric_group=group) as client, pytest.raises(RequestEnded) as ended:
            client.complete(model="m", messages=MESSAGES, max_wait=0.3)
        return ended.value

    async with DispatchClient(valkey.url, fabric_group=group) as client:
        with pytest.raises(RequestEnded) as ended:
            await client.complete(model="m", messages=MESSAGES, max_wait=0.3)
        for error in (ended.value, await anyio.to_thread.run_sync(blocking)):
            assert error.reply.ending == "expired"
            assert error.reply.error is not None
            assert error.reply.error.type == "max_wait_exceeded"
        for wrong in (0, -1, float("nan"), "1"):
            with pytest.raises(InvalidRequest) as refusal:
                await client.complete(model="m", messages=MESSAGES, max_wait=wrong)
            assert refusal.value.param == "max_wait"


# ---- waiting for room


def small_group(valkey: ValkeyProcess, **fields: Any) -> str:
    """Configure a group whose default pool takes one waiting request."""
    group = unique_group()
    configure(
        valkey.url,
        group,
        default_document("http://127.0.0.1:9/v1") | {"pools": pools(**({"max_queue_depth": 1} | fields))},
    )
    return group


Complete = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def either(kind: str, url: str, group: str) -> AsyncIterator[Complete]:
    """Open a client of either kind and yield its `complete`, which waits in a thread for the blocking one."""
    if kind == "async":
        async with DispatchClient(url, fabric_group=group) as client:
            yield client.complete
        return
    blocking = await anyio.to_thread.run_sync(BlockingClient(url, fabric_group=group).__enter__)
    try:
        yield lambda **arguments: anyio.to_thread.run_sync(lambda: blocking.complete(**arguments))
    finally:
        await anyio.to_thread.run_sync(blocking.close)


KINDS = pytest.mark.parametrize("kind", ["async", "blocking"])


@KINDS
@pytest.mark.parametrize("size", [10, 300_000], ids=["small", "large"])
async def test_a_call_that_waits_for_room_is_made_once_there_is_some(
    valkey: ValkeyProcess, connection: Connection, kind: str, size: int
) -> None:
    group = small_group(valkey)
    hand = ByHand(valkey.url, group)
    [filler] = hand.submit()
    text = "y" * size
    async with either(kind, valkey.url, group) as complete:
        replies: list[Any] = []

        async def call() -> None:
            replies.append(await complete(model="m", messages=say(text), timeout=60, wait_for_room=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: hand.pool("default").get("rejected", {}).get("pool_full", 0) >= 2, within_s=20)
            assert hand.pool("default")["submitted"] == 1
            assert hand.run(functions.request_cancel(filler, actor="test")).status == "CANCELLED"
            async with EchoGateway(connection, group) as gateway:
                await until(lambda: bool(replies), within_s=40)
        assert said(replies[0].body) == text
        assert list(gateway.runs.values()) == [1]
    hand.close()


@KINDS
async def test_a_call_that_waits_in_vain_ends_with_the_refusal_and_within_its_time(
    valkey: ValkeyProcess, kind: str
) -> None:
    group = small_group(valkey)
    hand = ByHand(valkey.url, group)
    hand.submit()
    async with either(kind, valkey.url, group) as complete:
        started = time.monotonic()
        with pytest.raises(RequestRefused) as refusal:
            await complete(model="m", messages=MESSAGES, timeout=1.5, wait_for_room=True)
        assert time.monotonic() - started < 1.5 + SLACK_S
        error = refusal.value
        assert (error.reason, error.pool, error.depth, error.limit) == ("pool_full", "default", 1, 1)
        assert error.retry_after is None  # nothing was launched, so nobody knows
        with pytest.raises(RequestRefused):  # and nobody waits who did not say so
            await complete(model="m", messages=MESSAGES, timeout=60)
        with pytest.raises(InvalidRequest) as wrong:
            await complete(model="m", messages=MESSAGES, wait_for_room=True)
        assert wrong.value.param == "timeout"
    assert hand.pool("default")["submitted"] == 1
    hand.close()


async def test_the_time_spent_on_waiting_for_room_is_a_part_of_the_timeout(valkey: ValkeyProcess) -> None:
    group = small_group(valkey)
    hand = ByHand(valkey.url, group)
    [filler] = hand.submit()
    async with DispatchClient(valkey.url, fabric_group=group) as client, anyio.create_task_group() as tasks:

        async def make_room() -> None:
            await anyio.sleep(1.5)
            hand.run(functions.request_cancel(filler, actor="test"))

        tasks.start_soon(make_room)
        started = time.monotonic()
        with pytest.raises(RequestEnded) as ended:
            await client.complete(model="m", messages=MESSAGES, timeout=6, wait_for_room=True)
        assert ended.value.reply.ending == "expired"
        assert 5.5 < time.monotonic() - started < 6 + SLACK_S
        assert ended.value.reply.queue_ms is not None
        assert ended.value.reply.queue_ms < 5_000
    hand.close()


async def test_a_caller_that_leaves_while_it_waits_for_room_leaves_nothing_behind(valkey: ValkeyProcess) -> None:
    group = small_group(valkey)
    hand = ByHand(valkey.url, group)
    [filler] = hand.submit()
    client = DispatchClient(valkey.url, fabric_group=group)
    outcomes: list[BaseException] = []

    async def call() -> None:
        try:
            await client.complete(model="m", messages=MESSAGES, timeout=60, wait_for_room=True)
        except StateConflict as error:
            outcomes.append(error)

    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        with anyio.move_on_after(0.4):
            await client.complete(model="m", messages=MESSAGES, timeout=60, wait_for_room=True)
        await client.aclose()  # while one still waits
        with anyio.fail_after(5):
            while not outcomes:  # noqa: ASYNC110 - another task's
                await anyio.sleep(0.01)
    hand.run(functions.request_cancel(filler, actor="test"))
    assert hand.pool("default")["submitted"] == 1
    hand.close()


async def test_a_batch_larger_than_its_pool_goes_through(valkey: ValkeyProcess, connection: Connection) -> None:
    group = small_group(valkey, max_queue_depth=2, max_concurrent=2)
    items = [
        {"model": "m", "messages": say(str(number)), "timeout": 100, "wait_for_room": True} for number in range(12)
    ]
    async with (
        EchoGateway(connection, group, after(0.05, 0.1)),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        outcomes = await client.batch_generate(items)
        assert [said(outcome.body) for outcome in outcomes if not isinstance(outcome, Exception)] == [
            str(number) for number in range(12)
        ]


async def test_a_stream_waits_for_room_too(valkey: ValkeyProcess) -> None:
    group = small_group(valkey)
    hand = ByHand(valkey.url, group)
    [filler] = hand.submit()
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        stream = client.stream(model="m", messages=MESSAGES, timeout=30, wait_for_room=True)
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                with anyio.move_on_after(20):
                    await stream.read(within_s=15)

            tasks.start_soon(read)
            await until(lambda: hand.pool("default").get("rejected", {}).get("pool_full", 0) >= 2, within_s=20)
            hand.run(functions.request_cancel(filler, actor="test"))
            await until(lambda: hand.pool("default")["submitted"] == 2, within_s=20)
            tasks.cancel_scope.cancel()
        await stream.aclose()
    hand.close()

"""A call that is repeated with its key is made once and answered again, by any gateway, also for a caller that left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from dispatch.config import GatewaySettings
from dispatch.fabric.schema import key
from dispatch.gateway import Gateway
from dispatch.ingress import IngressState, create_app
from dispatch.producer.client import DispatchClient
from tests.support.front import serving
from tests.support.leftovers import counters_above_zero, endings_by_request, keys_without_expiry
from tests.support.producing import eye, say, until
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Pause, Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": say("hi")}
KEY = {"idempotency-key": '"8e03978e-40d5-43dd-bc93-6894a57f9324"'}
REPLAYED = "x-dispatch-replayed"


def numbered(size: int = 0, pause_s: float = 0.0) -> Any:
    """Return answers that can be told apart, of at least `size` bytes."""
    count = 0

    def answer(_request: SeenRequest) -> Script:
        nonlocal count
        count += 1
        message = {"role": "assistant", "content": "x" * size}
        body = {"id": f"c{count}", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        steps = json_answer(json.dumps(body).encode()).steps
        return Script((Pause(pause_s), *steps) if pause_s else steps)

    return answer


def http(path: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=path.url, timeout=30)


def told(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, answer.headers["x-dispatch-reason"]


@asynccontextmanager
async def second_front(path: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """Start another gateway of the same group, with its own HTTP front."""
    gateway = Gateway(GatewaySettings(valkey_url=path.valkey_url, fabric_group=path.group, drain_timeout_ms=500))
    async with (
        gateway,
        DispatchClient(path.valkey_url, fabric_group=path.group, close_ms=200) as client,
        serving(create_app(IngressState(client=client, gateway=gateway))) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as opened,
    ):
        yield opened


def stored_keys(path: Stack) -> dict[str, int]:
    """Return what is kept for repeats, with its time to live in ms."""
    with eye(path.valkey_url) as look:
        names = [name for part in ("idempotency", ":result:", "body:llm:reply") for name in path.keys(part)]
        return {name: look.pttl(name) for name in names}


@pytest.mark.parametrize("size", [0, 70_000, 2_000_000])
async def test_a_repeat_gets_the_stored_reply_byte_for_byte_from_any_gateway(valkey: ValkeyProcess, size: int) -> None:
    async with StubBackend(numbered(size)) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        first = await client.post(CHAT, json=BODY, headers=KEY)
        assert (first.status_code, first.headers.get(REPLAYED)) == (200, None)
        bare = {"idempotency-key": KEY["idempotency-key"].strip('"')}
        async with second_front(path) as other:
            fronts = (client, other)
            again = [await front.post(CHAT, json=BODY, headers=name) for front in fronts for name in (KEY, bare)]
        for answer in again:
            assert (answer.status_code, answer.content) == (200, first.content)
            assert (answer.headers[REPLAYED], answer.headers["content-type"]) == ("true", first.headers["content-type"])
            assert answer.headers["x-dispatch-request-id"] == first.headers["x-dispatch-request-id"]
        assert len(stub.requests) == 1
        assert list(endings_by_request(valkey.url, path.group).values()) == [1]
        kept = stored_keys(path)
        assert len(kept) == (3 if size else 2)
        assert all(ttl > 23 * 3_600_000 for ttl in kept.values())
        assert keys_without_expiry(valkey.url, path.group) == []


async def test_while_it_runs_a_repeat_is_409_and_another_call_is_422(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(numbered(pause_s=1.0)) as stub,
        stack(valkey.url, f"{stub.url}/v1") as path,
        http(path) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(post_quietly, client, KEY)
        await stub.until(lambda stub: len(stub.requests) == 1)
        answer = await client.post(CHAT, json=BODY, headers=KEY)
        assert told(answer) == (409, "rejected-idempotency_in_progress")
        assert (answer.headers["x-should-retry"], answer.json()["error"]["param"]) == ("true", "idempotency-key")
        others = [
            await client.post(CHAT, json=BODY | {"temperature": 1}, headers=KEY),
            await client.post(CHAT, content=json.dumps(BODY).encode() + b" ", headers=KEY),
            await client.post(f"/pools/backfill{CHAT}", json=BODY, headers=KEY),
            await client.post("/v1/completions", json={"model": "m", "prompt": "hi"}, headers=KEY),
        ]
        assert {told(other) for other in others} == {(422, "rejected-idempotency_mismatch")}
        assert {other.headers["x-should-retry"] for other in others} == {"false"}
        await until(lambda: len(path.endings()) == 1)
        assert (await client.post(CHAT, json=BODY, headers=KEY)).headers[REPLAYED] == "true"
        assert told(await client.post(CHAT, json=BODY | {"n": 1}, headers=KEY))[0] == 422
        assert path.submitted() == 1


async def post_quietly(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    await client.post(CHAT, json=BODY, headers=headers)


async def test_of_many_at_once_one_is_made_and_all_get_its_reply_in_the_end(valkey: ValkeyProcess) -> None:
    contents: set[bytes] = set()
    conflicts = 0

    async def insist(client: httpx.AsyncClient) -> None:
        nonlocal conflicts
        while (answer := await client.post(CHAT, json=BODY, headers=KEY)).status_code == 409:
            conflicts += 1
            await anyio.sleep(0.1)
        assert answer.status_code == 200
        contents.add(answer.content)

    async with StubBackend(numbered(pause_s=0.3)) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client, second_front(path) as other, anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(insist, client)
                tasks.start_soon(insist, other)
        assert (len(contents), len(stub.requests), path.submitted()) == (1, 1, 1)
        assert conflicts


async def test_the_first_caller_may_be_gone(valkey: ValkeyProcess) -> None:
    """With a key the call goes on, for the client that comes back with it; without one it is stopped."""
    async with StubBackend(numbered(pause_s=0.6)) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client:
            with anyio.move_on_after(0.3):
                await client.post(CHAT, json=BODY, headers=KEY)
            assert len(stub.requests) == 1
            assert (await client.post(CHAT, json=BODY, headers=KEY)).status_code == 409
            await until(lambda: len(path.endings()) == 1)
            answer = await client.post(CHAT, json=BODY, headers=KEY)
            assert (answer.status_code, answer.json()["id"], answer.headers[REPLAYED]) == (200, "c1", "true")
            with anyio.move_on_after(0.3):
                await client.post(CHAT, json=BODY)
        await until(lambda: [row["ending"] for row in path.endings()] == ["cancelled", "succeeded"])
        assert counters_above_zero(valkey.url, path.group) == {}


async def test_replies_that_failed_are_repeated_as_well(valkey: ValkeyProcess) -> None:
    refusal = json_answer(b'{"error":{"message":"no","type":"x","param":null,"code":null}}', status="400 Bad Request")
    async with StubBackend([refusal, numbered()(None)]) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client:
            first, again = [await client.post(CHAT, json=BODY, headers=KEY) for _ in range(2)]
        assert first.status_code == again.status_code == 400
        assert first.content == again.content
        assert (first.headers["x-dispatch-reason"], again.headers["x-dispatch-reason"]) == ("ended-failed",) * 2
        assert again.headers[REPLAYED] == "true"
        assert len(stub.requests) == 1


async def test_what_never_ran_gives_its_key_back(valkey: ValkeyProcess) -> None:
    """A refusal, and a deadline that passed in the queue, are no replies to repeat."""
    pools = [{"pool_id": "default", "quantum": 1, "max_concurrent": 1}]
    held = [Script((Hold(),)), numbered()(None)]
    async with StubBackend(held) as stub, stack(valkey.url, f"{stub.url}/v1", pools=pools) as path:
        async with http(path) as client, anyio.create_task_group() as tasks:
            assert told(await client.post(f"/pools/nope{CHAT}", json=BODY, headers=KEY))[0] == 404
            tasks.start_soon(post_quietly, client, {})
            await stub.until(lambda stub: len(stub.requests) == 1)
            late = await client.post(CHAT, json=BODY, headers=KEY | {"x-dispatch-timeout-ms": "200"})
            assert told(late) == (429, "rejected-deadline")
            tasks.cancel_scope.cancel()
        async with http(path) as client:
            answer = await client.post(CHAT, json=BODY, headers=KEY)
        assert (answer.status_code, answer.headers.get(REPLAYED)) == (200, None)
        assert len(stub.requests) == 2


async def test_a_stored_body_that_is_gone_is_told_and_nothing_is_made_again(valkey: ValkeyProcess) -> None:
    async with StubBackend(numbered(100_000)) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client:
            assert (await client.post(CHAT, json=BODY, headers=KEY)).status_code == 200
            with eye(valkey.url) as look:
                [body_key] = path.keys("body:llm:reply")
                look.delete(body_key)
                answer = await client.post(CHAT, json=BODY, headers=KEY)
                assert told(answer) == (502, "ended-outcome_unknown")
                assert "its body is gone" in answer.json()["error"]["message"]
        assert len(stub.requests) == 1


async def test_a_reply_is_repeated_until_its_time_is_over_and_then_the_call_is_made_again(
    valkey: ValkeyProcess,
) -> None:
    async with (
        StubBackend(numbered(70_000)) as stub,
        stack(valkey.url, f"{stub.url}/v1", idempotency_ttl_ms=2_000) as path,
        http(path) as client,
    ):
        first = await client.post(CHAT, json=BODY, headers=KEY)
        again = await client.post(CHAT, json=BODY, headers=KEY)
        assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
        assert all(0 < ttl <= 2_000 for ttl in stored_keys(path).values())
        await until(lambda: stored_keys(path) == {}, within_s=10)
        later = await client.post(CHAT, json=BODY, headers=KEY)
        assert (later.status_code, later.json()["id"], later.headers.get(REPLAYED)) == (200, "c2", None)
        assert len(stub.requests) == 2


async def test_a_reply_that_was_dropped_because_its_producer_died_is_kept_for_the_repeat(
    valkey: ValkeyProcess,
) -> None:
    """As when the process that held the connection was killed: nobody could be told, and a repeat is."""
    async with (
        StubBackend(numbered(70_000, pause_s=0.8)) as stub,
        stack(valkey.url, f"{stub.url}/v1") as path,
        http(path) as client,
        second_front(path) as other,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(post_quietly, client, KEY)
        await stub.until(lambda stub: len(stub.requests) == 1)
        producer = path.client.producer_id
        assert producer is not None
        with eye(valkey.url) as look:
            look.delete(key(path.group, "alive", producer=producer), key(path.group, "replies", producer=producer))
        await until(lambda: [row["ending"] for row in path.endings()] == ["reply_dropped"])
        answer = await other.post(CHAT, json=BODY, headers=KEY)
        assert (answer.status_code, answer.json()["id"], answer.headers[REPLAYED]) == (200, "c1", "true")
        assert len(stub.requests) == 1
        tasks.cancel_scope.cancel()


async def test_keys_stand_in_valkey_as_digests_only(valkey: ValkeyProcess) -> None:
    async with StubBackend(numbered()) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        await client.post(CHAT, json=BODY, headers={"idempotency-key": "callers-secret-key"})
        with eye(valkey.url) as look:
            names = path.keys("")
            reads = {b"string": look.get, b"hash": look.hgetall, b"stream": look.xrange}
            contents = [str(reads[look.type(name)](name)) for name in names if look.type(name) in reads]
        assert len(contents) > 8
        assert not [text for text in (*names, *contents) if "callers-secret-key" in text]

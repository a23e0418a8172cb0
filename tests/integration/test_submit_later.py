"""Submit now, fetch later over HTTP: the call's bytes, any operation, and a reply that is kept for its key."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from tests.support.calls import COMPLETION
from tests.support.control import ControlStack, control_stack, told
from tests.support.leftovers import keys_without_expiry
from tests.support.producing import eye, say
from tests.support.stub import Hold, Pause, Script, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000
CHAT: dict[str, str] = {"x-dispatch-operation": "chat.completions", "content-type": "application/json"}
BODY: dict[str, Any] = {"model": "m", "messages": say("hi")}
ODD = b'{"messages" : [{"content":"h\\u0069","role":"user"}],"model":"m", "seed": 12345678901234567890123, "x":1.50 }'
"""A body whose bytes do not survive being read and written again."""


@asynccontextmanager
async def running(valkey: ValkeyProcess, script: Any, **more: Any) -> AsyncIterator[tuple[ControlStack, StubBackend]]:
    async with StubBackend(script) as stub, control_stack(valkey.url, f"{stub.url}/v1", runs=True, **more) as control:
        yield control, stub


async def submit(control: ControlStack, body: Any = None, role: str = "submit", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body or BODY).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await control.http(role).post("/requests", content=content, headers=CHAT | named)


async def submitted(control: ControlStack, body: Any = None, role: str = "submit", **headers: str) -> str:
    answer = await submit(control, body, role, **headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["request_id"])


async def reply(control: ControlStack, request_id: str, role: str = "submit") -> httpx.Response:
    """Wait until there is one."""
    with anyio.fail_after(30):
        while (answer := await control.get(f"/requests/{request_id}/reply", role)).status_code == 409:
            assert told(answer) == (409, "not_ended")
            assert answer.headers["x-should-retry"] == "true"
            await anyio.sleep(0.02)
    return answer


async def test_a_call_is_taken_with_its_bytes_and_its_answer_kept(valkey: ValkeyProcess) -> None:
    async with running(valkey, json_answer(COMPLETION, headers=[("x-served-by", "stub")])) as (control, stub):
        answer = await submit(control, ODD, x_dispatch_pool="interactive", x_dispatch_timeout_ms="60000")
        facts = answer.json()
        request_id = facts["request_id"]
        assert (answer.status_code, facts["pool_id"], facts["repeated"]) == (202, "interactive", False)
        assert answer.headers["location"] == facts["href"] == f"/api/v1/requests/{request_id}"
        assert answer.headers["x-dispatch-request-id"] == request_id
        assert request_id.startswith(f"{control.key_ids['submit']}.")
        got = await reply(control, request_id)
        assert (got.status_code, got.content) == (200, COMPLETION)
        assert got.headers["content-type"] == "application/json"
        assert (got.headers["x-dispatch-pool"], got.headers["x-dispatch-request-id"]) == ("interactive", request_id)
        assert int(got.headers["x-dispatch-queue-ms"]) >= 0
        state = (await control.get(f"/requests/{request_id}", "submit")).json()
        [request] = stub.requests
        assert (request.body, request.target) == (ODD, "/v1/chat/completions")
        assert (state["state"], state["ending"], state["detached"]) == ("ended", "succeeded", True)
        assert state["deadline_ms"] == facts["deadline_ms"]
        assert state["reply"]["body"] == json.loads(COMPLETION)
        assert state["reply"]["href"] == f"/api/v1/requests/{request_id}/reply"
        assert (state["reply"]["status"], state["reply"]["usage"]["input_tokens"]) == (200, 3)
        left = keys_without_expiry(control.hand.url, control.group)
        assert [name for name in left if not name.endswith("hash:llm:keys")] == []


@pytest.mark.parametrize(
    ("operation", "body", "path"),
    [
        ("completions", {"model": "m", "prompt": "p"}, "/v1/completions"),
        ("embeddings", {"model": "m", "input": "p"}, "/v1/embeddings"),
        ("responses", {"model": "m", "input": "p"}, "/v1/responses"),
    ],
)
async def test_any_operation_can_be_submitted(
    valkey: ValkeyProcess, operation: str, body: dict[str, Any], path: str
) -> None:
    async with running(valkey, json_answer(b'{"object":"list","data":[]}')) as (control, stub):
        request_id = await submitted(control, body, x_dispatch_operation=operation)
        assert (await reply(control, request_id)).status_code == 200
        assert [request.target for request in stub.requests] == [path]


async def test_large_bodies_both_ways(valkey: ValkeyProcess) -> None:
    large = json.dumps({"choices": [], "text": "y" * 300_000}).encode()
    async with running(valkey, json_answer(large)) as (control, stub):
        request_id = await submitted(control, BODY | {"messages": say("x" * 300_000)})
        assert (await reply(control, request_id)).content == large
        assert (await reply(control, request_id)).content == large
        assert len(stub.requests[0].body) > 300_000
        facts = (await control.get(f"/requests/{request_id}")).json()["reply"]
        assert "body" not in facts
        with eye(valkey.url) as look:
            assert look.pttl(key(control.group, "reply_body", id=request_id)) > 23 * HOUR_MS
            look.delete(key(control.group, "reply_body", id=request_id))
        assert told(await control.get(f"/requests/{request_id}/reply"))[0] == 502


async def test_an_endpoints_error_is_answered_as_the_call_would_have_been(valkey: ValkeyProcess) -> None:
    error = b'{"error":{"message":"no such model","type":"x","param":null,"code":"model_not_found"}}'
    async with running(valkey, json_answer(error, status="404 Not Found")) as (control, _):
        request_id = await submitted(control)
        got = await reply(control, request_id)
        assert (got.status_code, got.content) == (404, error)
        assert got.headers["x-dispatch-reason"] == "ended-failed"
        state = (await control.get(f"/requests/{request_id}", "submit")).json()
        assert (state["ending"], state["reply"]["status"]) == ("failed", 404)


async def test_it_says_where_it_is_and_can_be_stopped_by_its_key(valkey: ValkeyProcess) -> None:
    async with running(valkey, Script((Hold(),)), total_concurrent_dispatch=1) as (control, stub):
        first = await submitted(control)
        await stub.until(lambda seen: len(seen.requests) == 1, 20)
        second = await submitted(control)
        runs = (await control.get(f"/requests/{first}", "submit")).json()
        waits = (await control.get(f"/requests/{second}", "submit")).json()
        assert (runs["state"], waits["state"], waits["queue"]["pending"]) == ("leased", "queued", 1)
        assert told(await control.get(f"/requests/{second}/reply", "submit")) == (409, "not_ended")
        for request_id in (second, first):
            stopped = (await control.http("submit").post(f"/requests/{request_id}/cancel")).json()
            assert stopped["result"] in {"cancelled", "cancelling"}
            got = await reply(control, request_id)
            assert (got.status_code, got.headers["x-dispatch-reason"]) == (503, "ended-cancelled")
        await stub.until(lambda seen: seen.open_connections == 0, 20)


async def test_the_reply_is_for_its_key_and_for_admins(valkey: ValkeyProcess) -> None:
    async with running(valkey, json_answer(COMPLETION)) as (control, _):
        request_id = await submitted(control)
        await reply(control, request_id)
        for role in ("admin", "submit"):
            assert (await control.get(f"/requests/{request_id}/reply", role)).content == COMPLETION
            assert "body" in (await control.get(f"/requests/{request_id}", role)).json()["reply"]
        seen = (await control.get(f"/requests/{request_id}", "observe")).json()
        assert seen["reply"]["status"] == 200
        assert "body" not in seen["reply"]
        with eye(valkey.url) as look:  # its record is gone after a minute
            look.delete(key(control.group, "request", id=request_id))
        for role in ("observe", "observe-backfill", "other-submit", "admin-of-backfill"):
            assert told(await control.get(f"/requests/{request_id}/reply", role)) == (404, "request_unknown"), role
        for role in ("observe-backfill", "other-submit"):
            assert told(await control.get(f"/requests/{request_id}", role)) == (404, "request_unknown"), role
            assert told(await control.http(role).post(f"/requests/{request_id}/cancel"))[0] == 404
        kept = (await control.get(f"/requests/{request_id}", "submit")).json()
        assert (kept["state"], kept["ending"], kept["pool_id"]) == ("ended", "succeeded", "default")
        assert kept["reply"]["body"] == json.loads(COMPLETION)


async def test_the_same_key_and_call_is_the_same_request(valkey: ValkeyProcess) -> None:
    async with running(valkey, Script((Pause(0.3), *json_answer(COMPLETION).steps))) as (control, stub):
        first = await submitted(control, idempotency_key="k1")
        again = (await submit(control, idempotency_key="k1")).json()
        assert (again["request_id"], again["repeated"], again["deadline_ms"]) == (first, True, None)
        await reply(control, first)
        ended = (await submit(control, idempotency_key="k1")).json()
        assert (ended["request_id"], ended["repeated"]) == (first, True)
        assert told(await submit(control, BODY | {"n": 2}, idempotency_key="k1")) == (422, "idempotency_mismatch")
        other = await submitted(control, role="other-submit", idempotency_key="k1")  # another key's own
        assert other != first
        await reply(control, other, "other-submit")
        called = await control.http("submit").post(
            f"{control.url}/v1/chat/completions", content=json.dumps(BODY), headers=CHAT | {"idempotency-key": "k1"}
        )
        assert (called.status_code, called.headers["x-dispatch-replayed"]) == (200, "true")
        assert len(stub.requests) == 2


async def test_what_cannot_be_submitted_is_refused_as_a_call_would_be(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "full", "max_queue_depth": 0}, {"pool_id": "default"}]
    async with control_stack(valkey.url, pools=pools) as control:
        stream = await submit(control, BODY | {"stream": True})
        assert (told(stream), stream.json()["error"]["param"]) == ((400, "unsupported"), "stream")
        for operation in ("", "chat/completions", "images"):
            wrong = await submit(control, x_dispatch_operation=operation)
            assert (told(wrong), wrong.json()["error"]["param"]) == (
                (400, "invalid_header"), "x-dispatch-operation",
            )  # fmt: skip
            assert "chat.completions" in wrong.json()["error"]["message"]
        assert told(await submit(control, {"model": "m"})) == (400, "missing_member")
        assert told(await submit(control, b"model=m", content_type="text/plain")) == (415, "unsupported_media_type")
        assert told(await submit(control, x_dispatch_pool="nowhere")) == (404, "pool_unknown")
        assert told(await submit(control, x_dispatch_pool="full")) == (429, "pool_full")
        assert told(await submit(control, x_dispatch_timeout_ms="0")) == (400, "invalid_header")
        control.gateway.facts["draining"] = True  # type: ignore[union-attr]  # it is the fake one
        assert told(await submit(control)) == (503, "draining")
        assert control.hand.section("group")["pending"] == 0


async def test_a_request_of_the_sdk_is_fetched_over_http_and_the_other_way_round(valkey: ValkeyProcess) -> None:
    async with running(valkey, json_answer(COMPLETION)) as (control, _):
        request_id = await submitted(control)
        async with DispatchClient(valkey.url, fabric_group=control.group) as client:
            assert (await client.result(request_id, timeout=20)).body == COMPLETION
            handle = await client.submit(**BODY)
        assert (await reply(control, handle.id, "admin")).content == COMPLETION
        assert told(await control.get(f"/requests/{handle.id}", "submit")) == (404, "request_unknown")


async def test_a_call_without_an_idempotency_key_leaves_no_reply_to_fetch(valkey: ValkeyProcess) -> None:
    async with running(valkey, json_answer(COMPLETION)) as (control, _):
        called = await control.http("submit").post(f"{control.url}/v1/chat/completions", json=BODY)
        request_id = called.headers["x-dispatch-request-id"]
        assert (await control.get(f"/requests/{request_id}", "submit")).json()["ending"] == "succeeded"
        answer = await control.get(f"/requests/{request_id}/reply", "submit")
        assert told(answer) == (404, "request_unknown")
        assert "no reply of it is kept" in answer.json()["error"]["message"]

"""What both sides agree on: versions, bytes, sizes, numbers. What does not fit is refused before anything is queued."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dispatch import DispatchClient
from dispatch.contract import CONTRACT_VERSION
from dispatch.errors import ContractMismatch, InvalidRequest, LibraryProblem, RequestRefused
from dispatch.fabric import functions as f
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.records import Submission
from dispatch.fabric.schema import key
from dispatch.fabric.verifying import require_same
from tests.behaviours.scene import BOTH_CLIENTS, Caller, Watching, gateway_on, records, section
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.producing import eye, until, wide_group
from tests.support.stack import Stack, stack
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

OTHER = CONTRACT_VERSION + 1

PARTS = [
    {"type": "text", "text": "first\u2028line é 漢 🙂"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
    {"type": "text", "text": "between"},
    {"type": "input_audio", "input_audio": {"format": "wav", "data": "UklGRg=="}},
    {"type": "image_url", "image_url": {"detail": "high", "url": "http://x/y.png"}},
]
MULTIMODAL = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": PARTS, "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
    {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "1"},
]


@asynccontextmanager
async def door(valkey: ValkeyProcess, **document: Any) -> AsyncIterator[tuple[Stack, StubBackend, httpx.AsyncClient]]:
    """A front door before a queue before a stub that says "hi"."""
    async with (
        StubBackend(json_answer(COMPLETION)) as stub,
        stack(valkey.url, f"{stub.url}/v1", **document) as path,
        httpx.AsyncClient(base_url=path.url, timeout=20) as http,
    ):
        yield path, stub, http


def spoken_by_others(call: FunctionCall[Any]) -> FunctionCall[Any]:
    """Return the call as another version of this package would make it."""
    return type(call)(call.function, [OTHER, *call.args[1:]], call.decode)


def a_submit() -> FunctionCall[Any]:
    submission = Submission(
        request_id="r", pool_id="default", producer_id="p", session="s", nonce="n", model="m", message_count=1,
        images=0, pages=0, estimated_cost_units=None, timeout_ms=None, envelope=b"{}", body_bytes=2, body=b"{}",
    )  # fmt: skip
    return f.request_submit(submission)


def test_a_producer_of_another_version_is_refused_and_nothing_is_queued(hand: ByHand) -> None:
    with pytest.raises(ContractMismatch, match=f"{OTHER}.*{CONTRACT_VERSION}"):
        hand.run(spoken_by_others(a_submit()))
    assert hand.section("group")["pending"] == 0
    assert hand.section("request", subject="r")["rows"] == []


def test_a_config_of_another_version_is_refused(hand: ByHand) -> None:
    call = f.group_check(b"{}", expected_generation=1)
    with pytest.raises(ContractMismatch):
        hand.run(spoken_by_others(call))


async def test_a_request_of_another_version_is_told_by_the_gateway_that_gets_it(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url)
    async with Caller("asynchronous", valkey.url, fabric_group=group) as caller:
        call = asyncio.create_task(caller.ended(request_id="r"))
        await until(lambda: section(valkey.url, group, "group")["pending"] == 1)
        with eye(valkey.url) as client:
            envelope = json.loads(client.hget(key(group, "request", id="r"), "envelope")) | {"contract": OTHER}
            client.hset(key(group, "request", id="r"), "envelope", json.dumps(envelope))
        executor = Watching(held=False)
        async with gateway_on(valkey.url, group, executor):
            reply = await call
    assert (reply.ending, reply.error and reply.error.type) == ("failed", "contract_mismatch")
    assert not executor.begun


async def test_a_reply_of_another_version_is_an_error_and_no_answer(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url)
    async with DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client:
        call = asyncio.create_task(client.complete(model="m", messages=[], request_id="r", timeout=20))
        await until(lambda: section(valkey.url, group, "group")["pending"] == 1)
        with eye(valkey.url) as look:
            look.rpush(
                key(group, "replies", producer="p"), f"{OTHER}|1|terminal|r|succeeded|default|1|0|0|0\n{{}}\n{{}}"
            )
            look.rpush(key(group, "wake_producer", producer="p"), 1)
        with pytest.raises(ContractMismatch, match=f"contract {OTHER}"):
            await call


async def test_a_server_with_another_librarys_version_is_refused_with_the_command_to_run(hand: ByHand) -> None:
    found = hand.run(f.library_version())
    with pytest.raises(LibraryProblem, match="dispatch scripts load"):
        require_same(type(found)(found.contract + 1, found.digest, found.version))


async def test_a_multimodal_body_reaches_the_backend_byte_for_byte_over_http(valkey: ValkeyProcess) -> None:
    body = json.dumps({"model": "m", "messages": MULTIMODAL, "seed": 10**30, "top_p": 0.1}, indent=1).encode()
    body = body.replace(b'"top_p": 0.1', b'"top_p":   0.10000000000000001')
    async with door(valkey) as (_, stub, http):
        answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.content) == (200, COMPLETION)
        assert [request.body for request in stub.requests] == [body]


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_multimodal_messages_keep_shape_and_order_and_direct_equals_queued(
    valkey: ValkeyProcess, kind: str
) -> None:
    call = {"messages": MULTIMODAL, "temperature": 0.5, "x_vendor": {"k": [1, None]}}
    async with door(valkey) as (path, stub, _):
        async with Caller(kind, valkey.url, fabric_group=path.group) as queued:
            through = await queued.complete(**call)
        async with Caller(kind, direct=True, endpoint=f"{stub.url}/v1") as direct:
            straight = await direct.complete(**call)
        first, second = (request.body for request in stub.requests)
    assert first == second
    assert json.loads(first)["messages"] == MULTIMODAL
    assert [list(part) for part in json.loads(first)["messages"][1]["content"]] == [list(part) for part in PARTS]
    assert (through.text(), through.body) == (straight.text(), straight.body)
    assert through.text() == "hi"


async def test_an_oversized_body_is_refused_with_nothing_queued(valkey: ValkeyProcess) -> None:
    async with door(valkey, max_payload_bytes=6000) as (path, stub, http):
        large = [{"role": "user", "content": "x" * 6000}]
        answer = await http.post("/v1/chat/completions", json={"model": "m", "messages": large})
        assert answer.status_code == 413
        for kind in BOTH_CLIENTS:
            async with Caller(kind, valkey.url, fabric_group=path.group) as caller:
                with pytest.raises(RequestRefused) as refused:
                    await caller.complete(messages=large)
                assert (refused.value.reason, refused.value.limit) == ("body_too_large", 6000)
                small = await caller.complete(messages=[{"role": "user", "content": "x" * 5000}])
                assert small.succeeded
        assert path.submitted() == 2
        assert len(stub.requests) == 2
        assert path.keys("body:llm:request") == []


NOT_FINITE = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("number", NOT_FINITE, ids=str)
@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_a_number_that_is_not_finite_is_refused_by_its_name_with_nothing_sent(
    valkey: ValkeyProcess, kind: str, number: float
) -> None:
    async with door(valkey) as (path, stub, _), Caller(kind, valkey.url, fabric_group=path.group) as caller:
        for call in ({"temperature": number}, {"x": {"y": [0, number]}}, {"metadata": {"a": number}}):
            with pytest.raises(InvalidRequest) as refused:
                await caller.complete(**call)
            [name] = call
            assert name in (refused.value.param or "")
        with pytest.raises(InvalidRequest):
            await caller.complete(timeout=number)
        assert path.submitted() == 0
        assert stub.requests == []


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
async def test_a_body_with_a_number_that_is_not_finite_is_a_bad_request(valkey: ValkeyProcess, word: str) -> None:
    async with door(valkey) as (path, stub, http):
        body = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"temperature":{word}}}'
        answer = await http.post(
            "/v1/chat/completions", content=body.encode(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert path.submitted() == 0
        assert stub.requests == []
        assert records(valkey.url, path.group) == []

"""Streamed calls against the simulated engine, and what the openai package makes of the payloads."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatch.backend import Endpoint, EndpointClient, Payload
from dispatch.backend.execution import ErrorType
from dispatch.backend.simulated import SimulatorOptions, Spread, running_simulator
from dispatch.contract import Call, Operation
from tests.support.streams import DONE, HEAD, Streamed, call_of, data, read_bytes, run
from tests.support.stub import Fin, Script, StubBackend, Write

pytestmark = pytest.mark.anyio

FAST = SimulatorOptions.fast(output_tokens=40)
ENDLESS = SimulatorOptions(slots=500, ttft_ms=Spread(0), token_ms=Spread(20), output_tokens=Spread(5_000), slowdown=0)
STREAMED = (Operation.CHAT_COMPLETIONS, Operation.COMPLETIONS, Operation.RESPONSES)
CHAT = Operation.CHAT_COMPLETIONS


@pytest.fixture
async def client() -> AsyncIterator[EndpointClient]:
    async with EndpointClient() as opened:
        yield opened


@asynccontextmanager
async def engine(options: SimulatorOptions = FAST) -> AsyncIterator[tuple[Endpoint, httpx.AsyncClient]]:
    async with (
        running_simulator(options) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=10) as http,
    ):
        yield Endpoint(endpoint_id="engine", url=url), http


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    page = await http.get("/metrics")
    families = text_string_to_metric_families(page.text)
    return {sample.name.removeprefix("vllm:"): sample.value for family in families for sample in family.samples}


async def until_running(http: httpx.AsyncClient, count: int) -> dict[str, float]:
    with anyio.fail_after(5):
        while True:
            found = await metrics(http)
            if found["num_requests_running"] == count:
                return found
            await anyio.sleep(0.005)


def text_of(payloads: list[Payload]) -> str:
    """Put together what a stream of any operation says."""
    said = ""
    for payload in payloads:
        document = json.loads(payload.data)
        if payload.event == "response.output_text.delta":
            said += document["delta"]
        for choice in document.get("choices") or ():
            said += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return said


@pytest.mark.parametrize("operation", STREAMED)
async def test_every_operation_streams(client: EndpointClient, operation: Operation) -> None:
    async with engine() as (endpoint, _):
        streamed = await run(client, endpoint, call_of(operation))
    execution = streamed.execution
    assert (execution.outcome, execution.verdict, execution.head.response_model) == ("succeeded", "good", "m")
    assert len(text_of(streamed.payloads).split()) == 40
    assert execution.chunk_count == len(streamed.payloads) > 40
    assert execution.head.response_id
    names = [payload.event for payload in streamed.payloads]
    if operation is Operation.RESPONSES:
        assert names == [json.loads(payload.data)["type"] for payload in streamed.payloads]
        assert names[-1] == "response.completed"
        assert execution.head.usage is not None
        assert execution.head.usage.output_tokens == 40
    else:
        assert set(names) == {""}
        assert execution.head.finish_reasons == ("stop",)
        assert execution.head.usage is None


@pytest.mark.parametrize("operation", [Operation.CHAT_COMPLETIONS, Operation.COMPLETIONS])
async def test_usage_comes_in_a_chunk_of_its_own_where_it_was_asked_for(
    client: EndpointClient, operation: Operation
) -> None:
    async with engine() as (endpoint, _):
        streamed = await run(client, endpoint, call_of(operation, stream_options={"include_usage": True}, n=2))
    assert json.loads(streamed.data[-1])["choices"] == []
    assert streamed.execution.head.finish_reasons == ("stop", "stop")
    assert streamed.execution.head.usage is not None
    assert streamed.execution.head.usage.output_tokens == 80


@pytest.mark.parametrize("operation", STREAMED)
async def test_chunks_come_at_the_engines_pace(client: EndpointClient, operation: Operation) -> None:
    shape = {"ttft_ms": 200, "token_ms": 20, "output_tokens": 21}
    async with (
        engine(SimulatorOptions(slowdown=0)) as (endpoint, _),
        client.stream(endpoint, call_of(operation, simulate=shape), deadline_s=20) as stream,
    ):
        came = [time.monotonic() async for payload in stream if text_of([payload])]
    assert len(came) == 21
    assert (stream.execution.first_chunk_ms or 0) >= 200
    assert 0.38 <= came[-1] - came[0] < 4
    assert stream.execution.execution_ms >= 580
    gaps = [later - earlier for earlier, later in itertools.pairwise(came)]
    assert sum(gap > 0.005 for gap in gaps) > 10  # one by one, not in a heap


async def test_an_engine_stops_generating_when_its_client_leaves(client: EndpointClient) -> None:
    async with engine(ENDLESS) as (endpoint, http):
        async with client.stream(endpoint, call_of(CHAT), deadline_s=60) as stream:
            for _ in range(5):
                await anext(stream)
            before = await until_running(http, 1)
            assert before["generation_tokens_total"] >= 4
        stopped = await until_running(http, 0)
        await anyio.sleep(0.2)
        after = await metrics(http)
        assert after["generation_tokens_total"] == stopped["generation_tokens_total"]
        assert after["request_success_total"] == 0
        assert (stream.chunk_count, stream.head.response_model) == (5, "m")


async def test_clients_that_leave_at_any_time_leave_nothing_running(client: EndpointClient) -> None:
    chance = random.Random(5)

    async def leave(after_s: float) -> None:
        with anyio.move_on_after(after_s):
            async with client.stream(endpoint, call_of(CHAT), deadline_s=60) as stream:
                async for _ in stream:
                    pass

    async with engine(ENDLESS) as (endpoint, http):
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(leave, chance.uniform(0, 1.0))
        stats = await until_running(http, 0)
        assert stats["num_requests_waiting"] == 0


async def test_many_streams_at_once_keep_their_chunks_in_order(client: EndpointClient) -> None:
    options = SimulatorOptions(slots=200, ttft_ms=Spread(5), token_ms=Spread(1), output_tokens=Spread(50), slowdown=0)
    found: dict[int, Streamed] = {}

    async def one(number: int) -> None:
        found[number] = await run(client, endpoint, call_of(CHAT, messages=[f"{number}"]), deadline_s=60)

    async with engine(options) as (endpoint, _):
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, number)
        again = [await run(client, endpoint, call_of(CHAT, messages=[f"{number}"])) for number in (0, 50, 99)]
    assert all(streamed.execution.outcome == "succeeded" for streamed in found.values())
    assert {streamed.execution.chunk_count for streamed in found.values()} == {52}
    assert len({streamed.execution.head.response_id for streamed in found.values()}) == 100
    for number, streamed in zip((0, 50, 99), again, strict=True):
        assert text_of(found[number].payloads) == text_of(streamed.payloads)


@pytest.mark.parametrize(
    ("simulate", "began", "verdict", "found"),
    [
        ({"status": 503, "retry_after": "7"}, False, "backpressure", (ErrorType.OVERLOADED, True)),
        ({"cut": "start"}, False, "failure", (ErrorType.DISCONNECTED, True)),
        ({"cut": "head"}, False, "failure", (ErrorType.DISCONNECTED, True)),
        ({"cut": "body"}, True, "failure", (ErrorType.DISCONNECTED, False)),
        ({"cut": "body", "reset": True}, True, "failure", (ErrorType.DISCONNECTED, False)),
        ({"hang": "head"}, False, "failure", (ErrorType.TIMEOUT, False)),
        ({"hang": "body"}, True, "failure", (ErrorType.TIMEOUT, False)),
        ({"garbage": "json"}, True, "failure", (ErrorType.UNREADABLE, False)),
        ({"error_in_200": True}, True, "failure", (ErrorType.FAILED, False)),
        ({"content_type": "text/plain"}, True, "good", ("", False)),
    ],
)
@pytest.mark.parametrize("operation", STREAMED)
async def test_faults_of_streams(
    operation: Operation, simulate: dict[str, Any], began: bool, verdict: str, found: tuple[str, bool]
) -> None:
    async with engine() as (served, http), EndpointClient() as client:
        endpoint = Endpoint(endpoint_id="e", url=served.url, first_byte_timeout_ms=1_500, idle_timeout_ms=400)
        streamed = await run(client, endpoint, call_of(operation, simulate=simulate))
        await until_running(http, 0)
    assert streamed.execution.verdict == verdict
    assert streamed.execution.outcome == ("succeeded" if verdict == "good" else "failed")
    assert (streamed.error[0], streamed.execution.retryable) == found
    assert bool(streamed.payloads) is began


@asynccontextmanager
async def sdk_reading(streamed: Streamed, *, done: bytes = DONE) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield an openai client whose backend sends these payloads, framed as a front door frames them."""
    frames = b"".join(data(payload.data, event=payload.event) for payload in streamed.payloads)
    async with (
        StubBackend(Script((Write(HEAD + frames + done), Fin()))) as stub,
        openai.AsyncOpenAI(base_url=f"{stub.url}/v1", api_key="sk", max_retries=0) as sdk,
    ):
        yield sdk


async def test_the_openai_package_reads_the_payloads(client: EndpointClient) -> None:
    async with engine() as (endpoint, _):
        chat, typed = [await run(client, endpoint, call_of(each)) for each in (CHAT, Operation.RESPONSES)]
    async with sdk_reading(chat) as sdk:
        stream = await sdk.chat.completions.create(model="m", messages=[], stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert said == text_of(chat.payloads)
    async with sdk_reading(typed, done=b"") as sdk, sdk.responses.stream(model="m", input="x") as events:
        response = await events.get_final_response()
    assert response.output_text == text_of(typed.payloads)


@pytest.mark.parametrize("operation", STREAMED)
async def test_the_openai_package_reads_a_whole_answer_that_was_turned_into_a_stream(
    client: EndpointClient, operation: Operation
) -> None:
    async with engine() as (endpoint, _):
        body = json.dumps({"model": "m", operation.main_member: "x"}).encode()
        execution = await client.execute(endpoint, Call(operation=operation, body=body, model="m"), deadline_s=20)
        # This engine does as it is told; a body without `stream` gets the answer of one that does not listen.
        streamed = await run(client, endpoint, Call(operation=operation, body=body, model="m", stream=True))
    assert streamed.execution.outcome == "succeeded"
    assert streamed.execution.head.usage == execution.head.usage
    assert streamed.data == (await read_bytes(execution.body, call_of(operation))).data
    async with sdk_reading(streamed, done=b"" if operation is Operation.RESPONSES else DONE) as sdk:
        if operation is Operation.RESPONSES:
            async with sdk.responses.stream(model="m", input="x") as events:
                said = (await events.get_final_response()).output_text
        elif operation is CHAT:
            async with sdk.chat.completions.stream(model="m", messages=[]) as chunks:
                said = (await chunks.get_final_completion()).choices[0].message.content or ""
        else:
            stream = await sdk.completions.create(model="m", prompt="x", stream=True)
            said = "".join([chunk.choices[0].text async for chunk in stream])
    assert len(said.split()) == 40
    assert said in json.dumps(json.loads(execution.body), ensure_ascii=False)

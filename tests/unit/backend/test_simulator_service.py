"""The simulated backend as an OpenAI-compatible service, and as an engine with slots, a queue and times."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatch.backend import Endpoint, EndpointClient
from dispatch.backend.simulated import SimulatorOptions, Spread, running_simulator
from dispatch.contract import Call, Operation
from dispatch.errors import ConfigurationError
from tests.support.calls import chat_call

pytestmark = pytest.mark.anyio

FAST = SimulatorOptions.fast()
ONE_SLOT = SimulatorOptions(slots=1, ttft_ms=Spread(60_000), token_ms=Spread(0), queue_limit=3)
QUESTION = [{"role": "user", "content": "What is a lease?"}]


@asynccontextmanager
async def sdk(options: SimulatorOptions) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        running_simulator(options) as url,
        openai.AsyncOpenAI(base_url=url, api_key="sk-test", max_retries=0) as client,
    ):
        yield client


@asynccontextmanager
async def control(options: SimulatorOptions) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    async with (
        running_simulator(options) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=5) as client,
    ):
        yield url, client


async def stats_until(client: httpx.AsyncClient, **wanted: int) -> dict[str, Any]:
    with anyio.fail_after(5):
        while True:
            stats = (await client.get("/control/stats")).json()
            if all(stats[name] == value for name, value in wanted.items()):
                return stats
            await anyio.sleep(0.005)


async def test_chat_completions() -> None:
    async with sdk(FAST) as client:
        reply = await client.chat.completions.create(model="any", messages=QUESTION, n=2)
        short = await client.chat.completions.create(model="any", messages=QUESTION, max_completion_tokens=3)
    assert reply.model == "any"
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert (reply.usage.completion_tokens, reply.usage.total_tokens) == (16, reply.usage.prompt_tokens + 16)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3


async def test_streamed_chat_says_the_same_as_the_plain_one() -> None:
    async with sdk(FAST) as client:
        stream = await client.chat.completions.create(
            model="m", messages=QUESTION, stream=True, stream_options={"include_usage": True}, n=2
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 8
    assert reasons == ["stop", "stop"]


async def test_completions_plain_and_streamed() -> None:
    async with sdk(FAST) as client:
        reply = await client.completions.create(model="m", prompt="def f(")
        stream = await client.completions.create(model="m", prompt="def f(", stream=True)
        chunks = [chunk async for chunk in stream]
    assert len(reply.choices[0].text.split()) == 8
    assert len("".join(chunk.choices[0].text for chunk in chunks).split()) == 8
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_embeddings_in_both_encodings() -> None:
    async with sdk(FAST) as client:
        packed = await client.embeddings.create(model="m", input=["a", "b"], dimensions=4)
        floats = await client.embeddings.create(model="m", input="a", encoding_format="float")
    assert [row.index for row in packed.data] == [0, 1]
    assert [len(row.embedding) for row in packed.data] == [4, 4]
    assert packed.data[0].embedding != packed.data[1].embedding
    assert len(floats.data[0].embedding) == 16
    assert floats.usage.total_tokens == floats.usage.prompt_tokens


async def test_responses_plain_and_streamed_as_typed_events() -> None:
    async with sdk(FAST) as client:
        reply = await client.responses.create(model="m", input="What is a lease?")
        assert reply.status == "completed"
        assert len(reply.output_text.split()) == 8
        assert reply.usage is not None
        assert reply.usage.output_tokens == 8
        stream = await client.responses.create(model="m", input="What is a lease?", stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == said
    assert len(said.split()) == 8


async def test_responses_streams_are_framed_by_type_and_have_no_done() -> None:
    async with running_simulator(FAST) as url, httpx.AsyncClient(trust_env=False) as client:
        body = {"model": "m", "input": "x", "max_output_tokens": 2, "stream": True}
        answer = await client.post(f"{url}/responses", json=body)
    assert answer.headers["content-type"] == "text/event-stream"
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    for frame in frames:
        event, data = frame.split("\n")
        assert event.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert frames[-1].startswith("event: response.incomplete\n")
    assert "[DONE]" not in answer.text


async def test_models_and_health() -> None:
    options = SimulatorOptions(models=("a", "org/b"), strict_models=True, api_key="sk-test")
    async with sdk(options) as client:
        assert [model.id async for model in client.models.list()] == ["a", "org/b"]
        assert (await client.models.retrieve("org/b")).id == "org/b"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("c")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="c", messages=QUESTION)
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").models.list()
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").chat.completions.create(model="a", messages=QUESTION)
    async with control(options) as (_, http):
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"[]", "object"),
        (b'{"messages":[]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[],"n":0}', "'n'"),
        (b'{"model":"m","messages":[],"max_tokens":0}', "at least 1"),
        (b'{"model":"m","messages":[],"simulate":{"oops":1}}', "oops"),
        (b'{"model":"m","messages":[],"simulate":{"cut":"middle"}}', "cut"),
        (b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    ],
)
async def test_wrong_calls_get_an_openai_error(client: EndpointClient, body: bytes, says: str) -> None:
    async with running_simulator(FAST) as url:
        execution = await client.execute(Endpoint(endpoint_id="s", url=url), chat_call(body), deadline_s=5)
    assert execution.head.status == 400
    error = json.loads(execution.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert says in error["message"]


async def test_odd_bodies_that_engines_take(client: EndpointClient) -> None:
    async with running_simulator(FAST) as url:
        endpoint = Endpoint(endpoint_id="s", url=url)
        for body in (
            b'{"model":"m","messages":[{"content":"half \\ud83d pair"}],"seed":123456789012345678901234567890}',
            b'{"model":"m","messages":[],"stream":null,"n":null,"max_tokens":null,"x":1e400}',
            b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * 5_000_000 + b'"}]}',
        ):
            execution = await client.execute(endpoint, chat_call(body), deadline_s=5)
            assert execution.outcome == "succeeded"


async def test_equal_requests_get_equal_text_and_times() -> None:
    options = SimulatorOptions(ttft_ms=Spread(5, 0.5), token_ms=Spread(0.1, 0.5), output_tokens=Spread(20, 0.8), seed=3)
    texts = []
    for _ in range(2):
        async with sdk(options) as client:
            replies = [await client.chat.completions.create(model=f"m{n}", messages=QUESTION) for n in range(5)]
        texts.append([reply.choices[0].message.content for reply in replies])
    assert texts[0] == texts[1]
    assert len({len(text or "") for text in texts[0]}) > 1


async def test_the_body_can_be_proved_by_its_hash(client: EndpointClient) -> None:
    async with running_simulator(FAST) as url:
        call = chat_call(simulate={"echo": "sha256"}, extra="é" * 1_000)
        execution = await client.execute(Endpoint(endpoint_id="s", url=url), call, deadline_s=5)
    said = json.loads(execution.body)["choices"][0]["message"]["content"]
    assert said == hashlib.sha256(call.body).hexdigest()


async def test_slots_queue_and_metrics_and_a_full_queue(client: EndpointClient) -> None:
    async with control(ONE_SLOT) as (url, http), anyio.create_task_group() as tasks:
        endpoint = Endpoint(endpoint_id="s", url=url)
        for _ in range(4):
            tasks.start_soon(lambda: client.execute(endpoint, chat_call(), deadline_s=60))
        await stats_until(http, running=1, waiting=3, calls=4)
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert (execution.head.status, execution.verdict, execution.hold_ms) == (503, "backpressure", 1_000)
        page = await http.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }
        assert values["vllm:num_requests_running"] == 1
        assert values["vllm:num_requests_waiting"] == 3
        assert 0 < values["vllm:kv_cache_usage_perc"] < 1
        assert values["vllm:request_success_total"] == 0
        tasks.cancel_scope.cancel()


async def test_a_client_that_leaves_frees_its_slot_at_once(client: EndpointClient) -> None:
    async with control(ONE_SLOT) as (url, http):
        endpoint = Endpoint(endpoint_id="s", url=url)
        gone = await client.execute(endpoint, chat_call(), deadline_s=0.2)
        assert gone.outcome == "expired"
        await stats_until(http, running=0, waiting=0, disconnects=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.execute(endpoint, chat_call(), deadline_s=60))
            await stats_until(http, running=1)
            waiting = await client.execute(endpoint, chat_call(), deadline_s=0.2)
            assert waiting.outcome == "expired"
            await stats_until(http, running=1, waiting=0, disconnects=2)
            tasks.cancel_scope.cancel()
        await stats_until(http, running=0, disconnects=3)


async def test_a_client_that_leaves_a_stream_ends_it() -> None:
    options = SimulatorOptions(ttft_ms=Spread(0), token_ms=Spread(20), output_tokens=Spread(100_000))
    async with control(options) as (_, http):
        body = {"model": "m", "messages": QUESTION, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
            await stats_until(http, running=1)
        stats = await stats_until(http, running=0, disconnects=1)
        assert stats["finished"] == 0


async def test_an_answer_does_not_wait_for_an_acknowledgement(client: EndpointClient) -> None:
    async with running_simulator(FAST) as url:
        endpoint = Endpoint(endpoint_id="s", url=url)
        took = [(await client.execute(endpoint, chat_call(), deadline_s=5)).execution_ms for _ in range(20)]
    assert min(took) < 30


async def test_times_are_what_was_asked_for(client: EndpointClient) -> None:
    options = SimulatorOptions(slots=2, ttft_ms=Spread(100), token_ms=Spread(10), output_tokens=Spread(11), slowdown=0)
    async with running_simulator(options) as url:
        endpoint = Endpoint(endpoint_id="s", url=url)
        started = time.monotonic()
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert 0.2 <= time.monotonic() - started < 1.5
        shaped = chat_call(simulate={"ttft_ms": 0, "token_ms": 0, "output_tokens": 2})
        started = time.monotonic()
        quick = await client.execute(endpoint, shaped, deadline_s=5)
        assert time.monotonic() - started < 0.15
    assert execution.head.usage is not None
    assert execution.head.usage.output_tokens == 11
    assert quick.head.usage is not None
    assert quick.head.usage.output_tokens == 2


@pytest.mark.parametrize("operation", list(Operation))
async def test_every_operation_runs_through_the_adapter(client: EndpointClient, operation: Operation) -> None:
    async with running_simulator(FAST) as url:
        body = json.dumps({"model": "m", operation.main_member: "x"}).encode()
        call = Call(operation=operation, body=body, model="m")
        execution = await client.execute(Endpoint(endpoint_id="s", url=url), call, deadline_s=5)
        models = await client.models(Endpoint(endpoint_id="s", url=url), deadline_s=5)
    assert execution.outcome == "succeeded"
    assert execution.head.usage is not None
    assert execution.head.usage.input_tokens is not None
    assert json.loads(models.body)["data"][0]["id"] == "simulated"


@pytest.mark.parametrize(
    "fields",
    [
        {"models": ()},
        {"slots": 0},
        {"queue_limit": -1},
        {"slowdown": -1},
        {"ttft_ms": Spread(-1)},
        {"output_tokens": Spread(1, -1)},
    ],
)
def test_wrong_options_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        SimulatorOptions(**fields)


def test_the_key_is_in_no_repr() -> None:
    assert "s3cret" not in repr(SimulatorOptions(api_key="s3cret"))

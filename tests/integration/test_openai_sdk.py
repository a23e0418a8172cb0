"""The stock OpenAI client, sync and async, against the front door: only its base URL is changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import openai
import pytest

from tests.support.calls import COMPLETION
from tests.support.producing import until
from tests.support.stack import Stack, stack
from tests.support.stub import Fin, Pause, Script, SeenRequest, StubBackend, Write, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

MESSAGES: Any = [{"role": "user", "content": "é漢🙂 \u2028"}]
ANSWERS = {
    "/v1/chat/completions": COMPLETION,
    "/v1/completions": json.dumps(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "text": "return x", "finish_reason": "stop", "logprobs": None}],
        }
    ).encode(),
    "/v1/embeddings": json.dumps(
        {
            "object": "list",
            "model": "m",
            "data": [{"object": "embedding", "index": 0, "embedding": "AACAPwAAAEA="}],
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }
    ).encode(),
    "/v1/responses": json.dumps(
        {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": "m",
            "status": "completed",
            "output": [
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "hello", "annotations": []}],
                }
            ],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
    ).encode(),
    "/v1/models": b'{"object":"list","data":[{"id":"m1","object":"model","created":1,"owned_by":"x"}]}',
}


def answer(request: SeenRequest) -> Script:
    return json_answer(ANSWERS[request.target])


@pytest.fixture
async def stub() -> AsyncIterator[StubBackend]:
    async with StubBackend(answer) as opened:
        yield opened


@pytest.fixture
async def path(valkey: ValkeyProcess, stub: StubBackend) -> AsyncIterator[Stack]:
    pools = [{"pool_id": "interactive", "quantum": 4}, {"pool_id": "tiny", "quantum": 1, "max_queue_depth": 1}]
    async with stack(valkey.url, f"{stub.url}/v1", pools=pools, max_payload_bytes=1_000_000) as opened:
        yield opened


Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, path: Stack) -> Call:
    """Run a function of an OpenAI client, whichever kind it is."""

    async def run(use: Callable[[Any], Any], **options: Any) -> Any:
        given = {"api_key": "theirs", "base_url": f"{path.url}/v1", "max_retries": 0} | options
        if request.param == "sync":

            def blocking() -> Any:
                with openai.OpenAI(**given) as client:
                    return use(client)

            return await anyio.to_thread.run_sync(blocking)
        async with openai.AsyncOpenAI(**given) as client:
            return await use(client)

    return run


def chat(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES, **more)


async def test_a_chat_completion(ask: Call, stub: StubBackend) -> None:
    completion = await ask(partial(chat, seed=2**70, extra_body={"top_k": 5, "guided": {"x": [None, 1.0]}}))
    assert completion.choices[0].message.content == "hi"
    assert completion.usage.total_tokens == 5
    assert len(completion._request_id) == 32
    [seen] = stub.requests
    body = json.loads(seen.body)
    assert (body["messages"], body["seed"], body["guided"]) == (MESSAGES, 2**70, {"x": [None, 1.0]})
    assert seen.header("authorization") is None
    assert not any(name.startswith("x-stainless") for name, _ in seen.headers)


async def test_the_other_operations(ask: Call) -> None:
    text = await ask(lambda client: client.completions.create(model="m", prompt="def f("))
    assert text.choices[0].text == "return x"
    vectors = await ask(lambda client: client.embeddings.create(model="m", input=["a"]))
    assert vectors.data[0].embedding == [1.0, 2.0]
    response = await ask(lambda client: client.responses.create(model="m", input="hi"))
    assert response.output_text == "hello"
    models = await ask(lambda client: client.models.list())
    assert [model.id for model in models.data] == ["m1"]


async def test_a_pool_by_base_url_and_by_header(ask: Call, path: Stack) -> None:
    use = lambda client: client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)  # noqa: E731 - short
    for options in (
        {"base_url": f"{path.url}/pools/interactive/v1"},
        {"default_headers": {"X-Dispatch-Pool": "interactive", "X-Request-Id": "mine"}},
    ):
        raw = await ask(use, **options)
        assert raw.headers["x-dispatch-pool"] == "interactive"
        assert raw.headers["x-dispatch-gateway"] == path.gateway.settings.gateway_id
        assert int(raw.headers["x-dispatch-queue-ms"]) >= 0
        assert int(raw.headers["x-dispatch-execution-ms"]) >= 0
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-dispatch-request-id"] != "mine"


async def test_an_unknown_pool_is_not_found(ask: Call, path: Stack, stub: StubBackend) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(chat, base_url=f"{path.url}/pools/nowhere/v1")
    assert all(known in str(caught.value) for known in ("default", "interactive", "tiny"))
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        "pool_unknown",
        "pool",
        "invalid_request_error",
    )
    assert stub.requests == []


async def test_a_large_body_is_told_so(ask: Call, path: Stack, stub: StubBackend) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(lambda client: client.completions.create(model="m", prompt="x" * 30_000_000))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    assert stub.requests == []
    assert path.submitted() == 0


@pytest.mark.parametrize(
    ("status", "kind"),
    [("400 Bad", openai.BadRequestError), ("404 No", openai.NotFoundError), ("500 Oops", openai.InternalServerError)],
)
async def test_an_error_of_the_backend_is_the_callers_to_read(
    valkey: ValkeyProcess, status: str, kind: type[openai.APIStatusError]
) -> None:
    body = b'{"error":{"message":"the backend says no","type":"t","param":"p","code":"c"}}'
    async with StubBackend(json_answer(body, status=status)) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1") as client:
            with pytest.raises(kind) as caught:
                await chat(client)
        assert "the backend says no" in str(caught.value)
        assert (caught.value.code, caught.value.param) == ("c", "p")
        # Work may have been done: the client was told not to try again, whatever the status.
        assert len(stub.requests) == 1


async def test_work_that_may_have_been_done_is_not_repeated_by_the_client(valkey: ValkeyProcess) -> None:
    cut = Script((Write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"), Fin()))
    async with StubBackend(cut) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(client)
        assert caught.value.status_code == 502
        assert len(stub.requests) == 1


async def test_a_backend_without_capacity_is_asked_again_by_the_client(valkey: ValkeyProcess) -> None:
    busy = json_answer(b'{"error":{"message":"full"}}', status="429 Busy", headers=[("retry-after-ms", "50")])
    async with StubBackend([busy, json_answer(COMPLETION)]) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1", max_retries=1) as client:
            assert (await chat(client)).choices[0].message.content == "hi"
        assert len(stub.requests) == 2


async def test_a_full_pool_is_a_rate_limit_and_a_deadline_in_the_queue_too(valkey: ValkeyProcess) -> None:
    slow = Script((Pause(1.0), *json_answer(COMPLETION).steps))
    pools = [{"pool_id": "tiny", "quantum": 1, "max_queue_depth": 1, "max_concurrent": 1}]
    async with StubBackend(slow) as stub, stack(valkey.url, f"{stub.url}/v1", pools=pools) as path:
        options = {"api_key": "x", "base_url": f"{path.url}/pools/tiny/v1", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(chat, client)
            await stub.until(lambda stub: len(stub.requests) == 1)
            waiting = partial(chat, extra_headers={"X-Dispatch-Timeout-Ms": "300"})
            late: list[openai.RateLimitError] = []

            async def wait() -> None:
                with pytest.raises(openai.RateLimitError) as caught:
                    await waiting(client)
                late.append(caught.value)

            tasks.start_soon(wait)
            await until(lambda: path.section("group")["pending"] == 1)
            with pytest.raises(openai.RateLimitError) as full:
                await chat(client)
            assert full.value.code == "pool_full"
            assert full.value.response.headers["retry-after"] == "1"
        assert late[0].response.headers["x-dispatch-reason"] == "rejected-deadline"
        assert len(stub.requests) == 1


async def test_a_deadline_while_executing_is_a_gateway_timeout(valkey: ValkeyProcess) -> None:
    slow = Script((Pause(5.0), *json_answer(COMPLETION).steps))
    async with StubBackend(slow) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1") as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await chat(client, extra_headers={"X-Dispatch-Timeout-Ms": "300"})
        assert caught.value.status_code == 504
        assert len(stub.requests) == 1
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()


async def test_many_calls_of_one_client(path: Stack, stub: StubBackend) -> None:
    async with openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1", max_retries=0) as client:
        texts: dict[int, str] = {}

        async def one(number: int) -> None:
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=[{"role": "user", "content": str(number)}]
            )
            texts[number] = raw.headers["x-dispatch-request-id"]

        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, number)
    assert len(set(texts.values())) == 100
    sent = sorted(int(json.loads(seen.body)["messages"][0]["content"]) for seen in stub.requests)
    assert sent == list(range(100))
    assert {row["ending"] for row in path.endings()} == {"succeeded"}


async def test_a_client_that_gives_up_ends_its_request(valkey: ValkeyProcess) -> None:
    slow = Script((Pause(30.0), *json_answer(COMPLETION).steps))
    async with StubBackend(slow) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        timeout = httpx2.Timeout(0.3)
        async with openai.AsyncOpenAI(api_key="x", base_url=f"{path.url}/v1", max_retries=0, timeout=timeout) as client:
            with pytest.raises(openai.APITimeoutError):
                await chat(client)
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()
        assert stub.connections[0].closed_by == "client"
        await until(lambda: path.endings() != [], within_s=2)
        assert path.endings()[0]["ending"] == "cancelled"
        assert path.leases() == 0

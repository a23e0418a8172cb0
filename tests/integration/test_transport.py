"""`DispatchTransport`: the openai package over the queue, beside the same package over HTTP. Both tell the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio
import anyio.to_thread
import httpx
import httpx2
import openai
import pytest

from dispatch import DispatchTransport, sync
from dispatch.errors import ConfigurationError
from dispatch.producer.client import DispatchClient
from tests.support.calls import COMPLETION
from tests.support.producing import until
from tests.support.stack import Stack, stack
from tests.support.streams import DONE, HEAD, chunk, data
from tests.support.stub import Fin, Hold, Pause, Script, SeenRequest, StubBackend, Write, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

MESSAGES: Any = [{"role": "user", "content": "é漢🙂 \u2028"}]
WAYS = ["http", "httpx", "httpx2"]
KINDS = ["sync", "async"]
Use = Callable[[Any], Any]

STREAM = Script((
    Write(HEAD), Write(data(chunk("a"))), Pause(0.05), Write(data(chunk("b\u2028")) + data(chunk(None, "stop"))),
    Write(data(chunk(None, usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, choices=[]))),
    Write(DONE), Fin(),
))  # fmt: skip


class Ways:
    """The openai package, sync and async, through HTTP and through the transport of either library."""

    def __init__(self, path: Stack, exits: AsyncExitStack) -> None:
        self.path = path
        self._exits = exits

    async def run(self, way: str, kind: str, use: Use, **options: Any) -> Any:
        given = {"api_key": "theirs", "base_url": f"{self.path.url}/v1", "max_retries": 0} | options
        if kind == "sync":
            return await anyio.to_thread.run_sync(self._blocking, way, use, given)
        async with AsyncExitStack() as exits:
            if way != "http":
                library: Any = httpx if way == "httpx" else httpx2
                given["http_client"] = library.AsyncClient(transport=DispatchTransport(self.path.client))
            client = await exits.enter_async_context(openai.AsyncOpenAI(**given))
            return await use(client)

    def _blocking(self, way: str, use: Use, given: dict[str, Any]) -> Any:
        with sync.DispatchClient(self.path.valkey_url, fabric_group=self.path.group, close_ms=200) as client:
            if way != "http":
                library: Any = httpx if way == "httpx" else httpx2
                given["http_client"] = library.Client(transport=DispatchTransport(client))
            with openai.OpenAI(**given) as opened:
                return use(opened)


@asynccontextmanager
async def ways(valkey: ValkeyProcess, stub: StubBackend, **document: Any) -> AsyncIterator[Ways]:
    async with AsyncExitStack() as exits:
        yield Ways(await exits.enter_async_context(stack(valkey.url, f"{stub.url}/v1", **document)), exits)


def chat(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES, **more)


async def streamed(client: Any, **more: Any) -> list[Any]:
    """Read a stream with either kind of client; a blocking one is not awaited."""
    stream = await chat(client, stream=True, **more)
    return [each async for each in stream]


def streamed_blocking(client: Any, **more: Any) -> list[Any]:
    return list(chat(client, stream=True, **more))


def stream_of(kind: str) -> Callable[..., Any]:
    return streamed if kind == "async" else streamed_blocking


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_chat_completion_and_a_stream(valkey: ValkeyProcess, way: str, kind: str) -> None:
    def answer(request: SeenRequest) -> Script:
        return STREAM if b'"stream":true' in request.body.replace(b" ", b"") else json_answer(COMPLETION)

    async with StubBackend(answer) as stub, ways(valkey, stub) as on:
        use = partial(chat, seed=2**70, extra_headers={"X-Dispatch-Pool": "interactive"})
        completion = await on.run(way, kind, use)
        assert completion.choices[0].message.content == "hi"
        assert len(completion._request_id) == 32
        chunks = await on.run(way, kind, stream_of(kind))
        assert [each.choices[0].delta.content for each in chunks if each.choices] == ["a", "b\u2028", None]
        assert chunks[-1].usage.total_tokens == 5
        first, second = stub.requests
        assert json.loads(first.body)["seed"] == 2**70
        assert first.header("authorization") is None
        assert json.loads(second.body)["stream"] is True
        assert [row["pool"] for row in on.path.endings()] == ["default", "interactive"]
        assert {row["ending"] for row in on.path.endings()} == {"succeeded"}


REFUSED: list[tuple[str, dict[str, Any], type[openai.APIStatusError], str]] = [
    ("pool", {"extra_headers": {"X-Dispatch-Pool": "nowhere"}}, openai.NotFoundError, "pool_unknown"),
    ("header", {"extra_headers": {"X-Dispatch-Priority": "9"}}, openai.BadRequestError, "invalid_header"),
    ("body", {"extra_body": {"stream": 1}}, openai.BadRequestError, "invalid_type"),
    (
        "key",
        {"stream": True, "extra_headers": {"Idempotency-Key": "k"}},
        openai.BadRequestError,
        "stream_not_repeatable",
    ),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "more", "error", "code"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_refusals_are_the_same_on_every_way(  # noqa: PLR0917 - fixtures are parameters
    valkey: ValkeyProcess, kind: str, what: str, more: dict[str, Any], error: type[openai.APIStatusError], code: str
) -> None:
    async with StubBackend(json_answer(COMPLETION)) as stub, ways(valkey, stub) as on:
        told = []
        for way in WAYS:
            with pytest.raises(error) as caught:
                await on.run(way, kind, partial(chat, **more))
            answer = caught.value.response
            assert caught.value.code == code
            told.append((answer.status_code, answer.json(), answer.headers["x-dispatch-reason"]))
        assert told[0] == told[1] == told[2]
        assert stub.requests == [], what


FAILING: list[tuple[str, Script, int, int]] = [
    ("400", json_answer(b'{"error":{"message":"no","type":"t","param":"p","code":"c"}}', status="400 Bad"), 400, 1),
    ("429", json_answer(b'{"error":{"message":"full"}}', status="429 Busy"), 429, 3),
    ("cut", Script((Write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"), Fin())), 502, 1),
    ("empty", Script((Write(HEAD), Fin())), 502, 1),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("what", "script", "status", "calls"), FAILING, ids=[row[0] for row in FAILING])
async def test_errors_before_a_chunk_have_their_status_and_are_retried_as_by_a_server(  # noqa: PLR0917 - as above
    valkey: ValkeyProcess, way: str, stream: bool, what: str, script: Script, status: int, calls: int
) -> None:
    held = {"hold_max_ms": 100}
    async with StubBackend(script) as stub, ways(valkey, stub, **held) as on:
        with pytest.raises(openai.APIStatusError) as caught:
            await on.run(way, "async", partial(chat, stream=stream), max_retries=2)
        assert caught.value.status_code == status
        assert len(stub.requests) == calls, what
        assert caught.value.response.headers["x-dispatch-reason"] == "ended-failed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_after_a_chunk_is_raised_in_the_stream(valkey: ValkeyProcess, way: str, kind: str) -> None:
    cut = Script((Write(HEAD), Write(data(chunk("a"))), Fin()))
    seen: list[Any] = []

    async def read(client: Any) -> None:
        stream = await chat(client, stream=True)
        while True:
            seen.append((await anext(stream)).choices[0].delta.content)

    def read_blocking(client: Any) -> None:
        stream = chat(client, stream=True)
        while True:
            seen.append(next(stream).choices[0].delta.content)

    async with StubBackend(cut) as stub, ways(valkey, stub) as on:
        with pytest.raises(openai.APIError, match="ended its stream") as caught:
            await on.run(way, kind, read if kind == "async" else read_blocking, max_retries=2)
        assert caught.value.code == "endpoint_disconnected"
        assert len(stub.requests) == 1
    assert seen == ["a"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_read_timeout_is_one_and_stops_the_backend(
    valkey: ValkeyProcess, way: str, kind: str, stream: bool
) -> None:
    async with StubBackend(Script((Hold(),))) as stub, ways(valkey, stub) as on:
        with pytest.raises(openai.APITimeoutError):
            await on.run(way, kind, partial(chat, stream=stream), timeout=0.5)
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()
        await until(lambda: on.path.endings() != [])
        assert on.path.endings()[0]["ending"] == "cancelled"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_closing_a_stream_stops_the_backend(valkey: ValkeyProcess, way: str, kind: str) -> None:
    endless = Script((Write(HEAD), Write(data(chunk("a"))), Hold()))

    async def leave(client: Any) -> None:
        async with await chat(client, stream=True) as stream:
            async for _ in stream:
                break

    def leave_blocking(client: Any) -> None:
        with chat(client, stream=True) as stream:
            next(iter(stream))

    async with StubBackend(endless) as stub, ways(valkey, stub) as on:
        await on.run(way, kind, leave if kind == "async" else leave_blocking)
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()
        await until(lambda: on.path.endings() != [])
        assert on.path.endings()[0]["ending"] == "cancelled"
        assert on.path.leases() == 0


async def test_the_head_and_the_bytes_of_a_stream_are_those_of_the_front(valkey: ValkeyProcess) -> None:
    body = {"model": "m", "messages": [], "stream": True}
    async with StubBackend(STREAM) as stub, ways(valkey, stub) as on:
        answers = []
        transport = DispatchTransport(on.path.client)
        for http in (httpx.AsyncClient(trust_env=False), httpx.AsyncClient(transport=transport)):
            async with http:
                answer = await http.post(
                    f"{on.path.url}/pools/interactive/v1/chat/completions", json=body, headers={"x-request-id": "mine"}
                )
            headers = dict(answer.headers)
            assert len(headers.pop("x-dispatch-request-id")) == 32
            for name in ("transfer-encoding", "date"):
                headers.pop(name, None)
            answers.append((answer.status_code, headers, answer.content))
        assert answers[0] == answers[1]
        assert answers[0][1]["x-request-id"] == "mine"
        assert answers[0][1]["x-dispatch-pool"] == "interactive"


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_other_paths_and_the_list_of_models(valkey: ValkeyProcess, library: Any) -> None:
    async with StubBackend(STREAM) as stub, ways(valkey, stub) as on:
        transport = DispatchTransport(on.path.client, models=["m1", "m2"])
        async with (
            httpx.AsyncClient(trust_env=False) as front,
            library.AsyncClient(transport=transport, base_url="http://dispatch") as http,
        ):
            listed = await http.get("/v1/models")
            assert [row["id"] for row in listed.json()["data"]] == ["m1", "m2"]
            for method, path, status in (
                ("GET", "/v1/chat/completions", 405),
                ("POST", "/v1/models", 405),
                ("POST", "/v1/audio", 404),
                ("POST", "/", 404),
                ("POST", "/pools/a/b/v1/completions", 404),
            ):
                answer = await http.request(method, path)
                same = await front.request(method, on.path.url + path)
                assert (answer.status_code, answer.json()) == (status, same.json())
            answer = await http.post("/v1/completions", content=b"a=b", headers={"content-type": "text/plain"})
            assert answer.status_code == 415
        async with library.AsyncClient(transport=DispatchTransport(on.path.client), base_url="http://d") as http:
            answer = await http.get("/pools/x/v1/models")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "models_unknown")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_of_the_other_kind_is_told_at_once(kind: Literal["sync", "async"]) -> None:
    if kind == "async":
        transport = DispatchTransport(sync.DispatchClient("valkey://127.0.0.1:9"))
        async with httpx.AsyncClient(transport=transport) as http:
            with pytest.raises(ConfigurationError, match=r"dispatch\.DispatchClient"):
                await http.post("http://x/v1/completions")
    else:
        transport = DispatchTransport(DispatchClient("valkey://127.0.0.1:9"))
        request = httpx.Request("POST", "http://x/v1/completions")
        with pytest.raises(ConfigurationError, match=r"sync\."):
            transport.handle_request(request)


@pytest.mark.parametrize("way", ["http", "httpx"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_waited_in_vain_is_told_alike(valkey: ValkeyProcess, way: str, kind: str) -> None:
    one = {"pools": [{"pool_id": "default", "quantum": 1, "max_concurrent": 1}]}
    async with StubBackend(Script((Hold(),))) as stub, ways(valkey, stub, **one) as on:
        async with on.path.client.stream(model="m", messages=MESSAGES) as running:
            await running.read(within_s=0)
            await stub.until(lambda stub: len(stub.requests) == 1)
            for stream in (False, True):
                use = partial(chat, stream=stream, extra_headers={"X-Dispatch-Max-Wait-Ms": "200"})
                with pytest.raises(openai.RateLimitError) as caught:
                    await on.run(way, kind, use)
                assert caught.value.code == "max_wait_exceeded"
                assert caught.value.response.headers["x-dispatch-reason"] == "rejected-max_wait"
        assert len(stub.requests) == 1

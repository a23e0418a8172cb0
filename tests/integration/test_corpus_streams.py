"""Every stream of the corpus through the whole path: as bytes over HTTP, in the SDK, and in the openai package."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest

from dispatch import DispatchTransport, sync
from dispatch.contract import Reply
from tests.support.corpus import Case, callers, cases, tool
from tests.support.producing import until
from tests.support.replay import corpus_script
from tests.support.stack import Stack, stack
from tests.support.streams import caller_of
from tests.support.stub import StubBackend
from tests.support.valkey import ValkeyProcess
from tests.support.wire import Wire

pytestmark = [pytest.mark.anyio, pytest.mark.container]

ROWS = cases("streams")
SMALL = [case for case in ROWS if case.row["bytes"] < 2_000]
BY_BYTE = {"plan": "every", "n": 1, "gap_ms": 0}


@asynccontextmanager
async def backend(valkey: ValkeyProcess, case: Case, **response: Any) -> AsyncIterator[Stack]:
    """A stack before a backend that plays the row, or the row with changes."""
    played = {name: value for name, value in (case.row["response"] | response).items() if value is not None}
    async with StubBackend(lambda _: corpus_script(played, case.data, stub.port)) as stub:
        endpoint = {"endpoint_id": "default", "url": f"{stub.url}/v1", "idle_timeout_ms": 3_000}
        async with stack(valkey.url, "", endpoints=[endpoint]) as path:
            yield path
            await until(lambda: path.leases() == 0)
            assert all(row["in_flight"] == 0 for row in path.section("pools")["rows"])


def plain(case: Case) -> bytes:
    return gzip.decompress(case.data) if case.row["file"].endswith(".gz") else case.data


async def ended_as_listed(case: Case, path: Stack) -> dict[str, Any]:
    await until(lambda: path.endings() != [])
    [ended] = path.endings()
    want = case.row["expected"]
    assert ended["ending"] in [want["ending"], *want.get("ending_also", ())]
    usage = want["usage"] or {}
    if not case.row["file"].endswith(".json"):
        assert ended.get("input_tokens") == usage.get("input_tokens")
        assert ended.get("output_tokens") == usage.get("output_tokens")
    return ended


def said_as_listed(case: Case, got: dict[str, Any]) -> None:
    """Hold what a reader of event streams made of the answer against the row."""
    want, sent = case.row["expected"], tool("sse_ref").collect(plain(case))
    assert got["bad"] == 0
    if case.row["file"].endswith(".json"):
        whole = json.loads(case.data)["choices"][0]
        assert got["choices"]["0"] == {"text": whole["message"]["content"], "finish_reason": whole["finish_reason"]}
        return
    assert got["payloads"] == sent["payloads"][: want["payloads"]["deliver"]]
    for index, choice in want["choices"].items():
        assert choice.items() <= got["choices"][index].items()
    if "text_sha256" in want:
        assert hashlib.sha256(got["choices"]["0"]["text"].encode()).hexdigest() == want["text_sha256"]
    if want["error"] is None:
        assert got["error"] is None
    else:
        assert want["error"]["must_contain"] in got["error"]


async def over_http(case: Case, path: Stack) -> None:
    want = case.row["expected"]
    started = time.monotonic()
    async with Wire(path.port) as wire:
        await wire.post(caller_of(case).body, callers()[case.row["request"]]["path"])
        status = await wire.head()
        assert status in want["client_status"]
        body = await wire.rest()
    ended = await ended_as_listed(case, path)
    assert wire.headers["x-dispatch-request-id"] == ended["request_id"]
    if status != 200:
        assert want["payloads"]["deliver"] == 0
        assert want["error"]["must_contain"] in wire.error()["message"]
        return
    assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert_canonical(body)
    got = tool("sse_ref").collect(body)
    said_as_listed(case, got)
    assert got["done"] is (ended["ending"] == "succeeded" and want["done"] != "none")
    assert body.count(b"data: [DONE]") == got["done"]
    if "first_payload_within_ms" in want:
        assert wire.times[0] - started < want["first_payload_within_ms"] / 1000 + 1


def assert_canonical(body: bytes) -> None:
    """Nothing but whole events of one data line and perhaps a name, and comments between them."""
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    for event in events:
        lines = event.split(b"\n")
        assert [line.split(b" ")[0] for line in lines] in ([b"data:"], [b"event:", b"data:"], [b":"])
        assert lines[-1] not in (b"data: ", b"data:")
        if b'"error":' in event and b'"choices"' not in event:
            error = json.loads(lines[-1].removeprefix(b"data: "))["error"]
            assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("case", ROWS, ids=str)
async def test_a_stream_over_http_is_as_its_row_says(valkey: ValkeyProcess, case: Case) -> None:
    async with backend(valkey, case) as path:
        await over_http(case, path)


@pytest.mark.parametrize("case", SMALL, ids=str)
async def test_a_stream_that_comes_byte_by_byte_is_the_same(valkey: ValkeyProcess, case: Case) -> None:
    async with backend(valkey, case, writes=BY_BYTE, tcp=None) as path:
        await over_http(case, path)


@pytest.mark.parametrize("case", ROWS, ids=str)
async def test_a_stream_in_the_sdk_is_as_its_row_says(valkey: ValkeyProcess, case: Case) -> None:
    async with backend(valkey, case) as path:
        stream = path.client.stream_call(caller_of(case))
        chunks = [chunk async for chunk in stream]
        reply = stream.reply
        ended = await ended_as_listed(case, path)
        assert (reply.request_id, reply.ending) == (ended["request_id"], ended["ending"])
        frames = b"".join(b"data: " + chunk.data + b"\n\n" for chunk in chunks)
        got = tool("sse_ref").collect(frames + error_of(reply))
        said_as_listed(case, got)
        reasons = tuple(choice["finish_reason"] or "" for _, choice in sorted(got["choices"].items()))
        assert reply.head.finish_reasons == (reasons if any(reasons) else ())
        text = "".join(chunk.text for chunk in chunks)
        assert text == got["choices"].get("0", {}).get("text", "")


def error_of(reply: Reply) -> bytes:
    """Return an event with what the reply says of an error, b"" if nothing."""
    if reply.succeeded or reply.error is None:
        return b""
    return b"data: " + (reply.body or json.dumps({"error": {"message": reply.error.message}}).encode()) + b"\n\n"


Use = Callable[[Any], Any]


async def with_openai(path: Stack, way: str, kind: str, use: Use, use_blocking: Use) -> Any:
    """Call `use` with the package's client of a kind, which goes through HTTP or the transport."""
    given: dict[str, Any] = {"api_key": "x", "base_url": f"{path.url}/v1", "max_retries": 0}
    if kind == "async":
        if way == "transport":
            given["http_client"] = httpx.AsyncClient(transport=DispatchTransport(path.client))
        async with openai.AsyncOpenAI(**given) as client:
            return await use(client)

    def blocking() -> Any:
        with sync.DispatchClient(path.valkey_url, fabric_group=path.group, close_ms=200) as producer:
            if way == "transport":
                given["http_client"] = httpx.Client(transport=DispatchTransport(producer))
            with openai.OpenAI(**given) as client:
                return use_blocking(client)

    return await anyio.to_thread.run_sync(blocking)


class Gathered:
    """What a stream of the openai package came to."""

    def __init__(self, case: Case) -> None:
        self._caller = callers()[case.row["request"]]
        self.said: dict[str, Any] = {"choices": {}, "usage": None}
        self.count = 0
        self.error: openai.APIError | None = None

    def begin(self, client: Any) -> Any:
        if "responses" in self._caller["path"]:
            return client.responses.create(**self._caller["body"])
        operation = client.chat.completions if "chat" in self._caller["path"] else client.completions
        return operation.create(**self._caller["body"])

    def add(self, each: Any) -> None:
        self.count += 1
        tool("sse_ref").add(self.said, each.to_dict())

    async def read(self, client: Any) -> None:
        try:
            async for each in await self.begin(client):
                self.add(each)
        except openai.APIError as error:
            self.error = error

    def read_blocking(self, client: Any) -> None:
        try:
            for each in self.begin(client):
                self.add(each)
        except openai.APIError as error:
            self.error = error


@pytest.mark.parametrize("way", ["http", "transport"])
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("case", ROWS, ids=str)
async def test_a_stream_in_the_openai_package_is_as_its_row_says(
    valkey: ValkeyProcess, case: Case, kind: str, way: str
) -> None:
    want, got = case.row["expected"], Gathered(case)
    async with backend(valkey, case) as path:
        await with_openai(path, way, kind, got.read, got.read_blocking)
        await ended_as_listed(case, path)
    # An error has a status exactly where nothing came before it.
    assert isinstance(got.error, openai.APIStatusError) is (got.error is not None and got.count == 0)
    if not case.row["file"].endswith(".json"):
        assert got.count == want["payloads"]["deliver"]
        assert (got.error is None) is (want["error"] is None)
        assert got.error is None or want["error"]["must_contain"] in got.error.message
    for index, choice in want["choices"].items():
        assert choice.items() <= got.said["choices"][index].items()


MATRIX = [
    pytest.param(ends, space, mark, id=f"{name}{'' if space else '-tight'}{'-bom' if mark else ''}")
    for (name, ends), space, mark in itertools.product(
        [("lf", b"\n"), ("crlf", b"\r\n"), ("cr", b"\r")], [True, False], [True, False]
    )
]


@pytest.mark.parametrize(("ends", "space", "mark"), MATRIX)
async def test_what_the_backend_writes_comes_out_in_one_form(
    valkey: ValkeyProcess, ends: bytes, space: bool, mark: bool
) -> None:
    """Field report 49 and 15: line ends, spaces, marks, comments, and characters that look like line ends."""
    text = "é漢🙂\u2028\u2029\x85"
    base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [
        {**base, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]},
        {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    payloads = [json.dumps(chunk, ensure_ascii=False).encode() for chunk in chunks]
    field = b"data: " if space else b"data:"
    cut = payloads[0].index(b"choices") - 1
    lines = [
        b": ping", b"id: 7", field + payloads[0][:cut], b": inside", field + payloads[0][cut:], b"", b"retry: 1", b"",
        field, b"", field + payloads[1], b"", field + b"[DONE] ", b"",
    ]  # fmt: skip
    body = (b"\xef\xbb\xbf" if mark else b"") + ends.join(lines)
    response = {
        "status": 200, "reason": "OK", "headers": [["content-type", "text/event-stream"]], "framing": "until-close",
        "head_delay_ms": 0, "writes": BY_BYTE, "end": "clean",
    }  # fmt: skip
    async with (
        StubBackend(lambda _: corpus_script(response, body, 0)) as stub,
        stack(valkey.url, f"{stub.url}/v1") as on,
    ):
        async with Wire(on.port) as wire:
            await wire.post(b'{"model":"m","messages":[],"stream":true}')
            assert await wire.head() == 200
            heard = await wire.rest()
        joined = payloads[0][:cut] + b" " + payloads[0][cut:]
        assert heard == b"data: " + joined + b"\n\ndata: " + payloads[1] + b"\n\ndata: [DONE]\n\n"
        assert json.loads(joined)["choices"][0]["delta"]["content"] == text

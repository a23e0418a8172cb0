"""Faults that people who run such systems have reported, at a front door that asks for keys and has bounds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from dispatch.fabric.api_keys import NewKey
from tests.support.calls import COMPLETION
from tests.support.front import Heard, exchange, head
from tests.support.producing import eye, until
from tests.support.stack import Stack, stack
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
LIMIT = 200_000


@asynccontextmanager
async def front(url: str, **document: Any) -> AsyncIterator[tuple[Stack, StubBackend, NewKey]]:
    """Start a stack whose callers need the key that it comes with."""
    async with (
        StubBackend(lambda _: json_answer(COMPLETION)) as stub,
        stack(url, f"{stub.url}/v1", keys="required", **document) as path,
    ):
        yield path, stub, path.create_key()


async def send(path: Stack, body: bytes, *lines: bytes, chunks: int = 0) -> Heard:
    """Post a body with these header lines, in `chunks` pieces or with its length."""
    if not chunks:
        start = head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *lines])
        return await exchange(path.port, start, body)
    step = -(-len(body) // chunks)
    pieces = [b"%x\r\n%b\r\n" % (len(body[at : at + step]), body[at : at + step]) for at in range(0, len(body), step)]
    start = head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"transfer-encoding: chunked", *lines])
    return await exchange(path.port, start, *pieces, b"0\r\n\r\n")


def showing(key: NewKey) -> bytes:
    return b"authorization: Bearer " + key.token.encode()


@pytest.mark.parametrize("chunks", [0, 7])
async def test_bodies_at_their_bound_are_passed_whole_or_refused_and_nothing_of_them_stays(
    valkey: ValkeyProcess, chunks: int
) -> None:
    async with front(valkey.url, max_payload_bytes=LIMIT) as (path, stub, key):
        for size, status in ((LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413), (LIMIT * 20, 413)):
            body = BODY + b" " * (size - len(BODY))
            heard = await send(path, body, showing(key), chunks=chunks)
            assert heard.status == status, heard
            if status == 413:
                error = json.loads(heard.body)["error"]
                assert (error["code"], str(LIMIT) in error["message"]) == ("body_too_large", True)
            refused = await send(path, body, chunks=chunks)
            assert refused.status == 401
        assert [len(seen.body) for seen in stub.requests] == [LIMIT - 1, LIMIT]
        assert path.submitted() == 2
        await until(lambda: path.keys("body:") == [])


@pytest.mark.parametrize(("images", "cost"), [(1, 3), (3, 7), (7, 15), (12, 16), (40, 16)])
async def test_images_in_every_form_are_counted_and_travel_in_their_order(
    valkey: ValkeyProcess, images: int, cost: int
) -> None:
    def part(number: int) -> dict[str, Any]:
        url = f"data:image/png;base64,{number:08}"
        return {"type": "image_url", "image_url": url if number % 2 else {"url": url, "detail": "low"}}

    content = [{"type": "text", "text": "look"}, *(part(number) for number in range(images))]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}, indent=1).encode()
    async with front(valkey.url) as (path, stub, key):
        assert (await send(path, body, showing(key))).status == 200
        assert [seen.body for seen in stub.requests] == [body]
        assert [int(row["cost"]) for row in path.endings()] == [cost]


ODD_VALUES = [
    "é漢🙂".encode(),
    b"\xb2\xff\xfe",
    b"x" * 8192,
    b"",
    b"a b",
    b"{other}:x",
    b"../admin",
    b"a%0d%0aset-cookie:%20injected=1",
    b"a\r\nset-cookie: injected=1",
    b"a\r\n set-cookie: injected=1",
    b"a\nset-cookie: injected=1",
    b"a\x00b",
]
NAMES = [b"Authorization", b"X-Dispatch-Pool", b"X-Dispatch-Fairness-Key", b"X-Dispatch-Max-Wait-Ms", b"X-Request-Id"]


@pytest.mark.parametrize("name", NAMES)
async def test_no_header_value_gets_anybody_in_or_anything_out(valkey: ValkeyProcess, name: bytes) -> None:
    async with front(valkey.url) as (path, stub, key):
        shown = [] if name == b"Authorization" else [showing(key)]
        for value in ODD_VALUES:
            for prefix in (b"", b"Bearer ") if name == b"Authorization" else (b"",):
                for lines in ([name + b": " + prefix + value], [name + b": " + prefix + value] * 2):
                    heard = await send(path, BODY, *shown, *lines)
                    allowed = (401, 400) if name == b"Authorization" else (200, 400, 404)
                    assert heard.status in allowed, (value, heard)
                    names = [field for field, _ in heard.headers]
                    assert b"set-cookie" not in names, value
                    assert names.count(b"x-request-id") == 1, value
                    assert (heard.header(b"x-request-id") or b"").isascii(), value
        if name == b"Authorization":
            assert stub.requests == []
        assert (await send(path, BODY, showing(key))).status == 200


async def test_equal_ids_of_two_keys_cross_neither_replies_nor_requests(valkey: ValkeyProcess) -> None:
    async with front(valkey.url) as (path, _, one):
        two = path.create_key()
        ids: dict[str, list[str]] = {one.token: [], two.token: []}

        async def call(token: str) -> None:
            headers = {"authorization": f"Bearer {token}", "x-request-id": "same", "idempotency-key": "same"}
            async with httpx.AsyncClient(base_url=path.url, timeout=30) as client:
                answer = await client.post(CHAT, content=BODY, headers=headers)
            assert answer.headers["x-request-id"] == "same"
            if answer.status_code == 200:
                ids[token].append(answer.headers["x-dispatch-request-id"])
            else:
                assert answer.status_code == 409, answer.text  # the same call of the same key is under way

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                for token in ids:
                    tasks.start_soon(call, token)
        assert [len(set(found)) for found in ids.values()] == [1, 1]
        assert not set(ids[one.token]) & set(ids[two.token])
        assert path.submitted() == 2
        with eye(valkey.url) as server:
            records = server.xrevrange(f"{{{path.group}}}:stream:llm:endings")
        assert one.token.split("_", 2)[2].encode() not in str(records).encode()

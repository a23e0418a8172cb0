"""Header values from anywhere, against the whole path: nothing becomes a 500, nothing is injected, nothing crosses."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from tests.support.front import Heard, exchange, head
from tests.support.producing import said, say
from tests.support.stack import stack
from tests.support.stub import Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

ODD_VALUES = [
    "é漢🙂".encode(),
    b"\xb2",
    b"\xff\xfe",
    b"x" * 8192,
    b"",
    b'""',
    b"a b",
    b"a\r\nset-cookie: injected=1",
    b"a\r\n set-cookie: injected=1",
    b"a\rset-cookie: injected=1",
    b"a\nset-cookie: injected=1",
    b"a%0d%0aset-cookie:%20injected=1",
    b'"a\\r\\nset-cookie: injected=1"',
    b"a\x00b",
]


def echo(request: SeenRequest) -> Script:
    return json_answer(json.dumps({"choices": [], "id": said(request.body)}).encode())


def post(text: str, *lines: bytes) -> bytes:
    body = json.dumps({"model": "m", "messages": say(text)}).encode()
    length = b"content-length: %d" % len(body)
    return head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", length, *lines]) + body


@pytest.mark.parametrize("name", [b"Idempotency-Key", b"X-Request-Id"])
async def test_no_value_makes_a_500_or_gets_into_the_answers_head(valkey: ValkeyProcess, name: bytes) -> None:
    async with StubBackend(echo) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        for value in ODD_VALUES:
            for lines in ([name + b": " + value], [name + b": " + value] * 2, [name + b": a", name + b": b"]):
                heard = await exchange(path.port, post("odd", *lines))
                assert heard.status in (200, 400, 422, None), value  # None: no HTTP at all, the connection is closed
                names = [field for field, _ in heard.headers]
                assert b"set-cookie" not in names, value
                if heard.status is not None:
                    assert names.count(b"x-request-id") == 1, value
                    assert 1 <= len(heard.header(b"x-request-id") or b"") <= 128, value
                if heard.status == 400:
                    assert set(json.loads(heard.body)["error"]) == {"message", "type", "param", "code"}
                    assert b"injected" not in heard.body
        heard = await exchange(path.port, post("well", name + b": fine"))
        assert (heard.status, json.loads(heard.body)["id"]) == (200, "well")


async def test_equal_ids_and_equal_keys_never_cross_the_replies_of_different_calls(valkey: ValkeyProcess) -> None:
    lines = (b"x-request-id: same", b'idempotency-key: "same"')
    answers: dict[str, Heard] = {}
    async with StubBackend(echo) as stub, stack(valkey.url, f"{stub.url}/v1") as path:

        async def one(text: str, *given: bytes) -> None:
            answers[text] = await exchange(path.port, post(text, *given))

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(one, f"id {number}", lines[0])
                tasks.start_soon(one, f"both {number}", *lines)
    ids: list[Any] = []
    for text, heard in answers.items():
        assert heard.header(b"x-request-id") == b"same"
        if heard.status == 200:
            assert json.loads(heard.body)["id"] == text
            ids.append(heard.header(b"x-dispatch-request-id"))
        else:
            assert heard.status == 422, text
    assert len(ids) == len(set(ids)) == 21  # every call without a key, and one with it

"""The header `Idempotency-Key`: what is a key, what is refused, and what becomes of a call that has one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dispatch import errors
from tests.support.front import OK_BODY, FakeClient, answering, failing, reply

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = b'{"messages":[],"model":"m"}'


async def post(http: httpx.AsyncClient, *keys: bytes, **more: Any) -> httpx.Response:
    fields: list[tuple[bytes, bytes]] = [(b"idempotency-key", key) for key in keys]
    return await http.post(CHAT, content=BODY, headers=fields, **more)


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        (b"8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        (b'"8e03978e-40d5-43dd-bc93-6894a57f9324"', "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        (b"a/b=c:d;e{f}", "a/b=c:d;e{f}"),
        (b'"a \\"b\\" \\\\ c,d"', 'a "b" \\ c,d'),
        (b"k" * 255, "k" * 255),
        (b'"' + b'\\"' * 255 + b'"', '"' * 255),
        (b"  k  ", "k"),
    ],
)
async def test_a_key_may_be_quoted_or_bare(http: httpx.AsyncClient, client: FakeClient, sent: bytes, key: str) -> None:
    answer = await post(http, sent)
    assert (answer.status_code, answer.content) == (200, OK_BODY)
    assert client.last[1].idempotency_key == key
    assert client.last[1].request_id is None


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b'""',
        b'" "',
        b'"',
        b'"a',
        b'a"',
        b'"a" "b"',
        b'"a";p=1',
        b'"a\\b"',
        b'"a\\"',
        b"a b",
        b"a,b",
        b"a\\b",
        b"\xb2",
        "schlüssel".encode(),
        '"é"'.encode(),
        b'"a\tb"',
        b"k" * 256,
        b"k" * 8192,
        b'"' + b"k" * 256 + b'"',
    ],
)
async def test_what_is_no_key_is_refused(http: httpx.AsyncClient, client: FakeClient, sent: bytes) -> None:
    answer = await post(http, sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "idempotency-key", "invalid_header")
    assert "1 to 255 visible ASCII characters" in error["message"]
    assert answer.headers["x-dispatch-reason"] == "rejected-invalid_header"
    assert not client.calls


async def test_two_keys_are_refused_also_when_they_are_equal(http: httpx.AsyncClient, client: FakeClient) -> None:
    answer = await post(http, b"k", b"k")
    assert answer.status_code == 400
    assert "more than once" in answer.json()["error"]["message"]
    assert not client.calls


REFUSED = {
    "idempotency_in_progress": (errors.RequestInProgress("it runs", request_id="r"), 409, "true"),
    "idempotency_mismatch": (errors.IdempotencyConflict("another", request_id="r"), 422, "false"),
}


@pytest.mark.parametrize("reason", REFUSED)
async def test_a_repeat_that_gets_no_reply_is_told_why(
    http: httpx.AsyncClient, client: FakeClient, reason: str
) -> None:
    error, status, retry = REFUSED[reason]
    client.behave = failing(error)
    answer = await post(http, b"k")
    assert (answer.status_code, answer.headers["x-dispatch-reason"]) == (status, f"rejected-{reason}")
    assert answer.headers["x-should-retry"] == retry
    assert answer.json()["error"] == {
        "message": str(error), "type": "invalid_request_error", "param": "idempotency-key", "code": reason,
    }  # fmt: skip
    assert "retry-after" not in answer.headers


async def test_who_is_interrupted_may_repeat_with_the_key(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.behave = failing(errors.StateConflict("the client was closed"))
    for keys, retry in (((), "false"), ((b"k",), "true")):
        answer = await post(http, *keys)
        assert (answer.status_code, answer.headers["x-dispatch-reason"]) == (503, "ended-interrupted")
        assert (answer.headers["x-should-retry"], answer.json()["error"]["code"]) == (retry, "interrupted")


async def test_a_replayed_reply_says_so(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert "x-dispatch-replayed" not in (await post(http, b"k")).headers
    client.behave = answering(reply(request_id="first", replayed=True))
    answer = await post(http, b"k")
    assert (answer.headers["x-dispatch-replayed"], answer.headers["x-dispatch-request-id"]) == ("true", "first")
    assert answer.content == OK_BODY


async def test_a_later_attempt_says_which_it_is(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert "x-dispatch-attempt" not in (await post(http)).headers
    client.behave = answering(reply(attempt=3))
    assert (await post(http)).headers["x-dispatch-attempt"] == "3"

"""Connections whose client sends too much head, too slowly, several requests at once, or garbage in between."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import pytest

from dispatch.contract import Call, Reply
from dispatch.ingress import IngressState, create_app
from dispatch.ingress.protocol import HttpProtocol
from dispatch.producer.options import CallOptions
from tests.support.front import OK_BODY, FakeClient, FakeGateway, Heard, exchange, head, reply, serving

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m","messages":[]}'
HEALTH = head([b"GET /healthz HTTP/1.1", b"host: x"])


@pytest.fixture
async def port(client: FakeClient) -> AsyncIterator[int]:
    async with serving(create_app(IngressState(client=client, gateway=FakeGateway()))) as opened:
        yield opened


def post(*lines: bytes, body: bytes = BODY) -> bytes:
    return head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *lines]) + body


def refused(heard: Heard, status: int, code: str) -> bool:
    return heard.status == status and f'"code":"{code}"'.encode() in heard.body


async def everything(port: int, *pieces: bytes) -> bytes:
    """Send pieces and return all that comes until the server closes the connection."""
    heard = b""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for piece in pieces:
            await stream.send(piece)
        with anyio.fail_after(5):
            try:
                while True:
                    heard += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return heard


@pytest.mark.parametrize(
    "lines",
    [
        [b"a: b"] * 300,
        [b"a: b"] * 200_000,
        [b"x-%d: b" % number for number in range(20_000)],
        [b"a: " + b"x" * 70_000],
        [b"a: " + b"x" * 5_000_000],
    ],
    ids=["fields", "equal fields", "many fields", "large field", "huge field"],
)
async def test_a_head_that_is_too_large_is_refused_and_holds_nobody_up(
    port: int, client: FakeClient, lines: list[bytes]
) -> None:
    started = time.monotonic()
    assert refused(await exchange(port, post(*lines)), 431, "head_too_large")
    assert (await exchange(port, HEALTH)).status == 200
    assert time.monotonic() - started < 2
    assert not client.calls


async def test_a_head_without_end_is_refused_before_its_end(port: int) -> None:
    heard = await exchange(port, b"GET /healthz HTTP/1.1\r\na: ", *[b"x" * 10_000] * 10)
    assert refused(heard, 431, "head_too_large")
    heard = await exchange(port, *[b"\r\n" * 10_000] * 10)  # empty lines before a request are allowed, not for ever
    assert refused(heard, 431, "head_too_large")


async def test_a_head_of_allowed_size_passes_with_a_large_body(port: int, client: FakeClient) -> None:
    body = BODY + b" " * 200_000
    heard = await exchange(port, post(*[b"x-%d: %b" % (number, b"y" * 400) for number in range(150)], body=body))
    assert (heard.status, heard.body) == (200, OK_BODY)
    assert [call.body for call, _ in client.calls] == [body]


async def test_a_head_that_does_not_come_within_its_time_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "head_s", 0.2)
    silent = await exchange(port)
    dripping = await exchange(port, b"GET /healthz HTTP/1.1\r\na", then_wait=5)
    second = await everything(port, HEALTH, b"GET /heal")
    assert refused(silent, 408, "head_too_slow")
    assert refused(dripping, 408, "head_too_slow")
    assert second.startswith(b"HTTP/1.1 200")
    assert second.count(b'"head_too_slow"') == 1


async def test_a_call_takes_longer_than_a_head_may(
    port: int, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(_call: Call, _options: CallOptions) -> Reply:
        await anyio.sleep(0.5)
        return reply()

    monkeypatch.setattr(HttpProtocol, "head_s", 0.1)
    client.behave = slow
    assert (await exchange(port, post())).status == 200


@pytest.mark.parametrize(
    "garbage",
    [b"no request\r\n\r\n", b"\xff" * 200_000, post(b"content-length: 3"), post(b"transfer-encoding: chunked")],
    ids=["words", "bytes", "two lengths", "two framings"],
)
async def test_garbage_after_requests_does_not_take_the_place_of_their_answers(
    port: int, client: FakeClient, garbage: bytes
) -> None:
    async def slow(_call: Call, _options: CallOptions) -> Reply:
        await anyio.sleep(0.1)
        return reply()

    client.behave = slow
    heard = await everything(port, post() + HEALTH + post() + garbage + post())
    assert heard.count(b"HTTP/1.1 200") == heard.count(b"HTTP/1.1") == 3
    assert heard.count(OK_BODY) == 2
    assert heard.endswith(OK_BODY)
    assert len(client.calls) == 2


async def test_a_request_whose_body_breaks_behind_another_is_not_begun(port: int, client: FakeClient) -> None:
    chunked = head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"transfer-encoding: chunked"])
    heard = await everything(port, post() + chunked + b"5\r\n{abcd", b"zz\r\n")
    assert heard.count(b"HTTP/1.1") == 1
    assert heard.endswith(OK_BODY)
    assert len(client.calls) == 1


async def test_the_oldest_of_several_requests_learns_that_its_client_has_left(port: int, client: FakeClient) -> None:
    async def forever(_call: Call, _options: CallOptions) -> Reply:
        await anyio.sleep_forever()
        raise AssertionError

    client.behave = forever
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(post() * 3)
        await client.begun.wait()
    with anyio.fail_after(2):
        await client.gone.wait()
    assert client.cancelled == len(client.calls) == 1

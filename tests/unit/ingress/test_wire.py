"""Calls over real sockets: header bytes from anywhere, large and lying bodies, clients that leave."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from dispatch.contract import Call, Reply
from dispatch.ingress import IngressSettings, IngressState, create_app
from dispatch.producer.options import CallOptions
from tests.support.front import OK_BODY, FakeClient, FakeGateway, Heard, exchange, head, reply, serving

pytestmark = pytest.mark.anyio

LIMIT = 200_000
BODY = b'{"model":"m","messages":[]}'
BOUNDS = IngressSettings(body_idle_s=0.3, body_total_s=1.0, drain_max_s=2.0, drain_max_bytes=64 * 1024 * 1024)


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway(max_payload_bytes=LIMIT)


@pytest.fixture
async def port(client: FakeClient, gateway: FakeGateway) -> AsyncIterator[int]:
    async with serving(create_app(IngressState(client=client, gateway=gateway, settings=BOUNDS))) as opened:
        yield opened


def post(*lines: bytes, length: int | None = len(BODY), path: bytes = b"/v1/chat/completions") -> bytes:
    sized = [] if length is None else [b"content-length: %d" % length]
    return head([b"POST " + path + b" HTTP/1.1", b"host: x", *sized, *lines])


def padded(size: int) -> bytes:
    return BODY + b" " * (size - len(BODY))


def code(heard: Heard) -> str:
    error = json.loads(heard.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


async def forever(_call: Call, _options: CallOptions) -> Reply:
    await anyio.sleep_forever()
    raise AssertionError


ODD_VALUES = [
    "é漢".encode(),
    b"\xb2",
    b"\xff\xfe\xfd",
    b"x" * 8192,
    b"",
    b" ",
    b"a b",
    b'"quoted"',
    b"%0d%0aset-cookie:%20x",
    b"a\tb",
    b"\x7f",
]
NAMES = (
    b"X-Request-Id X-Dispatch-Pool X-Dispatch-Metadata X-Dispatch-Timeout-Ms Idempotency-Key traceparent tracestate "
    b"content-type content-encoding authorization accept cookie x-forwarded-for upgrade"
)


@pytest.mark.parametrize("name", NAMES.split())
async def test_no_header_bytes_make_a_500(port: int, name: bytes) -> None:
    for value in ODD_VALUES:
        for lines in ([name + b": " + value], [name + b": " + value, name + b": " + value]):
            heard = await exchange(port, post(*lines) + BODY)
            assert heard.status in (200, 400, 415), value
            shown = heard.header(b"x-request-id") or b""
            assert shown.isascii(), value
            assert 1 <= len(shown) <= 128, value
            assert heard.header(b"set-cookie") is None, value


async def test_heads_that_are_no_http_are_never_a_500(port: int) -> None:
    for line in (
        b"X-Request-Id: a\r\n b",
        b"X-Request-Id: a\rset-cookie: x",
        b"X-Request-Id: a\nset-cookie: x",
        b"X-Request-Id: a\x00b",
        b"X\xff: a",
        b": a",
        b"no colon",
    ):
        heard = await exchange(port, post(line) + BODY)
        assert heard.status in (200, 400, None), line
        assert heard.header(b"set-cookie") is None, line


@pytest.mark.parametrize(
    "path", [b"/v1/\xff\xfe", b"/%ff%00", b"/pools/%7b%0d%0a/v1/chat/completions", b"*", b"http://x"]
)
async def test_no_path_makes_a_500(port: int, path: bytes) -> None:
    heard = await exchange(port, post(path=path) + BODY)
    assert heard.status in (400, 404)


async def test_equal_ids_of_two_callers_do_not_cross_their_replies(port: int, client: FakeClient) -> None:
    async def behave(call: Call, _options: CallOptions) -> Reply:
        await anyio.sleep(0.05 if call.model == "m1" else 0.01)
        return reply(request_id=call.model, body=b'"%s"' % call.model.encode())

    client.behave = behave
    answers: dict[str, Heard] = {}

    async def one(model: str) -> None:
        body = b'{"messages":[],"model":"%s"}' % model.encode()
        answers[model] = await exchange(port, post(b"x-request-id: same", length=len(body)) + body)

    async with anyio.create_task_group() as tasks:
        for model in ("m1", "m2"):
            tasks.start_soon(one, model)
    for model, heard in answers.items():
        assert heard.body == b'"%s"' % model.encode()
        assert (heard.header(b"x-request-id"), heard.header(b"x-dispatch-request-id")) == (b"same", model.encode())


@pytest.mark.parametrize(("size", "status"), [(LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413), (3_000_000, 413)])
async def test_the_bound_on_a_body_with_its_length(port: int, client: FakeClient, size: int, status: int) -> None:
    heard = await exchange(port, post(length=size), padded(size))
    assert heard.status == status
    assert [len(call.body) for call, _ in client.calls] == ([size] if status == 200 else [])
    if status == 413:
        assert code(heard) == "body_too_large"


@pytest.mark.parametrize(("size", "status"), [(LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 413), (3_000_000, 413)])
async def test_the_bound_on_a_body_in_chunks(port: int, client: FakeClient, size: int, status: int) -> None:
    data = padded(size)
    chunks = [b"%x\r\n%b\r\n" % (len(data[at : at + 50_000]), data[at : at + 50_000]) for at in range(0, size, 50_000)]
    heard = await exchange(port, post(b"transfer-encoding: chunked", length=None), *chunks, b"0\r\n\r\n")
    assert heard.status == status
    assert [call.body for call, _ in client.calls] == ([data] if status == 200 else [])


async def test_a_413_is_readable_by_a_client_that_writes_everything_first(port: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(600):
            yield b" " * 100_000

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for content in (b" " * 60_000_000, pieces()):
            answer = await http.post("/v1/chat/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers["connection"] == "close"


async def test_a_refused_body_is_not_asked_for(port: int) -> None:
    """With `Expect: 100-continue` the answer comes instead of the leave to send."""
    for line, status in ((b"expect: 100-continue", 413), (b"content-type: text/plain", 415)):
        started = time.monotonic()
        heard = await exchange(port, post(b"expect: 100-continue", line, length=LIMIT + 1), then_wait=5)
        assert heard.status in (413, 415, status)
        assert time.monotonic() - started < 1


async def test_a_body_that_may_be_sent_is_asked_for(port: int) -> None:
    stream = await anyio.connect_tcp("127.0.0.1", port)
    async with stream:
        await stream.send(post(b"expect: 100-continue"))
        assert (await stream.receive()).startswith(b"HTTP/1.1 100")
        await stream.send(BODY)
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")


async def test_a_length_that_lies_upwards_queues_nothing(port: int, client: FakeClient) -> None:
    heard = await exchange(port, post(length=len(BODY) + 100) + BODY, half_close=True)
    assert heard.status in (None, 400)
    heard = await exchange(port, post(length=len(BODY) + 100) + BODY, then_wait=5)
    assert (heard.status, code(heard)) == (408, "body_too_slow")
    assert not client.calls


async def test_a_length_that_lies_downwards_is_a_cut_body(port: int, client: FakeClient) -> None:
    for more in ([], [b"connection: close"]):  # the rest is no second request, and its refusal no answer to the first
        heard = await exchange(port, post(*more, length=len(BODY) - 5) + BODY)
        assert (heard.status, code(heard)) == (400, "invalid_json")
    assert not client.calls


@pytest.mark.parametrize("lines", [[b"transfer-encoding: chunked"], [b"content-length: 5"], [b"content-length: -1"]])
async def test_two_framings_are_refused(port: int, client: FakeClient, lines: list[bytes]) -> None:
    heard = await exchange(port, post(*lines) + BODY)
    assert (heard.status, code(heard)) == (400, "invalid_http")
    assert not client.calls


async def test_a_body_that_drips_ends_within_its_time(port: int, client: FakeClient) -> None:
    stream = await anyio.connect_tcp("127.0.0.1", port)
    started = time.monotonic()
    async with stream, anyio.create_task_group() as tasks:

        async def drip() -> None:
            await stream.send(post(length=100_000))
            while True:
                await stream.send(b" ")
                await anyio.sleep(0.1)

        tasks.start_soon(drip)
        assert (await stream.receive()).startswith(b"HTTP/1.1 408")
        tasks.cancel_scope.cancel()
    assert 0.8 < time.monotonic() - started < 3
    assert not client.calls


async def test_bodies_together_are_bounded(client: FakeClient, gateway: FakeGateway) -> None:
    client.behave = forever
    state = IngressState(client=client, gateway=gateway, settings=IngressSettings(max_held_bytes=150_000))
    async with serving(create_app(state)) as port, anyio.create_task_group() as tasks:
        first = padded(100_000)
        tasks.start_soon(exchange, port, post(length=len(first)) + first)
        await client.begun.wait()
        heard = await exchange(port, post(length=len(first)) + first)
        assert (heard.status, code(heard), heard.header(b"retry-after")) == (429, "gateway_full", None)
        tasks.cancel_scope.cancel()
        await client.gone.wait()
        client.behave = None
        with anyio.CancelScope(shield=True):
            assert (await exchange(port, post(length=len(first)) + first)).status == 200


@pytest.mark.parametrize("half", [True, False])
async def test_a_client_that_leaves_cancels_its_call(port: int, client: FakeClient, half: bool) -> None:
    """A half-closed client (FIN after the request) counts as gone."""
    client.behave = forever
    stream = await anyio.connect_tcp("127.0.0.1", port)
    await stream.send(post() + BODY)
    await client.begun.wait()
    assert client.cancelled == 0
    if half:
        await stream.send_eof()
    else:
        await stream.aclose()
    with anyio.fail_after(2):
        await client.gone.wait()
    await stream.aclose()
    assert client.cancelled == 1


async def test_a_kept_connection_serves_many_calls(port: int, client: FakeClient) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for number in range(5):
            answer = await http.post("/v1/chat/completions", content=padded(100 + 40_000 * number))
            assert (answer.status_code, answer.content) == (200, OK_BODY)
            assert "connection" not in answer.headers
    assert len(client.calls) == 5


async def test_pipelined_calls_are_answered_in_order(port: int, client: FakeClient) -> None:
    async def behave(call: Call, _options: CallOptions) -> Reply:
        await anyio.sleep(0.05 if call.model == "m" else 0)
        return reply(body=b'"%s"' % call.model.encode())

    client.behave = behave
    second = BODY.replace(b'"m"', b'"n"')
    stream = await anyio.connect_tcp("127.0.0.1", port)
    async with stream:
        await stream.send(post() + BODY + post() + second)
        heard = b""
        while heard.count(b"HTTP/1.1 200") < 2 or not heard.endswith(b'"n"'):
            heard += await stream.receive()
        assert heard.index(b'"m"') < heard.index(b'"n"')


@pytest.mark.parametrize(
    "offer",
    [
        [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA"],
        [b"connection: upgrade, close", b"upgrade: websocket", b"sec-websocket-version: 13"],
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_to_upgrade_is_ignored(port: int, client: FakeClient, offer: list[bytes], chunked: bool) -> None:
    """Java's HTTP client makes one with every first request."""
    data = padded(100_000)
    wire = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if chunked else data
    framing = [b"transfer-encoding: chunked"] if chunked else []
    start = post(*offer, *framing, length=None if chunked else len(data))
    for pieces in ([start + wire], [start, wire], [start[:80], start[80:] + wire[:10], wire[10:]]):
        heard = await exchange(port, *pieces)
        assert (heard.status, heard.body) == (200, OK_BODY)
    assert [call.body for call, _ in client.calls] == [data] * 3


async def test_a_connection_that_declined_an_upgrade_goes_on(port: int, client: FakeClient) -> None:
    offer = post(b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMA") + BODY
    stream = await anyio.connect_tcp("127.0.0.1", port)
    async with stream:
        for _ in range(2):
            for request in (offer, post() + BODY):
                await stream.send(request)
                heard = b""
                while not heard.endswith(OK_BODY):
                    heard += await stream.receive()
                assert heard.startswith(b"HTTP/1.1 200")
    assert [call.body for call, _ in client.calls] == [BODY] * 4


async def test_a_tunnel_is_refused(port: int) -> None:
    heard = await exchange(port, b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (heard.status, code(heard)) == (400, "invalid_http")

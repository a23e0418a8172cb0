"""Requests within requests: what two readers of a connection could cut differently is refused, and the connection ends.

Each attempt carries a second call (`SMUGGLED`) that would be made by a reader which sees it where the attempt hides it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import pytest

from dispatch.ingress import IngressState, create_app
from tests.support.front import OK_BODY, FakeClient, FakeGateway, head, serving

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m","messages":[]}'
SECOND = b'{"model":"smuggled","messages":[]}'
LINE = b"POST /v1/chat/completions HTTP/1.1"


def post(*lines: bytes, line: bytes = LINE, body: bytes = b"") -> bytes:
    return head([line, b"Host: x", *lines]) + body


SMUGGLED = post(b"Content-Length: %d" % len(SECOND), body=SECOND)
INSIDE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"

ATTEMPTS: dict[str, bytes] = {
    # Two lengths
    "length and chunks": post(LENGTH, CHUNKED, body=INSIDE),
    "chunks and length": post(CHUNKED, b"Content-Length: 4", body=INSIDE),
    "chunks and length 0": post(CHUNKED, b"Content-Length: 0", body=INSIDE),
    "two lengths": post(LENGTH, b"Content-Length: 0", body=BODY),
    "two equal lengths": post(LENGTH, LENGTH, body=BODY),
    "a list of lengths": post(LENGTH + b", %d" % len(BODY), body=BODY),
    "a list of two lengths": post(b"Content-Length: 0, %d" % len(BODY), body=BODY),
    "a signed length": post(b"Content-Length: +%d" % len(BODY), body=BODY),
    "a negative length": post(b"Content-Length: -1", body=BODY),
    "a length in hex": post(b"Content-Length: 0x%x" % len(BODY), body=BODY),
    "a length with a separator": post(b"Content-Length: 2_7", body=BODY),
    "a length with a fraction": post(LENGTH + b".0", body=BODY),
    "a length in other digits": post("Content-Length: ٢٧".encode(), body=BODY),
    "an empty length": post(b"Content-Length:", body=BODY),
    "a length beyond every bound": post(b"Content-Length: 99999999999999999999", body=BODY),
    "a length that wraps to the right one": post(b"Content-Length: %d" % (2**64 + len(BODY)), body=BODY),
    "a length and more": post(LENGTH + b" x", body=BODY),
    "a length before a vertical tab": post(LENGTH + b"\x0b", body=BODY),
    # Codings that one reader knows and another does not
    "an unknown coding": post(b"Transfer-Encoding: xchunked", body=INSIDE),
    "identity": post(b"Transfer-Encoding: identity", body=INSIDE),
    "chunked, identity": post(b"Transfer-Encoding: chunked, identity", body=INSIDE),
    "identity, chunked": post(b"Transfer-Encoding: identity, chunked", body=INSIDE),
    "gzip, chunked": post(b"Transfer-Encoding: gzip, chunked", body=INSIDE),
    "chunked twice": post(b"Transfer-Encoding: chunked, chunked", body=INSIDE),
    "two codings": post(CHUNKED, b"Transfer-Encoding: identity", body=INSIDE),
    "two equal codings": post(CHUNKED, CHUNKED, body=INSIDE),
    "an empty coding": post(b"Transfer-Encoding:", body=INSIDE),
    "a coding with a parameter": post(b"Transfer-Encoding: chunked;a=b", body=INSIDE),
    "a quoted coding": post(b'Transfer-Encoding: "chunked"', body=INSIDE),
    "a coding with a comma": post(b"Transfer-Encoding: chunked,", body=INSIDE),
    "a coding behind a vertical tab": post(b"Transfer-Encoding: \x0bchunked", body=INSIDE),
    "a coding with a NUL": post(b"Transfer-Encoding: chunked\x00", body=INSIDE),
    "a coding behind a name with a blank": post(b"Transfer-Encoding : chunked", body=INSIDE),
    "a coding behind a name with a tab": post(b"Transfer-Encoding\t: chunked", body=INSIDE),
    "a coding behind a blank": post(b" Transfer-Encoding: chunked", body=INSIDE),
    "a coding on a folded line": post(b"Transfer-Encoding:\r\n chunked", body=INSIDE),
    "a coding folded into another field": post(b"A: b\r\n\tTransfer-Encoding: chunked", body=INSIDE),
    "chunks in HTTP/1.0": post(CHUNKED, line=LINE.replace(b"1.1", b"1.0"), body=INSIDE),
    # Lines
    "lines that end in LF": post(LENGTH, body=BODY).replace(b"\r\n", b"\n"),
    "a head that ends in LF LF": (post(LENGTH) + BODY).replace(b"\r\n\r\n", b"\n\n"),
    "one line that ends in LF": post(b"A: b\nContent-Length: 0", LENGTH, body=BODY),
    "one line that ends in CR": post(b"A: b\rContent-Length: 0", LENGTH, body=BODY),
    "a line that ends in CR CR LF": post(b"A: b\r\r\nContent-Length: 0", LENGTH, body=BODY),
    "a folded line": post(b"A: b\r\n c", LENGTH, body=BODY),
    "a line without a colon": post(b"Content-Length", LENGTH, body=BODY),
    "a field without a name": post(b": 5", LENGTH, body=BODY),
    "a name with a NUL": post(b"Content-\x00Length: 0", LENGTH, body=BODY),
    "a name with other letters": post(b"Content-Length\xad: 0", LENGTH, body=BODY),
    "a name in quotes": post(b'"Content-Length": 0', LENGTH, body=BODY),
    "a value with a NUL": post(b"A: b\x00c", LENGTH, body=BODY),
    "a value with a DEL": post(b"A: b\x7f", LENGTH, body=BODY),
    # The first line
    "a whole URL": post(LENGTH, line=LINE.replace(b"/v1", b"http://elsewhere/v1"), body=BODY),
    "the URL of a file": post(LENGTH, line=LINE.replace(b"/v1", b"file:///v1"), body=BODY),
    "a tunnel": post(line=b"CONNECT elsewhere:443 HTTP/1.1"),
    "a tunnel to a path": post(line=b"CONNECT /v1/models HTTP/1.1"),
    "no target but a star": post(line=b"OPTIONS * HTTP/1.1"),
    "a target with a blank": post(LENGTH, line=LINE.replace(b"/chat", b"/ chat"), body=BODY),
    "a target with a NUL": post(LENGTH, line=LINE.replace(b"/chat", b"/\x00chat"), body=BODY),
    "a target with a tab": post(LENGTH, line=LINE.replace(b"/chat", b"/\tchat"), body=BODY),
    "a target with raw bytes": post(LENGTH, line=LINE.replace(b"/chat", b"/\xc3\xa9chat"), body=BODY),
    "two blanks": post(LENGTH, line=LINE.replace(b" ", b"  "), body=BODY),
    "tabs between": post(LENGTH, line=LINE.replace(b" ", b"\t"), body=BODY),
    "a blank before": post(LENGTH, line=b" " + LINE, body=BODY),
    "a method in small letters": post(LENGTH, line=LINE.replace(b"POST", b"post"), body=BODY),
    "an unknown method": post(LENGTH, line=LINE.replace(b"POST", b"SMUGGLE"), body=BODY),
    "no version": post(LENGTH, line=b"POST /v1/chat/completions", body=BODY),
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/1.2": post(LENGTH, line=LINE.replace(b"1.1", b"1.2"), body=BODY),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version in small letters": post(LENGTH, line=LINE.replace(b"HTTP", b"http"), body=BODY),
    "two hosts": post(b"Host: y", LENGTH, body=BODY),
    "no host": head([LINE, LENGTH]) + BODY,
    # Chunks
    "a chunk with an extension": post(CHUNKED, body=INSIDE.replace(b"\r\n", b";a=b\r\n", 1)),
    "a chunk with an empty extension": post(CHUNKED, body=INSIDE.replace(b"\r\n", b";\r\n", 1)),
    "a chunk with a LF in its extension": post(CHUNKED, body=INSIDE.replace(b"\r\n", b";\nxx\r\n", 1)),
    "a last chunk with an extension": post(CHUNKED, body=INSIDE.replace(b"0\r\n", b"0;a\r\n")),
    "a huge chunk": post(CHUNKED, body=b"FFFFFFFFFFFFFFFF\r\n" + BODY),
    "a chunk whose size wraps": post(CHUNKED, body=b"1%016x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a chunk with many zeros": post(CHUNKED, body=b"0" * 500 + INSIDE),
    "a chunk with a sign": post(CHUNKED, body=b"+" + INSIDE),
    "a negative chunk": post(CHUNKED, body=b"-" + INSIDE),
    "a chunk with 0x": post(CHUNKED, body=b"0x" + INSIDE),
    "a chunk with a blank before": post(CHUNKED, body=b" " + INSIDE),
    "a chunk with a blank behind": post(CHUNKED, body=INSIDE.replace(b"\r\n", b" \r\n", 1)),
    "a chunk with a separator": post(CHUNKED, body=b"1_b\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk without a size": post(CHUNKED, body=b"\r\n" + INSIDE),
    "a chunk size that ends in LF": post(CHUNKED, body=INSIDE.replace(b"\r\n", b"\n", 1)),
    "a chunk size that ends in CR": post(CHUNKED, body=INSIDE.replace(b"\r\n", b"\r", 1)),
    "a chunk that is longer than it says": post(CHUNKED, body=b"5\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk that ends in LF": post(CHUNKED, body=INSIDE.replace(BODY + b"\r\n", BODY + b"\n")),
    "chunks that end in LF LF": post(CHUNKED, body=INSIDE.replace(b"0\r\n\r\n", b"0\r\n\n")),
    "trailers": post(CHUNKED, body=INSIDE[:-2] + b"Authorization: Bearer x\r\n\r\n"),
    "a trailer that is a length": post(CHUNKED, body=INSIDE[:-2] + b"Content-Length: 5\r\n\r\n"),
}


@pytest.fixture
async def port(client: FakeClient) -> AsyncIterator[int]:
    async with serving(create_app(IngressState(client=client, gateway=FakeGateway()))) as opened:
        yield opened


async def everything(port: int, *pieces: bytes) -> bytes:
    """Send pieces and return all that comes until the server closes the connection."""
    heard = b""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        with anyio.fail_after(10):
            try:
                for piece in pieces:
                    await stream.send(piece)
                while True:
                    heard += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return heard


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
async def test_it_is_refused_and_what_it_hides_is_never_made(port: int, client: FakeClient, attempt: bytes) -> None:
    whole = attempt + SMUGGLED
    middle = len(attempt) // 2
    for pieces in ([whole], [attempt, SMUGGLED], [whole[:middle], whole[middle:]]):
        heard = await everything(port, *pieces)
        top, _, body = heard.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 400 "), heard
        assert heard.count(b"HTTP/1.1 ") == 1
        assert b'"code":"invalid_http"' in body
        assert b"\r\nconnection: close" in top
        assert b"\r\nx-dispatch-reason: rejected-invalid_http\r\n" in top
    assert not client.calls


async def test_what_is_hidden_behind_a_good_call_is_answered_by_an_end_alone(port: int, client: FakeClient) -> None:
    good = post(LENGTH, body=BODY)
    for attempt in ATTEMPTS.values():
        heard = await everything(port, good + attempt + SMUGGLED)
        assert heard.count(b"HTTP/1.1 ") == 1, attempt
        assert heard.endswith(OK_BODY)
    assert {call.model for call, _ in client.calls} == {"m"}


@pytest.mark.parametrize("attempt", [CHUNKED, b"Transfer-Encoding:chunked", b"transfer-encoding: \t Chunked"])
async def test_plain_chunks_are_taken_and_what_follows_is_a_request_of_its_own(
    port: int, client: FakeClient, attempt: bytes
) -> None:
    heard = await everything(port, post(attempt, body=INSIDE) + post(b"connection: close", LENGTH, body=BODY))
    assert heard.count(b"HTTP/1.1 200 ") == 2
    assert [call.body for call, _ in client.calls] == [BODY, BODY]


async def test_nothing_is_read_behind_a_request_that_closes_the_connection(port: int, client: FakeClient) -> None:
    for closing in (post(LENGTH, b"Connection: close", body=BODY), post(LENGTH, line=LINE[:-1] + b"0", body=BODY)):
        heard = await everything(port, closing + SMUGGLED)
        assert heard.count(b"HTTP/1.1 ") == 1
        assert heard.endswith(OK_BODY)
    assert {call.model for call, _ in client.calls} == {"m"}


async def test_a_client_cannot_have_more_than_some_requests_unanswered(port: int, client: FakeClient) -> None:
    started = time.monotonic()
    heard = await everything(port, post(LENGTH, body=BODY) * 1_000)
    assert heard.count(b"HTTP/1.1 200 ") < 50
    assert heard.endswith(OK_BODY)
    assert len(client.calls) == heard.count(b"HTTP/1.1 200 ")
    assert time.monotonic() - started < 10

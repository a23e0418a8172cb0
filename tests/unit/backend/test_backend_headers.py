"""Which headers of an endpoint's answer travel on."""

from __future__ import annotations

import pytest

from dispatch.backend.headers import decode_fields, first, is_json_type, relayed


def test_only_listed_headers_travel() -> None:
    fields = decode_fields(
        [
            (b"Content-Type", b"application/json"),
            (b"X-Request-Id", b"req_1"),
            (b"OpenAI-Processing-Ms", b"812"),
            (b"x-ratelimit-remaining-requests", b"59"),
            (b"Set-Cookie", b"lb=7"),
            (b"Server", b"uvicorn"),
            (b"Content-Length", b"9"),
            (b"Content-Encoding", b"gzip"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Keep-Alive", b"timeout=5"),
            (b"Location", b"http://elsewhere/"),
            (b"WWW-Authenticate", b"Bearer"),
            (b"Alt-Svc", b"h3"),
            (b"Access-Control-Allow-Origin", b"*"),
            (b"X-Should-Retry", b"true"),
            (b"X-Dispatch-Reason", b"made-up"),
            (b"Retry-After", b"soon"),
        ]
    )
    assert relayed(fields) == (
        ("x-backend-request-id", "req_1"),
        ("openai-processing-ms", "812"),
        ("x-ratelimit-remaining-requests", "59"),
    )


def test_what_connection_names_stays_here() -> None:
    fields = decode_fields(
        [
            (b"connection", b"keep-alive, X-Ratelimit-Hop"),
            (b"connection", b"openai-hop"),
            (b"x-ratelimit-hop", b"1"),
            (b"openai-hop", b"1"),
            (b"openai-version", b"2020"),
        ]
    )
    assert relayed(fields) == (("openai-version", "2020"),)


@pytest.mark.parametrize("value", [b"caf\xe9", b"\x00", b"a\tb", b"x" * 1_025, b"a\x7f"])
def test_values_that_are_not_plain_text_are_left_out(value: bytes) -> None:
    assert relayed(decode_fields([(b"openai-model", value)])) == ()


def test_the_number_of_headers_is_bounded() -> None:
    assert len(relayed(decode_fields([(b"openai-x%d" % n, b"1") for n in range(100)]))) == 32


def test_first_and_json_types() -> None:
    assert first((("a", "1"), ("b", "2"), ("b", "3")), "b") == "2"
    assert first((), "b") == ""
    assert is_json_type("Application/JSON; charset=utf-8")
    assert is_json_type("application/problem+json")
    assert not is_json_type("text/event-stream")
    assert not is_json_type("")

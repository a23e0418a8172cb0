"""The event-stream format, read from bytes."""

from __future__ import annotations

import pytest

from dispatch.backend.events import EventParser
from tests.support.corpus import tool

JSON = b'{"id":"c1","t":"a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d\x7f"}'


def read(*pieces: bytes, flush: bool = True) -> list[tuple[bytes, bytes]]:
    """Feed the pieces and return the events as pairs."""
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    last = parser.close() if flush else None
    return [(event.name, event.data) for event in (*events, *([] if last is None else [last]))]


def cuts(body: bytes) -> list[list[bytes]]:
    """Return the body in one piece, in two at every offset, and byte by byte."""
    return [
        [body],
        [body[at : at + 1] for at in range(len(body))],
        *([body[:at], body[at:]] for at in range(len(body) + 1)),
    ]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\r\rdata: b\r\r", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\r\n\ndata: b\n\r\n", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\n\rdata: b\r\n\r", [(b"", b"a"), (b"", b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [(b"", b"a")]),
        (b"\xef\xbb\xbf\ndata: a\n\n", [(b"", b"a")]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [(b"", b"a")]),
        (b"data:a\n\ndata:  b\n\n", [(b"", b"a"), (b"", b" b")]),
        (b"data: " + JSON + b"\n\n", [(b"", JSON)]),
        (b"data: a\x0bb\x0cc\x1cd\x85e\n\n", [(b"", b"a\x0bb\x0cc\x1cd\x85e")]),
        (b"data: a\ndata: b\ndata\ndata: c\n\n", [(b"", b"a\nb\n\nc")]),
        (b": x\ndata: a\n: data: y\ndata: b\n:\n\n", [(b"", b"a\nb")]),
        (b"id: 7\nretry: 9\nevent: e\ndata: a\n\n: ping\n\ndata: b\n\n", [(b"e", b"a"), (b"", b"b")]),
        (b"event: lost\n\ndata: a\n\n", [(b"", b"a")]),
        (b"event: a\nevent:b\ndata: x\n\n", [(b"b", b"x")]),
        (b"retry: 1\n\nid\n\ndata:\n\ndata: \n\ndata:  \n\ndata\ndata\n\ndata: a\n\n", [(b"", b"a")]),
        (b"\n\n\n\r\rdata: a\n\n\n", [(b"", b"a")]),
        (b"data: a\n\ndata: b", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\n\ndata: b\n", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\n\nevent: e\n", [(b"", b"a")]),
        (b"", []),
        (b"\n", []),
        (b"Data: a\ndata : b\n\n", []),
    ],
)
def test_events_are_the_same_wherever_the_bytes_are_cut(body: bytes, events: list[tuple[bytes, bytes]]) -> None:
    for pieces in cuts(body):
        assert read(*pieces) == events, pieces
    reference = [((name or "").encode(), data) for name, data in tool("sse_ref").events(body) if data.strip()]
    assert reference == events


def test_an_event_comes_out_with_the_byte_that_completes_it() -> None:
    for end in (b"\n\n", b"\r\r", b"\r\n\r"):
        parser = EventParser()
        assert parser.feed(b"data: a" + end[:-1]) == []
        [event] = parser.feed(end[-1:])
        assert event.data == b"a"
        # The half of a CR LF that is still to come ends nothing.
        assert parser.feed(b"\n" if end[-1:] == b"\r" else b"") == []
        assert parser.feed(b"data: b\n") == []


def test_an_event_that_was_cut_off_is_given_at_the_end_alone() -> None:
    assert read(b"data: a\n\ndata: {", flush=False) == [(b"", b"a")]
    assert read(b"data: a\n\nevent: e\ndata: {\ndata: }") == [(b"", b"a"), (b"e", b"{\n}")]


def test_what_is_held_is_one_event_and_can_be_bounded() -> None:
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 100)
    assert parser.held_bytes == 106
    parser.feed(b"\n" + b"data:\n" * 100)
    assert parser.held_bytes == 606
    parser.feed(b"\n")
    assert parser.held_bytes == 0
    parser.feed(b":" + b"x" * 50)
    assert parser.held_bytes == 51
    parser.feed(b"\n:" + b"y" * 9)
    assert parser.held_bytes == 10
    parser.feed(b"\nevent: " + b"n" * 93 + b"\n")
    assert parser.held_bytes == 100


@pytest.mark.parametrize(
    ("body", "strange"),
    [
        (b"upstream connect error", True),
        (b"upstream connect error\n", True),
        (b"oops: 7\n\n", True),
        (b"da", False),
        (b"data", False),
        (b"\xef\xbb\xbfda", False),
        (b"data: x\n\nret", False),
        (b": only comments\n", False),
        (b"id: 1\nretry: 2\nevent: e\n\n", False),
        (b"", False),
    ],
)
def test_bytes_that_are_no_event_stream_are_noticed(body: bytes, strange: bool) -> None:
    parser = EventParser()
    parser.feed(body)
    parser.close()
    assert parser.strange is strange

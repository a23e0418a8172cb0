"""Where requests end is read in one way only, however their bytes are cut; everything else is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch.ingress.framing import Framing, Refused

BODY = b'{"model":"m"}'
PLAIN = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n" + BODY
BARE = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKS = b"5\r\n{\r\n\r\n\r\n0000000A\r\n0123456789\r\n0\r\n\r\n"
CHUNKED = b"POST /v1/x HTTP/1.1\r\nhost:\r\ntransfer-encoding: Chunked\r\n\r\n" + CHUNKS
OFFER = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings, te\r\n"
    b"HTTP2-Settings: AAMA\r\n\r\n"
)
DECLINED = b"GET / HTTP/1.1\r\nHost: a\r\nconnection: te\r\n\r\n"


def cut(*pieces: bytes) -> tuple[bytes, bool]:
    """Return all that the parser gets of these pieces, and whether a body is under way then."""
    framing = Framing(2_000, 20)
    taken = b"".join(part for piece in pieces for part in framing.cut(piece))
    return taken, framing.in_body


@given(st.lists(st.sampled_from([PLAIN, BARE, CHUNKED, b"\r\n"]), max_size=6), st.data())
def test_requests_pass_whole_and_unchanged_however_they_are_cut(requests: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(requests) + BARE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    taken, in_body = cut(*pieces)
    assert taken.replace(b"\r\n", b"") == stream.replace(b"\r\n", b"")  # empty lines between requests may go
    assert not in_body


@given(st.sampled_from([PLAIN, CHUNKED]), st.data())
def test_a_body_is_under_way_from_its_head_to_its_last_byte(request: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(request)))
    head = request.index(b"\r\n\r\n") + 4
    assert cut(request[:end])[1] is (head <= end < len(request))


def test_an_offer_of_another_protocol_is_taken_out() -> None:
    assert cut(OFFER) == (DECLINED, False)


def test_nothing_is_read_behind_the_last_request() -> None:
    framing = Framing(2_000, 20)
    for piece in framing.cut(PLAIN + BARE):
        assert piece in (PLAIN[: -len(BODY)], BODY)
        framing.last = True
    assert list(framing.cut(BARE)) == []


@given(st.binary(max_size=300))
def test_no_bytes_make_anything_but_a_refusal(data: bytes) -> None:
    for stream in (data, PLAIN + data, CHUNKED[:60] + data, PLAIN[:30] + data + PLAIN[30:]):
        with suppress(Refused):
            cut(stream)


@pytest.mark.parametrize("size", [1, 7, 2_100])
@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\r\nA: " + b"x" * 2_000, b"\r\n" * 1_100, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 21 + b"\r\n"],
    ids=["large", "blank", "fields"],
)
def test_a_head_is_bounded_in_size_and_fields(head: bytes, size: int) -> None:
    with pytest.raises(Refused) as refusal:
        cut(*(head[at : at + size] for at in range(0, len(head), size)))
    assert refusal.value.problem.meaning.status == 431


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r\nA: b\n", b"GET / HTTP/1.1\r\nA: b\rc", b"GET / HTTP/1.1\r\nA: \x00"],
)
def test_what_can_become_no_head_is_refused_before_it_ends(head: bytes) -> None:
    for pieces in ([head], [head[at : at + 1] for at in range(len(head))]):
        with pytest.raises(Refused):
            cut(*pieces)

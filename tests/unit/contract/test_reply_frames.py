"""Reply frames: the header line that Lua writes, and what is made of it."""

from __future__ import annotations

import pytest

from dispatch.contract import Attempt
from dispatch.contract.chunk import Chunk
from dispatch.errors import ContractError
from dispatch.fabric.frames import ChunkFrame, chunk_line, decode_frame, read_frame

TRIES = "1,1000,1500,503,endpoint_overloaded,g-1,e.1;2,2000,2100,,lost,g-2,e.1"


def raw(tries: str | None, attempt: int = 3) -> bytes:
    cells = ["1", "7", "terminal", "r", "succeeded", "p", str(attempt), "2", "3", "0"]
    return "|".join(cells if tries is None else [*cells, tries]).encode() + b"\n{}\nbody"


def test_earlier_attempts_are_told_in_order() -> None:
    reply = decode_frame(raw(TRIES)).reply
    assert (reply.attempt, reply.body) == (3, b"body")
    assert reply.tries == (
        Attempt(1, 1000, 1500, 503, "endpoint_overloaded", "g-1", "e.1"),
        Attempt(2, 2000, 2100, None, "lost", "g-2", "e.1"),
    )
    assert not reply.replayed


@pytest.mark.parametrize("tries", ["", None])
def test_a_first_attempt_has_none_before_it(tries: str | None) -> None:
    assert decode_frame(raw(tries, attempt=1)).reply.tries == ()


@pytest.mark.parametrize("tries", ["x", "1,2,3,4,5,6", "1,2,3,4,5,6,7,8", "a,2,3,,w,g,e", "1,2,3,x,w,g,e", "|"])
def test_damaged_ones_are_an_error_of_the_contract(tries: str) -> None:
    with pytest.raises(ContractError):
        decode_frame(raw(tries))


@pytest.mark.parametrize("event", ["", "response.created", "vendor|x", "|", "a%7Cb|%", "%25", "é"])
def test_a_chunk_comes_back_with_its_name_whatever_that_is(event: str) -> None:
    lines = [chunk_line(event, b'{"a":"x|y%7C"}'), chunk_line("", b"|")]
    frame = read_frame(b"1|7|chunks|r|0\n" + b"\n".join(lines))
    assert isinstance(frame, ChunkFrame)
    assert frame.chunks() == [Chunk(b'{"a":"x|y%7C"}', event), Chunk(b"|", "")]

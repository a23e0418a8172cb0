"""Chunks of a stream: what they say, and the frames they travel in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatch.contract import Chunk
from dispatch.errors import ContractError, ContractMismatch
from dispatch.fabric.frames import ChunkFrame, Frame, read_frame


def chunk(**document: Any) -> Chunk:
    return Chunk(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"choices": [{"index": 0, "delta": {"content": "a"}}]}, "a"),
        ({"choices": [{"index": 1, "delta": {"content": "b"}}, {"index": 0, "delta": {"content": "a"}}]}, "a"),
        ({"choices": [{"index": 1, "delta": {"content": "b"}}]}, ""),
        ({"choices": [{"delta": {"role": "assistant"}}]}, ""),
        ({"choices": [{"delta": {"content": None}}]}, ""),
        ({"choices": [{"delta": None, "text": None}]}, ""),
        ({"choices": [{"index": 0, "text": "return"}]}, "return"),
        ({"choices": [], "usage": {}}, ""),
        ({"choices": None}, ""),
        ({"choices": {"0": 1}}, ""),
        ({"choices": ["x"]}, ""),
        ({"type": "response.output_text.delta", "delta": "hi"}, "hi"),
        ({"type": "response.completed", "response": {}}, ""),
        ({}, ""),
    ],
)
def test_the_text_of_a_chunk(document: dict[str, Any], text: str) -> None:
    assert chunk(**document).text == text


def frame(payload: bytes, head: bytes = b"1|7|chunks|r|3") -> ChunkFrame:
    found = read_frame(head + b"\n" + payload)
    assert isinstance(found, ChunkFrame)
    return found


def test_a_frame_has_its_chunks_in_order_byte_for_byte() -> None:
    payload = '|{"a":"|\u2028"}\nresponse.created|{"type":"x"}\n|{}'.encode()
    found = frame(payload)
    assert (found.sequence, found.request_id, found.number, found.count) == (7, "r", 3, 3)
    assert found.chunks() == [
        Chunk('{"a":"|\u2028"}'.encode()), Chunk(b'{"type":"x"}', "response.created"), Chunk(b"{}")
    ]  # fmt: skip
    rest = found.without(2)
    assert (rest.number, rest.count, rest.chunks()) == (5, 1, [Chunk(b"{}")])


def test_other_frames_are_read_as_before() -> None:
    terminal = b"1|7|terminal|r|succeeded|p|1|2|3|0|\n{}\nbody"
    found = read_frame(terminal)
    assert isinstance(found, Frame)
    assert found.reply.body == b"body"


@pytest.mark.parametrize("head", [b"1|x|chunks|r|3", b"1|7|chunks|r|x", b"1|7|chunks|\xff|3", b"1|7|chunks|r"])
def test_damaged_frames_are_an_error_of_the_contract(head: bytes) -> None:
    with pytest.raises(ContractError):
        read_frame(head + b"\n|{}")
    with pytest.raises(ContractError):
        frame(b"no bar").chunks()


def test_chunks_of_another_contract_are_told_apart() -> None:
    with pytest.raises(ContractMismatch):
        read_frame(b"2|7|chunks|r|3\n|{}")

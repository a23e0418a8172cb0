"""Streams through a gateway: chunks in the producer's list as they come, the end after them, and when nobody reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import redis

from dispatch.contract import CONTRACT_VERSION, Operation, RequestEnvelope
from dispatch.fabric import functions
from dispatch.fabric.frames import decode_frame
from dispatch.fabric.schema import key
from tests.integration.test_gateway import gateway_on
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import eye
from tests.support.stub import Fin, Hold, Pause, Script, StubBackend, Write
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}).encode()


def event(data: bytes) -> Write:
    return Write(b"data: " + data + b"\n\n")


class Line:
    """A producer by hand and a gateway in front of a scripted backend."""

    def __init__(self, url: str, stub: StubBackend, **group: Any) -> None:
        document = default_document() | group
        document["endpoints"][0]["url"] = stub.url
        document["pools"][0] |= {"delivery": "at_least_once", "max_attempts": 3}
        self.url, self.group = url, unique_group()
        configure(url, self.group, document)
        self.hand = ByHand(url, self.group)
        self.eye: redis.Redis = eye(url)

    def submit(self) -> str:
        envelope = RequestEnvelope(
            contract=CONTRACT_VERSION, request_id="s", producer_id="p", pool_id="interactive",
            operation=Operation.CHAT_COMPLETIONS, model="m", stream=True,
        )  # fmt: skip
        body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
        [request_id] = self.hand.submit(
            "interactive", envelope=msgspec.json.encode(envelope), body=body, body_bytes=len(body), request_id="s"
        )
        return request_id

    def frames(self) -> list[bytes]:
        found: list[bytes] = self.eye.lrange(key(self.group, "replies", producer="p"), 0, -1)  # type: ignore[assignment] # the sync client's
        return found

    def chunks(self) -> list[bytes]:
        """Data of all chunks that have come, in order."""
        payloads = [frame.partition(b"\n")[2] for frame in self.frames() if frame.split(b"|")[2] == b"chunks"]
        return [line.partition(b"|")[2] for payload in payloads for line in payload.split(b"\n")]

    async def ended(self, within_s: float = 10) -> dict[str, Any]:
        with anyio.fail_after(within_s):
            while True:
                rows = self.hand.section("endings")["rows"]
                if rows:
                    return dict(rows[0])
                await anyio.sleep(0.02)

    async def until_chunks(self, count: int, within_s: float = 5) -> None:
        with anyio.fail_after(within_s):
            while True:
                if len(self.chunks()) >= count:
                    return
                await anyio.sleep(0.02)


@asynccontextmanager
async def line_to(valkey: ValkeyProcess, stub: StubBackend, **group: Any) -> AsyncIterator[Line]:
    line = Line(valkey.url, stub, **group)
    async with gateway_on(valkey.url, line.group):
        yield line


async def test_chunks_come_as_they_are_made_and_the_end_after_them(valkey: ValkeyProcess) -> None:
    texts = [chunk("a"), chunk("b"), chunk("\u2028"), chunk("", "stop")]
    script = Script((Write(HEAD), event(texts[0]), Pause(0.3), *map(event, texts[1:]), event(b"[DONE]"), Fin()))
    async with StubBackend(script) as stub, line_to(valkey, stub) as line:
        line.submit()
        await line.until_chunks(1)
        assert len(line.frames()) == 1  # the first is there while the rest is being made
        assert (await line.ended())["ending"] == "succeeded"
    assert line.chunks() == texts
    reply = decode_frame(line.frames()[-1]).reply
    assert (reply.ending, reply.head.finish_reasons, reply.body) == ("succeeded", ("stop",), b"")


async def test_a_stream_that_breaks_off_is_told_after_its_chunks_and_not_run_again(valkey: ValkeyProcess) -> None:
    script = Script((Write(HEAD), event(chunk("a")), Fin()))
    async with StubBackend(script) as stub, line_to(valkey, stub) as line:
        line.submit()
        ending = await line.ended()
    assert (ending["ending"], ending["error_type"]) == ("failed", "endpoint_disconnected")
    assert len(stub.requests) == 1
    assert line.chunks() == [chunk("a")]
    assert decode_frame(line.frames()[-1]).reply.ending == "failed"


@pytest.mark.parametrize(("how", "ending"), [("cancel", "cancelled"), ("gone", "producer_gone"), ("slow", "failed")])
async def test_the_endpoint_is_stopped_when_nobody_reads(valkey: ValkeyProcess, how: str, ending: str) -> None:
    more = [step for _ in range(400) for step in (event(chunk("x" * 200)), Pause(0.02))]
    script = Script((Write(HEAD), event(chunk("a")), *more, Hold()))
    backlog = 4096 if how == "slow" else 1 << 20
    async with StubBackend(script) as stub, line_to(valkey, stub, max_stream_backlog_bytes=backlog) as line:
        line.submit()
        await line.until_chunks(1)
        if how == "cancel":
            line.hand.run(functions.request_cancel("s", actor="test"))
        elif how == "gone":
            line.eye.delete(key(line.group, "alive", producer="p"))
        found = await line.ended()
        assert found["ending"] == ending
        await stub.until(lambda stub: stub.open_connections == 0, 1)
    assert (found["error_type"] == "slow_consumer") == (how == "slow")

"""How a stream is written: framing, ends, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatch.contract import Chunk, Operation, Reply, ReplyError, ReplyHead
from dispatch.contract.answers import INTERNAL
from dispatch.contract.event_stream import DONE, EventStream

CHAT, RESPONSES = Operation.CHAT_COMPLETIONS, Operation.RESPONSES


def ended(ending: str = "failed", body: bytes = b"", **error: Any) -> Reply:
    told = ReplyError(**{"type": "endpoint_disconnected", "message": "it broke off", "source": "endpoint", **error})
    head = ReplyHead(status=200, error=None if ending == "succeeded" else told)
    return Reply(request_id="r", pool_id="p", ending=ending, head=head, body=body, queue_ms=1, execution_ms=2)


def event(raw: bytes) -> dict[str, Any]:
    name, _, data = raw.rpartition(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n\n") == 1
    assert name in (b"", b"event: error\n")
    found: dict[str, Any] = json.loads(data)
    assert set(found["error"]) == {"message", "type", "param", "code"}
    return found


def test_chunks_are_events_byte_for_byte() -> None:
    chunks = [Chunk('{"a" :"\u2028\x85"}'.encode()), Chunk(b"{ }", "ignored")]
    assert EventStream(CHAT).chunks(chunks) == 'data: {"a" :"\u2028\x85"}\n\ndata: { }\n\n'.encode()


def test_responses_keep_their_event_names() -> None:
    chunks = [Chunk(b"{}", "response.created"), Chunk(b"{}")]
    assert EventStream(RESPONSES).chunks(chunks) == b"event: response.created\ndata: {}\n\ndata: {}\n\n"


def test_a_success_is_done_and_a_response_says_so_itself() -> None:
    assert EventStream(CHAT).end(ended("succeeded")) == DONE
    assert EventStream(Operation.COMPLETIONS).end(ended("succeeded")) == DONE
    assert EventStream(RESPONSES).end(ended("succeeded")) == b""


def test_a_failure_is_an_event_of_its_own_and_not_done() -> None:
    found = event(EventStream(CHAT).end(ended()))
    assert found == {
        "error": {"message": "it broke off", "type": "server_error", "param": None, "code": "endpoint_disconnected"}
    }


def test_what_the_endpoint_said_is_told_as_it_said_it() -> None:
    body = b'{"error": {"message": "worker\\nlost", "type": "oops", "code": 7, "more": 1}}'
    found = event(EventStream(CHAT).end(ended(body=body)))
    assert found == {"error": {"message": "worker\nlost", "type": "oops", "param": None, "code": 7}}


def test_other_endings_are_told_as_well() -> None:
    found = event(EventStream(CHAT).end(ended("expired", type="deadline_exceeded", message="too late")))
    assert (found["error"]["message"], found["error"]["code"]) == ("too late", "deadline_exceeded")
    found = event(EventStream(CHAT).broken(INTERNAL))
    assert found["error"]["type"] == "server_error"
    assert event(EventStream(CHAT).end(ended(body=b"[]")))["error"]["message"]


def test_an_error_of_a_response_has_a_name_and_a_type() -> None:
    raw = EventStream(RESPONSES).end(ended())
    assert raw.startswith(b"event: error\n")
    found = event(raw)
    assert (found["type"], found["message"], found["code"]) == ("error", "it broke off", "endpoint_disconnected")


@pytest.mark.parametrize("name", ["response.failed", "error"])
def test_an_error_that_the_last_event_told_is_not_told_twice(name: str) -> None:
    events = EventStream(RESPONSES)
    events.chunks([Chunk(b"{}", "response.created"), Chunk(b"{}", name)])
    assert events.end(ended()) == b""


def test_the_head_of_a_stream() -> None:
    answer = EventStream(CHAT).head("interactive", 12)
    assert answer.status == 200
    assert dict(answer.fields) == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache, no-transform",
        "x-accel-buffering": "no",
        "x-dispatch-pool": "interactive",
        "x-dispatch-queue-ms": "12",
    }
    assert "x-dispatch-queue-ms" not in dict(EventStream(CHAT).head("p", None).fields)

"""A backend that was asked for a stream and sent something whole: turned into the stream that says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from dispatch.backend.execution import ErrorType
from dispatch.contract import Operation, Usage
from tests.support.calls import COMPLETION
from tests.support.corpus import tool
from tests.support.streams import CHAT, RESPONSE, CannedTransport, Streamed, call_of, read_bytes, read_canned

pytestmark = pytest.mark.anyio

WITH_USAGE = call_of(Operation.CHAT_COMPLETIONS, stream_options={"include_usage": True})
USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 1},
    "total_tokens": 5,
}
TOOL_CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"q": "caf\\u00e9"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
]


def chat(*choices: dict[str, Any], **members: Any) -> bytes:
    base = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "system_fingerprint": "f"}
    return json.dumps(
        {
            **base,
            "choices": choices,
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            **members,
        }
    ).encode()


def choice(index: int, finish_reason: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", **message},
        "logprobs": None,
        "finish_reason": finish_reason,
    }


def said(streamed: Streamed) -> dict[str, Any]:
    return tool("sse_ref").collect(streamed.frames)["choices"]


async def test_a_whole_completion_becomes_chunks() -> None:
    body = chat(choice(0, content="hi \u2028 there", refusal=None), choice(1, "length", content="yo"))
    streamed = await read_bytes(body)
    chunks = [ChatCompletionChunk.model_validate_json(payload) for payload in streamed.data]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks} == {
        ("c1", 1, "m", "f")
    }
    assert said(streamed) == {
        "0": {"text": "hi \u2028 there", "finish_reason": "stop"},
        "1": {"text": "yo", "finish_reason": "length"},
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in chunks)
    execution = streamed.execution
    assert (execution.outcome, execution.verdict, execution.body) == ("succeeded", "good", b"")
    assert (execution.chunk_count, execution.head.finish_reasons) == (4, ("stop", "length"))
    assert (execution.head.usage, execution.head.response_id) == (Usage(input_tokens=3, output_tokens=2), "c1")
    assert "content-type" not in dict(execution.head.headers)


async def test_usage_follows_where_it_was_asked_for() -> None:
    streamed = await read_bytes(chat(choice(0, content="x")), WITH_USAGE)
    last = ChatCompletionChunk.model_validate_json(streamed.data[-1])
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2
    assert streamed.execution.chunk_count == 3


async def test_tool_calls_get_their_place() -> None:
    streamed = await read_bytes(chat(choice(0, "tool_calls", content=None, tool_calls=TOOL_CALLS)))
    [first, last] = [ChatCompletionChunk.model_validate_json(payload) for payload in streamed.data]
    calls = first.choices[0].delta.tool_calls
    assert calls is not None
    assert [(call.index, call.id, call.function and call.function.name) for call in calls] == [
        (0, "call_1", "find"),
        (1, "call_2", "look"),
    ]
    assert last.choices[0].finish_reason == "tool_calls"


async def test_values_travel_as_they_were_written_in_one_line() -> None:
    message = b'{"content": "a",\n\t"y":\n 1.0}'
    choices = b'[\r\n {"index": 0, "message":\n %b,\n "finish_reason": "stop"}\n]' % message
    body = b'\n {"id": "c1", "x": 1e400,\r\n "choices": %b}\n' % choices
    streamed = await read_bytes(body)
    assert all(b"\n" not in payload and b"\r" not in payload for payload in streamed.data)
    assert all(b"1e400" in payload for payload in streamed.data)
    assert b"1.0" in streamed.data[0]
    assert said(streamed) == {"0": {"text": "a", "finish_reason": "stop"}}


async def test_a_whole_text_completion_becomes_chunks() -> None:
    choices = [{"index": 0, "text": "def", "logprobs": None, "finish_reason": "stop"}]
    body = json.dumps({"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": choices}).encode()
    streamed = await read_bytes(body, call_of(Operation.COMPLETIONS))
    assert Completion.model_validate_json(streamed.data[1]).choices[0].finish_reason == "stop"
    assert said(streamed) == {"0": {"text": "def", "finish_reason": "stop"}}
    assert json.loads(streamed.data[0])["choices"][0] == {
        "index": 0,
        "text": "def",
        "logprobs": None,
        "finish_reason": None,
    }


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_a_whole_response_becomes_typed_events(status: str) -> None:
    text = {"type": "output_text", "text": "The box.", "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    call = {
        "id": "fc_1",
        "type": "function_call",
        "call_id": "c",
        "name": "find",
        "arguments": "{}",
        "status": "completed",
    }
    body = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": status,
        "output": [message, call],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": USAGE,
    }
    streamed = await read_bytes(json.dumps(body, indent=1).encode(), RESPONSE)
    events: list[Any] = [TypeAdapter(ResponseStreamEvent).validate_json(payload) for payload in streamed.data]
    assert [payload.event for payload in streamed.payloads] == [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        status,
    ]
    assert events[3].delta == "The box."
    assert json.loads(streamed.data[-1])["response"] == body
    assert (streamed.execution.outcome, streamed.execution.chunk_count) == ("succeeded", 10)
    assert streamed.execution.head.usage == Usage(
        input_tokens=3, output_tokens=2, cached_input_tokens=0, reasoning_output_tokens=1
    )


@pytest.mark.parametrize("label", ["application/json", "text/event-stream", "text/plain", ""])
@pytest.mark.parametrize("lead", [b"", b"\xef\xbb\xbf", b" \n\r\n\t"])
async def test_the_bytes_decide_not_the_label(label: str, lead: bytes) -> None:
    headers = {"content-type": label} if label else {}
    for pieces in ([lead + COMPLETION], [bytes([byte]) for byte in lead + COMPLETION]):
        streamed = await read_canned(CannedTransport(pieces, headers=headers), CHAT)
        assert said(streamed) == {"0": {"text": "hi", "finish_reason": "stop"}}
    events = (
        lead.rstrip(b" \t") + b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    )
    for pieces in ([events], [bytes([byte]) for byte in events]):
        streamed = await read_canned(CannedTransport(pieces, headers=headers), CHAT)
        assert said(streamed) == {"0": {"text": "hi", "finish_reason": "stop"}}


@pytest.mark.parametrize(
    "body",
    [
        b"<!doctype html><title>Busy</title>",
        b"\r\n <html>",
        b"upstream connect error",
        b"upstream connect error\r\n",
        b'{"id":"c1","choices":[',
        b'{"choices":[]}',
        b'{"choices":null}',
        b'{"choices":[7]}',
        b'{"choices":[{"message":7}]}',
        b"{}",
        b'{"output":[]}',
        b'{"a":1}{"b":2}',
        b'{"a":1}\n{"b":2}\n',
        b"[1]",
    ],
)
async def test_what_is_no_answer_of_the_operation_is_a_failure(body: bytes) -> None:
    for streamed in (await read_bytes(body), await read_canned(CannedTransport([body[:3], body[3:]]))):
        assert streamed.payloads == []
        execution = streamed.execution
        assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "failure", False)
        assert streamed.error[0] == ErrorType.UNREADABLE


async def test_an_error_in_a_whole_body_is_judged_as_in_an_execution() -> None:
    streamed = await read_bytes(b'{"object":"error","message":"prompt too long","code":400}')
    assert streamed.payloads == []
    assert (streamed.execution.outcome, streamed.execution.verdict) == ("failed", "neutral")
    assert json.loads(streamed.execution.body)["error"]["message"] == "prompt too long"


async def test_half_a_surrogate_pair_in_a_whole_answer_is_no_failure() -> None:
    body = COMPLETION.replace(b'"hi"', b'"half \\ud83d"')
    streamed = await read_bytes(body)
    assert streamed.execution.outcome == "succeeded"
    assert said(streamed)["0"]["text"] == "half \ufffd"

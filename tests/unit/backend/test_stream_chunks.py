"""What the events of a stream mean, by operation: payloads, facts, completeness, errors."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dispatch.backend.execution import ErrorType
from dispatch.contract import Operation, Usage
from tests.support.streams import CHAT, DONE, RESPONSE, Streamed, call_of, chunk, data, read_bytes

pytestmark = pytest.mark.anyio

A, F = chunk("a"), chunk(None, "stop")
KEYS = {"message", "type", "param", "code"}


def said(streamed: Streamed) -> dict[str, Any]:
    """Return the error that goes to the caller."""
    error = json.loads(streamed.execution.body)["error"]
    assert error.keys() == KEYS
    return error


async def test_payloads_are_the_backends_bytes() -> None:
    odd = b'{ "x":1e400 , "choices" : [ {"index":0,"delta":{"content":"\\ud83d"}} ], "n":1.0, "n":2 }'
    body = data(odd) + data(A) + data(F) + DONE
    streamed = await read_bytes(body)
    assert streamed.data == [odd, A, F]
    assert all(payload.event == "" for payload in streamed.payloads)
    assert (streamed.execution.outcome, streamed.execution.verdict) == ("succeeded", "good")
    assert streamed.execution.body == b""


@pytest.mark.parametrize(
    "done", [b"data: [DONE]\n\n", b"data:[DONE]  \n\n", b"data:   [DONE]\n\n", b"data: [DONE]", b""]
)
async def test_done_may_be_spelled_with_spaces_or_left_out(done: bytes) -> None:
    streamed = await read_bytes(data(A) + data(F) + done)
    assert streamed.data == [A, F]
    assert streamed.execution.outcome == "succeeded"
    assert streamed.execution.head.finish_reasons == ("stop",)


async def test_nothing_after_done_is_passed_on() -> None:
    streamed = await read_bytes(data(A) + data(F) + DONE + data(A) + b"data: garbage\n\n" + data(b'{"error":"late"}'))
    assert streamed.data == [A, F]
    assert streamed.execution.outcome == "succeeded"


async def test_data_over_several_lines_is_one_line_and_the_same_value() -> None:
    lines = [b'{"choices":[{"index":0,', b"", b'"delta":{"content":"a b"},', b'  "finish_reason":"stop"}]}', b""]
    streamed = await read_bytes(b"".join(b"data: %b\n" % line for line in lines) + b"\n")
    [payload] = streamed.data
    assert b"\n" not in payload
    assert payload == payload.strip()
    assert json.loads(payload)["choices"][0]["delta"]["content"] == "a b"
    cut_string = await read_bytes(b'data: {"choices":[{"delta":{"content":"a\ndata: b"}}]}\n\n')
    assert cut_string.error[0] == ErrorType.UNREADABLE


@pytest.mark.parametrize(
    ("events", "outcome", "reasons"),
    [
        (
            [chunk("a"), chunk("b", index=1), chunk(None, "stop"), chunk(None, "length", index=1)],
            "succeeded",
            ("stop", "length"),
        ),
        ([chunk("a"), chunk("b", index=1), chunk(None, "stop")], "failed", ("stop", "")),
        (
            [chunk("b", index=1), chunk("a"), chunk(None, "stop", index=1), chunk(None, "length")],
            "succeeded",
            ("length", "stop"),
        ),
        ([chunk("a", "stop")], "succeeded", ("stop",)),
        ([chunk("a", ""), chunk("b", "")], "failed", ()),
        ([chunk("a"), chunk(None, "stop"), chunk(None)], "succeeded", ("stop",)),
        ([chunk("a"), chunk(None, "stop"), chunk(None, "length")], "succeeded", ("length",)),
        ([b'{"choices":[]}'], "failed", ()),
        ([], "failed", ()),
    ],
)
@pytest.mark.parametrize("end", [DONE, b""])
async def test_a_stream_is_complete_when_every_choice_that_began_is_finished(
    events: list[bytes], outcome: str, reasons: tuple[str, ...], end: bytes
) -> None:
    streamed = await read_bytes(b"".join(map(data, events)) + end)
    execution = streamed.execution
    assert streamed.data == events
    assert (execution.outcome, execution.head.finish_reasons) == (outcome, reasons)
    assert execution.verdict == ("good" if outcome == "succeeded" else "failure")
    if outcome == "failed":
        assert streamed.error[0] == (ErrorType.UNREADABLE if end else ErrorType.DISCONNECTED)
        assert "finish_reason" in streamed.error[1]
        assert execution.retryable is (not events and not end)


async def test_many_choices_in_one_chunk() -> None:
    both = json.dumps(
        {"choices": [{"index": index, "text": "x", "finish_reason": "stop"} for index in (1, 0)]}
    ).encode()
    streamed = await read_bytes(data(both), call_of(Operation.COMPLETIONS))
    assert streamed.execution.head.finish_reasons == ("stop", "stop")


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        ([USAGE], Usage(input_tokens=3, output_tokens=2)),
        ([USAGE, {**USAGE, "completion_tokens": 9}], Usage(input_tokens=3, output_tokens=9)),
        ([USAGE, None], Usage(input_tokens=3, output_tokens=2)),
        ([USAGE, {}], Usage(input_tokens=3, output_tokens=2)),
        (
            [
                {
                    **USAGE,
                    "prompt_tokens_details": {"cached_tokens": 1},
                    "completion_tokens_details": {"reasoning_tokens": 7, "x": 1},
                }
            ],
            Usage(input_tokens=3, output_tokens=2, cached_input_tokens=1, reasoning_output_tokens=7),
        ),
        (
            [{**USAGE, "prompt_tokens_details": None, "completion_tokens_details": 5}],
            Usage(input_tokens=3, output_tokens=2),
        ),
        ([{"prompt_tokens": "many"}], None),
        (["?"], None),
        ([None], None),
    ],
)
async def test_usage_is_the_last_that_was_said(reported: list[Any], usage: Usage | None) -> None:
    chunks = [chunk(None, usage=value) for value in reported]
    streamed = await read_bytes(data(F) + b"".join(map(data, chunks)) + DONE)
    assert len(streamed.data) == len(chunks) + 1
    assert streamed.execution.head.usage == usage


async def test_model_and_id_are_the_first_that_were_said() -> None:
    nameless = b'{"choices":[],"id":"","model":""}'
    second = chunk("a").replace(b'"c1"', b'"c2"')
    streamed = await read_bytes(data(nameless) + data(A) + data(second) + data(F))
    assert (streamed.execution.head.response_id, streamed.execution.head.response_model) == ("c1", "m")


@pytest.mark.parametrize(
    "members",
    [
        {"model": 7, "id": ["x"]},
        {"object": {}, "usage": [1]},
        {"choices": [{"index": "0", "finish_reason": None}]},
        {"choices": {"a": 1}},
        {"choices": [{"index": 0, "finish_reason": 5}]},
        {"error": None},
        {"error": False},
        {"error": {}},
        {"error": ""},
    ],
)
async def test_members_of_odd_types_are_no_error(members: dict[str, Any]) -> None:
    odd = chunk("a", **members)
    streamed = await read_bytes(data(odd) + data(F) + DONE)
    assert streamed.data == [odd, F]
    assert streamed.execution.outcome == "succeeded"


@pytest.mark.parametrize(
    "garbage",
    [
        b"upstream connect error",
        b'{"id":"c1","choi',
        b"<html>",
        b"[1]",
        b"7",
        b"null",
        b'"text"',
        b"{}x",
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'{"choices":[{"index":0,"delta":{"content":"\xc3"}}]}',
        b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b"[DONE",
        b'"[DONE]"',
    ],
)
@pytest.mark.parametrize("call", [CHAT, RESPONSE], ids=["chat", "responses"])
async def test_data_that_is_no_json_object_ends_the_stream_failed(garbage: bytes, call: Any) -> None:
    streamed = await read_bytes(data(A) + data(garbage) + data(F) + DONE, call)
    assert streamed.data == [A]
    execution = streamed.execution
    assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "failure", False)
    assert streamed.error[0] == ErrorType.UNREADABLE
    alone = await read_bytes(data(garbage), call)
    assert (alone.data, alone.execution.outcome, alone.execution.retryable) == ([], "failed", False)


@pytest.mark.parametrize(
    ("event", "sentence", "verdict", "kind"),
    [
        (
            data(b'{"error":{"message":"prompt too long","type":"BadRequestError","param":null,"code":400}}'),
            "prompt too long",
            "neutral",
            ErrorType.REJECTED,
        ),
        (data(b'{"object":"error","message":"too long","code":400}'), "too long", "neutral", ErrorType.REJECTED),
        (data(b'{"error":"overloaded","error_type":"overloaded"}'), "overloaded", "failure", ErrorType.FAILED),
        (data(b'{"error":{"message":"boom","code":null}}', event="error"), "boom", "failure", ErrorType.FAILED),
        (data(b'{"message":"boom","code":500}', event="error"), "boom", "failure", ErrorType.FAILED),
        (data(b"the worker is gone", event="error"), "the worker is gone", "failure", ErrorType.FAILED),
        (data(b'{"error":{"message":"slow down","code":429}}'), "slow down", "backpressure", ErrorType.OVERLOADED),
        (
            data(b'{"error":{"message":"m"},"choices":[{"index":0,"finish_reason":"error"}]}'),
            "m",
            "failure",
            ErrorType.FAILED,
        ),
        (data(b'{"error":{"message":"half \\ud83d"},"id":"\\ud83d"}'), "half", "failure", ErrorType.FAILED),
        (data(b'{"error":{"message":"m"},"id":7}'), "m", "failure", ErrorType.FAILED),
    ],
)
@pytest.mark.parametrize("before", [[], [A], [A, F]], ids=["first", "later", "after-finish"])
async def test_an_error_inside_a_stream_is_a_failure_with_its_classification(
    event: bytes, sentence: str, verdict: str, kind: ErrorType, before: list[bytes]
) -> None:
    streamed = await read_bytes(b"".join(map(data, before)) + event + DONE)
    alone = await read_bytes(b"".join(map(data, before)) + event)
    assert msgspec.structs.replace(alone.execution, execution_ms=0, first_chunk_ms=0, hold_ms=0) == (
        msgspec.structs.replace(streamed.execution, execution_ms=0, first_chunk_ms=0, hold_ms=0)
    )
    execution = streamed.execution
    assert streamed.data == before
    assert (execution.outcome, execution.verdict, streamed.error[0]) == ("failed", verdict, kind)
    assert (execution.retryable, execution.error_told) == (False, False)
    assert sentence in said(streamed)["message"]
    assert sentence not in streamed.error[1]
    assert execution.head.status == 200
    assert (execution.hold_ms > 0) == (verdict == "backpressure")


async def test_facts_that_came_before_an_error_are_kept() -> None:
    streamed = await read_bytes(data(chunk("a", usage=USAGE)) + data(b'{"error":{"message":"m"}}'))
    head = streamed.execution.head
    assert (head.usage, head.response_id, head.finish_reasons) == (Usage(input_tokens=3, output_tokens=2), "c1", ())


def response(kind: str, *, named: bool = True, **members: Any) -> bytes:
    document = {"type": f"response.{kind}", "sequence_number": 1, **members}
    return data(json.dumps(document).encode(), event=f"response.{kind}" if named else "")


def body_of(status: str, **members: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": 3,
        "output_tokens": 2,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens_details": {"reasoning_tokens": 2},
    }
    return {"id": "resp_1", "object": "response", "model": "m", "status": status, "usage": usage, **members}


BEGUN = response("created", response={"id": "resp_1", "object": "response", "model": "m", "usage": None})
DELTA = response("output_text.delta", delta="x")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("status", ["completed", "incomplete"])
@pytest.mark.parametrize("after", [b"", DONE, data(b"garbage")])
async def test_responses_keep_their_event_names_and_end_by_type(named: bool, status: str, after: bytes) -> None:
    end = response(status, named=named, response=body_of(status))
    streamed = await read_bytes(BEGUN + DELTA + end + after, RESPONSE)
    assert [payload.event for payload in streamed.payloads] == [
        "response.created",
        "response.output_text.delta",
        f"response.{status}",
    ]
    head = streamed.execution.head
    assert (streamed.execution.outcome, head.response_id, head.response_model) == ("succeeded", "resp_1", "m")
    assert head.usage == Usage(input_tokens=3, output_tokens=2, cached_input_tokens=1, reasoning_output_tokens=2)


async def test_a_response_that_failed_tells_so_itself() -> None:
    failed = body_of("failed", error={"code": "server_error", "message": "the engine has died"})
    streamed = await read_bytes(BEGUN + DELTA + response("failed", response=failed), RESPONSE)
    assert [payload.event for payload in streamed.payloads][-1] == "response.failed"
    assert streamed.execution.error_told is True
    assert (streamed.execution.outcome, streamed.execution.verdict) == ("failed", "failure")
    assert said(streamed)["message"] == "the engine has died"
    assert said(streamed)["code"] == "server_error"


@pytest.mark.parametrize("named", [True, False])
async def test_a_typed_error_event_is_passed_on_and_ends_the_response(named: bool) -> None:
    error = data(b'{"type":"error","code":"x","message":"boom","param":null}', event="error" if named else "")
    streamed = await read_bytes(BEGUN + error + DELTA, RESPONSE)
    assert [payload.event for payload in streamed.payloads] == ["response.created", "error"]
    assert (streamed.execution.outcome, streamed.execution.error_told) == ("failed", True)
    assert said(streamed)["message"] == "boom"


@pytest.mark.parametrize("kind", ["response.created", "invalid_request_error"])
async def test_an_event_named_error_is_one_whatever_its_type(kind: str) -> None:
    error = data(json.dumps({"type": kind, "message": "boom"}).encode(), event="error")
    streamed = await read_bytes(BEGUN + error + DELTA, RESPONSE)
    assert [payload.event for payload in streamed.payloads] == ["response.created"]
    assert (streamed.execution.outcome, streamed.execution.error_told) == ("failed", False)
    assert said(streamed)["message"] == "boom"


@pytest.mark.parametrize(
    ("name", "kind", "outcome"),
    [
        ("response.completed", "response.in_progress", "failed"),
        ("response.failed", "response.completed", "succeeded"),
        ("message", "response.completed", "succeeded"),
        ("message", "error", "failed"),
    ],
)
async def test_an_end_that_name_and_type_do_not_agree_on_is_told_by_its_type(
    name: str, kind: str, outcome: str
) -> None:
    last = {"type": kind, "message": "boom", "response": body_of("completed")}
    streamed = await read_bytes(BEGUN + data(json.dumps(last).encode(), event=name), RESPONSE)
    assert [payload.event for payload in streamed.payloads] == ["response.created", kind]
    assert streamed.execution.outcome == outcome


async def test_an_untyped_error_in_a_response_is_not_passed_on() -> None:
    streamed = await read_bytes(BEGUN + data(b'{"error":{"message":"boom","code":400}}') + DONE, RESPONSE)
    assert len(streamed.payloads) == 1
    assert (streamed.execution.outcome, streamed.execution.error_told) == ("failed", False)
    assert (streamed.execution.verdict, said(streamed)["message"]) == ("neutral", "boom")


@pytest.mark.parametrize("end", [b"", DONE])
async def test_a_response_without_its_last_event_is_truncated(end: bytes) -> None:
    streamed = await read_bytes(BEGUN + DELTA + end, RESPONSE)
    assert len(streamed.payloads) == 2
    assert (streamed.execution.outcome, streamed.execution.verdict) == ("failed", "failure")
    assert "response.completed" in streamed.error[1]


async def test_event_names_of_chat_chunks_are_dropped() -> None:
    streamed = await read_bytes(data(A, event="message") + data(F, event="completion.chunk") + DONE)
    assert [payload.event for payload in streamed.payloads] == ["", ""]
    assert streamed.execution.outcome == "succeeded"


async def test_an_operation_without_a_stream_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no stream form"):
        await read_bytes(DONE, call_of(Operation.EMBEDDINGS))

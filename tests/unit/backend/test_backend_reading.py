"""What complete answers mean: outcome, verdict, facts and the caller's part, without a network."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatch.backend import Endpoint, Execution
from dispatch.backend.document import clean, read_document
from dispatch.backend.exchange import Answer
from dispatch.backend.execution import ErrorType
from dispatch.backend.reading import read_answer
from dispatch.contract import Usage

ENDPOINT = Endpoint(endpoint_id="gpu", url="http://u:pw@10.0.0.7:8000/v1")
KEYED = Endpoint(endpoint_id="gpu", url="http://10.0.0.7:8000/v1", api_key="sk-s3cret")


def read(body: bytes | dict[str, Any], status: int = 200, **headers: str) -> Execution:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return read_answer(Answer(status, (("content-type", "application/json"), *fields), data), ENDPOINT)


def chat(**members: Any) -> dict[str, Any]:
    return {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop"}], **members}


def test_a_success_keeps_its_bytes_and_gives_the_facts() -> None:
    body = json.dumps(chat(model="qwen3", usage={"prompt_tokens": 3, "completion_tokens": 4}, x=1)).encode()
    execution = read(body)
    assert execution.outcome == "succeeded"
    assert execution.verdict == "good"
    assert execution.body is body
    assert execution.head.usage == Usage(input_tokens=3, output_tokens=4)
    assert execution.head.finish_reasons == ("stop",)
    assert execution.head.response_model == "qwen3"
    assert execution.head.endpoint_id == "gpu"
    assert execution.head.backend_address == "http://10.0.0.7:8000/v1"


@pytest.mark.parametrize(
    ("usage", "read_as"),
    [
        ('{"input_tokens":5,"output_tokens":6}', Usage(input_tokens=5, output_tokens=6)),
        ('{"prompt_tokens":5,"total_tokens":5}', Usage(input_tokens=5)),
        ('{"prompt_tokens":0,"completion_tokens":0}', Usage(input_tokens=0, output_tokens=0)),
        ('{"prompt_tokens":-1,"completion_tokens":4}', Usage(output_tokens=4)),
        ('{"prompt_tokens":1180591620717411303424,"completion_tokens":4}', Usage(output_tokens=4)),
        ('{"prompt_tokens":' + "9" * 5_000 + ',"completion_tokens":4}', Usage(output_tokens=4)),
        ('{"prompt_tokens":"12","completion_tokens":4}', Usage(output_tokens=4)),
        ('{"prompt_tokens":1.5,"completion_tokens":true}', None),
        ('{"prompt_tokens":null}', None),
        ("{}", None),
        ("null", None),
        ("[1]", None),
        ('"12"', None),
    ],
)
def test_usage_that_is_not_known_is_not_zero(usage: str, read_as: Usage | None) -> None:
    execution = read(f'{{"choices":[],"usage":{usage}}}'.encode())
    assert execution.outcome == "succeeded"
    assert execution.head.usage == read_as


@pytest.mark.parametrize(
    ("choices", "reasons"),
    [
        ('[{"index":1,"finish_reason":"length"},{"index":0,"finish_reason":"stop"}]', ("stop", "length")),
        ('[{"finish_reason":"stop"},{"finish_reason":null}]', ("stop", "")),
        ('[{"index":0,"finish_reason":null}]', ()),
        ('[{"index":0,"finish_reason":7}]', ()),
        ("[]", ()),
        ("null", ()),
        ("[1]", ()),
        ('{"a":1}', ()),
    ],
)
def test_finish_reasons_go_by_choice_index(choices: str, reasons: tuple[str, ...]) -> None:
    execution = read(f'{{"choices":{choices}}}'.encode())
    assert execution.outcome == "succeeded"
    assert execution.head.finish_reasons == reasons


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"choices":[{"message":{"con',
        b'{"a":1}{"b":2}',
        b"{'a':1}",
        b'{"p":NaN}',
        b'{"p":-Infinity}',
        b'{"text":"\xff\xfe"}',
        b"<!doctype html><title>Hello</title>",
        b'data: {"choices":[]}\n\ndata: [DONE]\n\n',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x1f\x8b\x08\x00",
        b"\0" * 100,
    ],
)
def test_a_200_without_a_json_object_is_a_failure_of_the_endpoint(body: bytes) -> None:
    execution = read(body)
    assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "failure", False)
    assert execution.head.error is not None
    assert execution.head.error.type == ErrorType.UNREADABLE
    assert execution.head.usage is None
    assert execution.body == b""
    assert all(name != "content-type" for name, _ in execution.head.headers)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"finish_reason":"stop","message":{"content":"\\ud83d"}}]}',
        b'{"choices":[{"finish_reason":"stop","message":{"content":"\\udca9\\ud83d\\ude00\\\\ud83d"}}]}',
        b'{"choices":[{"finish_reason":"stop","message":{"content":"\\u0000"}}]}',
        b'\xef\xbb\xbf{"choices":[{"finish_reason":"stop"}]}',
        '{"choices":[{"finish_reason":"stop","message":{"content":"a\u2028b\u2029c\u0085d"}}]}'.encode(),
        b'{"choices":[{"finish_reason":"stop"}],"seed":' + b"1" * 5_000 + b',"p":1e999}',
        b' \n{"choices":[{"finish_reason":"stop"}]}\n ',
    ],
)
def test_odd_but_well_formed_bodies_are_passed_on(body: bytes) -> None:
    execution = read(body)
    assert execution.outcome == "succeeded"
    assert execution.body == body
    assert execution.head.finish_reasons == ("stop",)


def test_names_from_a_backend_are_cleaned_and_cut() -> None:
    execution = read(b'{"model":"a\\u0000b\\ud800\\n' + b"m" * 5_000 + b'","choices":[{"finish_reason":"s\\u0007"}]}')
    assert execution.head.response_model is not None
    assert execution.head.response_model.isprintable()
    assert len(execution.head.response_model) <= 128
    assert execution.head.finish_reasons == ("s",)
    assert clean("\ud800x\x00y", 10) == "?x y"
    assert clean(7, 10) == ""


@pytest.mark.parametrize(
    ("body", "verdict", "sentence"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, "neutral", "too long"),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, "neutral", "too long"),
        ({"error": {"message": "no", "type": "invalid_request_error"}}, "neutral", "no"),
        ({"error": {"message": "died", "code": 500}}, "failure", "died"),
        ({"error": {"message": "died", "code": "worker_lost"}}, "failure", "died"),
        ({"error": "overloaded", "error_type": "overloaded"}, "failure", "overloaded"),
        ({"error": {"message": "slow down", "code": 429}}, "backpressure", "slow down"),
        ({"error": {"message": "loading", "code": "503"}}, "backpressure", "loading"),
        ({"error": {"a": 1}}, "failure", "with an error"),
        ({"object": "error"}, "failure", "with an error"),
        (chat(error={"message": "half done"}), "failure", "half done"),
        (
            {"object": "response", "status": "failed", "error": {"code": "server_error", "message": "boom"}},
            "failure",
            "boom",
        ),
    ],
)
def test_an_error_inside_a_200_is_failed(body: dict[str, Any], verdict: str, sentence: str) -> None:
    execution = read(body)
    assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", verdict, False)
    assert (execution.hold_ms > 0) == (verdict == "backpressure")
    told = json.loads(execution.body)["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert sentence in told["message"]
    assert execution.head.error is not None
    assert sentence == "with an error" or sentence not in execution.head.error.message
    assert execution.head.usage is None


@pytest.mark.parametrize("error", [None, {}, "", [], False, 0])
def test_an_empty_error_member_is_no_error(error: Any) -> None:
    assert read(chat(error=error)).outcome == "succeeded"


@pytest.mark.parametrize(
    ("status", "kind", "verdict", "source"),
    [
        (400, ErrorType.REJECTED, "neutral", "caller"),
        (401, ErrorType.UNAUTHORIZED, "neutral", "endpoint"),
        (403, ErrorType.REJECTED, "neutral", "endpoint"),
        (404, ErrorType.REJECTED, "neutral", "caller"),
        (408, ErrorType.REJECTED, "neutral", "endpoint"),
        (413, ErrorType.REJECTED, "neutral", "caller"),
        (422, ErrorType.REJECTED, "neutral", "caller"),
        (499, ErrorType.REJECTED, "neutral", "endpoint"),
        (500, ErrorType.FAILED, "failure", "endpoint"),
        (502, ErrorType.FAILED, "failure", "endpoint"),
        (504, ErrorType.FAILED, "failure", "endpoint"),
        (529, ErrorType.FAILED, "failure", "endpoint"),
        (999, ErrorType.FAILED, "failure", "endpoint"),
        (301, ErrorType.REDIRECT, "failure", "endpoint"),
        (307, ErrorType.REDIRECT, "failure", "endpoint"),
        (101, ErrorType.UNREADABLE, "failure", "endpoint"),
    ],
)
def test_statuses(status: int, kind: ErrorType, verdict: str, source: str) -> None:
    execution = read({"error": {"message": "the prompt was: secret plans", "code": "c_1", "param": "messages"}}, status)
    assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", verdict, False)
    assert execution.hold_ms == 0
    error = execution.head.error
    assert error is not None
    assert (error.type, error.source, error.code, error.param) == (kind, source, "c_1", "messages")
    assert str(status) in error.message
    assert "secret plans" not in error.message
    assert execution.head.status == status


def test_a_json_error_travels_byte_for_byte() -> None:
    body = b'{"object":"error","message":"Prompt has 9001 tokens","code":400 }'
    assert read(body, 400).body == body
    assert read(body, 500).body == body
    assert ("content-type", "application/json") in read(body, 500).head.headers


def test_a_page_becomes_an_openai_error_and_plain_text_is_quoted_in_one() -> None:
    def told(kind: str, body: bytes, status: int = 502) -> dict[str, Any]:
        answer = Answer(status, (("content-type", kind),), body)
        execution = read_answer(answer, ENDPOINT)
        assert execution.head.headers == (("content-type", "application/json"),)
        assert execution.head.error is not None
        assert "upstream" not in execution.head.error.message
        return json.loads(execution.body)["error"]

    page = told("text/html", b"<title>upstream</title>")
    assert page == {
        "message": "endpoint 'gpu' answered 502 Bad Gateway",
        "type": "endpoint_failed",
        "param": None,
        "code": None,
    }
    assert told("text/plain; charset=utf-8", b"upstream \xff\x00 gone\n")["message"].endswith(": upstream \ufffd  gone")
    assert len(told("text/plain", b"upstream " * 5_000)["message"]) < 600
    assert told("application/json", b"[1]")["message"] == page["message"]
    assert told("application/json", b"")["message"] == page["message"]


def test_the_text_of_a_refused_key_stays_here() -> None:
    execution = read({"error": {"message": "unknown key sk-abc***xyz", "code": "invalid_api_key"}}, 401)
    assert b"sk-" not in execution.body
    assert json.loads(execution.body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("status", [200, 400, 403, 500])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
def test_a_body_that_quotes_our_key_is_not_passed_on(status: int, content_type: str) -> None:
    for body in (b'{"error":{"message":"sent: Bearer sk-s3cret"}}', b"sent: Bearer sk-s3cret"):
        execution = read_answer(Answer(status, (("content-type", content_type),), body), KEYED)
        assert b"s3cret" not in execution.body
        assert "s3cret" not in repr(execution)


def test_backpressure_holds_the_endpoint_and_tells_the_caller_in_whole_seconds() -> None:
    def told(status: int, **headers: str) -> tuple[int, str]:
        execution = read({"error": {"message": "later"}}, status, **headers)
        assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "backpressure", True)
        values = [value for name, value in execution.head.headers if name.startswith("retry-after")]
        assert len(values) == 1
        return execution.hold_ms, values[0]

    assert told(429, retry_after="7") == (7_000, "7")
    assert told(429, retry_after_ms="1500", retry_after="2") == (1_500, "2")
    assert told(503) == (1_000, "1")
    assert told(503, retry_after="0") == (100, "1")
    assert told(503, retry_after="soon") == (1_000, "1")
    assert told(429, retry_after="9" * 5_000) == (60_000, "30")


def test_the_label_of_a_body_that_is_json_says_json() -> None:
    def label(value: str) -> str:
        return dict(read_answer(Answer(200, (("content-type", value),), b"{}"), ENDPOINT).head.headers)["content-type"]

    assert label("application/json; charset=utf-8") == "application/json; charset=utf-8"
    assert label("text/plain") == "application/json"
    assert label("") == "application/json"
    assert label("application/json; x=\xff") == "application/json"


def test_an_error_of_a_page_type_is_named_without_its_text() -> None:
    answer = Answer(200, (("content-type", "text/event-stream"),), b'data: {"choices":[]}\n\n')
    error = read_answer(answer, ENDPOINT).head.error
    assert error is not None
    assert "event stream" in error.message
    odd = read_answer(Answer(200, (("content-type", "<script>"),), b"hello"), ENDPOINT).head.error
    assert odd is not None
    assert "script" not in odd.message


def test_reading_a_document_is_bounded_in_time() -> None:
    assert read_document(b'{"a":"' + b"\\ud83d" * 200_000 + b'"}') is not None
    assert read_document(b'{"a":"' + b"\\" * 1_000_001) is None

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dispatch.contract import Operation
from dispatch.errors import InvalidRequest
from dispatch.producer.completion import build_completion, encode_body

MESSAGES = [{"role": "user", "content": "é 漢 🙂 \u2028"}]


def built(**arguments: Any) -> tuple[bytes, Any]:
    call, options = build_completion({"model": "m", "messages": MESSAGES} | arguments)
    assert call.operation is Operation.CHAT_COMPLETIONS
    return call.body, options


def test_the_body_has_messages_model_and_the_rest_in_the_order_given() -> None:
    body, _ = built(temperature=0.5, tools=[], extra_body={"x": 1, "temperature": 0.7}, stop=None)
    assert list(json.loads(body)) == ["messages", "model", "temperature", "tools", "stop", "x"]
    assert json.loads(body)["temperature"] == 0.7
    assert "é 漢 🙂 \u2028".encode() in body


def test_options_are_no_part_of_the_body() -> None:
    body, options = built(pool="p", timeout=1.0001, cost=3, request_id="r", metadata={"a": 1, "b": None})
    assert set(json.loads(body)) == {"messages", "model"}
    assert (options.pool_id, options.timeout_ms, options.estimated_cost_units) == ("p", 1001, 3)
    assert (options.request_id, options.metadata) == ("r", {"a": 1, "b": None})


def test_numbers_of_any_size_keep_their_digits() -> None:
    body, _ = built(seed=123456789012345678901234567890)
    assert b'"seed":123456789012345678901234567890' in body


def test_messages_of_the_openai_package_are_taken_as_they_dump() -> None:
    from openai.types.chat import ChatCompletionMessage  # noqa: PLC0415 - slow to import, needed once

    message = ChatCompletionMessage(role="assistant", content="hi")
    body, _ = built(messages=[message])
    assert json.loads(body)["messages"] == [{"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"temperature": 0}, "temperature"),
        ({"tools": [{"a": [1, {"b": 0}]}]}, "tools[0].a[1].b"),
        ({"messages": [{"role": "user", "content": [{"type": "x", "v": 0}]}]}, "messages[0].content[0].v"),
        ({"extra_body": {"x": (1, 0)}}, "x[1]"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_their_path(
    number: float, arguments: dict[str, Any], path: str
) -> None:
    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: put(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(put(item) for item in value)
        return number if value == 0 else value

    with pytest.raises(InvalidRequest) as caught:
        built(**put(arguments))
    assert caught.value.param == path
    assert caught.value.status == 400


def _nested() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def _circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = value["b"] = [value, value]
    return value


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", "\ud800", _nested(), _circular(), {"x": object()}],
    ids=["object", "set", "bytes", "surrogate", "nested", "circular", "inner"],
)
def test_what_is_no_json_is_refused_with_a_sentence(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        built(x=value)
    assert caught.value.message


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"model": ""}, "model"),
        ({"messages": "hello"}, "messages"),
        ({"pool": "a:b"}, "pool"),
        ({"pool": None}, "pool"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": "{x}"}, "request_id"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": math.nan}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"timeout": 1e18}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"cost": 1.5}, "cost"),
        ({"cost": -1}, "cost"),
        ({"metadata": {"a": [1]}}, "metadata.a"),
        ({"metadata": {"a": math.nan}}, "metadata.a"),
        ({"metadata": "x"}, "metadata"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        built(**arguments)
    assert caught.value.param == param


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_missing_arguments_are_named(missing: str) -> None:
    arguments = {"model": "m", "messages": MESSAGES}
    del arguments[missing]
    with pytest.raises(InvalidRequest) as caught:
        build_completion(arguments)
    assert (caught.value.param, caught.value.code) == (missing, "missing_required_parameter")


def test_a_tiny_timeout_is_a_millisecond() -> None:
    assert built(timeout=0.0001)[1].timeout_ms == 1


def test_bodies_are_compact() -> None:
    assert encode_body({"a": [1, 2], "b": {"c": None}}) == b'{"a":[1,2],"b":{"c":null}}'


def test_key_and_level_are_options_and_no_members_of_the_body() -> None:
    call, options = build_completion({"model": "m", "messages": [], "fairness_key": "anna", "priority": 3})
    assert (options.fairness_key, options.priority) == ("anna", 3)
    assert json.loads(call.body).keys() == {"model", "messages"}
    call, _ = build_completion({"model": "m", "messages": [], "extra_body": {"priority": 7}})
    assert json.loads(call.body)["priority"] == 7

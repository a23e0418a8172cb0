from __future__ import annotations

import math
from datetime import date
from typing import Any

import pytest

from dispatch.config import edited, encode_document
from dispatch.errors import ConfigurationError

DOCUMENT = {
    "policy": "drr",
    "default_endpoint": "one",
    "pools": [
        {"pool_id": "a", "endpoint": "one", "endpoint_url": "", "delivery": "at_most_once", "max_attempts": 1},
        {"pool_id": "a.b", "quantum": 2, "endpoint": "two"},
    ],
    "endpoints": [{"endpoint_id": "one", "url": "http://one/v1"}],
}  # fmt: skip


def pools(*assignments: str) -> dict[str, dict[str, Any]]:
    return {pool["pool_id"]: pool for pool in edited(DOCUMENT, assignments)["pools"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [("6", 6), ("true", True), ("null", None), ("fifo", "fifo"), ('"6"', "6"), ("", ""), ("a=b", "a=b"), ("NaN", "NaN"),
     ("-1.5", -1.5), ("[", "[")],
)  # fmt: skip
def test_a_value_is_a_json_scalar_or_else_text(text: str, value: object) -> None:
    assert edited(DOCUMENT, [f"policy={text}"])["policy"] == value


def test_names_may_hold_dots() -> None:
    assert pools("pools.a.b.quantum=5")["a.b"]["quantum"] == 5
    assert pools("pools.a.b=null").keys() == {"a"}
    assert pools("pools.a.quantum=null")["a"]["quantum"] is None


def test_what_is_not_there_is_added_at_the_end() -> None:
    document = edited({}, ["pools.x.quantum=2", "endpoints.y.url=http://h/v1", "pools.x.min_concurrent=1"])
    assert document == {
        "pools": [{"pool_id": "x", "quantum": 2, "min_concurrent": 1}],
        "endpoints": [{"endpoint_id": "y", "url": "http://h/v1"}],
    }


def test_the_document_itself_stays_as_it_was() -> None:
    before = encode_document(DOCUMENT)
    edited(DOCUMENT, ["pools.a.quantum=9", "pools.a.b=null", "policy=fifo"])
    assert encode_document(DOCUMENT) == before


def test_what_was_filled_in_for_the_old_value_goes_unless_it_is_given_too() -> None:
    assert "endpoint" not in pools("pools.a.endpoint_url=http://own/v1")["a"]
    assert "endpoint_url" not in pools("pools.a.endpoint=two")["a"]
    assert "max_attempts" not in pools("pools.a.delivery=at_least_once")["a"]
    for words in (
        ["pools.a.delivery=at_least_once", "pools.a.max_attempts=5"],
        ["pools.a.max_attempts=5", "pools.a.delivery=at_least_once"],
    ):
        assert pools(*words)["a"]["max_attempts"] == 5


def test_pools_on_the_default_endpoint_follow_it() -> None:
    changed = pools("default_endpoint=two")
    assert "endpoint" not in changed["a"]
    assert changed["a.b"]["endpoint"] == "two"


@pytest.mark.parametrize(
    "word",
    ["", "=", "policy", "policy.x=1", "pools=1", "pools.=1", "pools.a=1", "pools.a.=1", "pools..x=1", "policy={}",
     "pools.nope=null"],
)  # fmt: skip
def test_another_form_is_refused_and_named(word: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        edited(DOCUMENT, [word])
    assert repr(word.partition("=")[0]) in str(caught.value) or repr(word) in str(caught.value)


@pytest.mark.parametrize("value", [{("a",): 1}, {"a": date(2026, 1, 1)}, {"a": math.inf}, {"a": "\ud800"}])
def test_a_document_that_json_cannot_hold_is_refused(value: dict[Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be JSON"):
        encode_document(value)


def test_a_document_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["pools"] = [endless]
    with pytest.raises(ConfigurationError, match="cannot be JSON"):
        encode_document(endless)

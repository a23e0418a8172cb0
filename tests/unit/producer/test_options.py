from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing
from typing import Any

import pytest

import dispatch
from dispatch.errors import ConfigurationError, InvalidRequest
from dispatch.producer.options import CallOptions, ClientKeywords, ClientOptions
from dispatch.producer.session import Session, made_up_producer_id


def test_the_keywords_of_a_client_are_the_members_of_its_options() -> None:
    assert set(typing.get_type_hints(ClientKeywords, localns={"Endpoint": object})) == {
        field.name for field in dataclasses.fields(ClientOptions)
    }


@pytest.mark.parametrize(
    "options",
    [
        {"client": "memcached"},
        {"liveness_ms": 0},
        {"close_ms": 1.5},
        {"admission_ms": True},
        {"direct": True},
        {"endpoint": "http://127.0.0.1/v1"},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ClientOptions(**options)


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="fabric_grup"):
        dispatch.DispatchClient("valkey://127.0.0.1", fabric_grup="g")  # type: ignore[call-arg] - that is the point


@pytest.mark.parametrize("options", [{"timeout_ms": 0}, {"timeout_ms": 2**31}, {"admission_ms": 0}, {"pool_id": ""}])
def test_wrong_call_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        CallOptions(**options)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"k": "v" * 8_200}, "8208 bytes"),
        ({"\u00e9" * 4_100: 1}, "bytes"),
        ({str(number): number for number in range(65)}, "65 members"),
        ({"k": 2**63}, "64 bits"),
        ({"k": -(10**400)}, "64 bits"),
        ({"k": "\ud800"}, "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        ({"k": float("inf")}, "finite"),
        ({"k": []}, "only text"),
        ({1: "k"}, "only text"),
    ],
)
def test_metadata_is_bounded_and_can_be_written(metadata: dict[Any, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        CallOptions(metadata=metadata)
    assert str(caught.value.param).startswith("metadata")
    CallOptions(metadata={str(number): "\u00e9\0" for number in range(64)} | {"0": 2**63 - 1, "1": None})


def test_made_up_producer_ids_differ_and_name_the_process() -> None:
    assert made_up_producer_id() != made_up_producer_id()
    assert f"-{os.getpid()}-" in made_up_producer_id()


def test_two_sessions_of_one_producer_differ() -> None:
    options = ClientOptions(producer_id="p")
    assert Session.begin(options).session_id != Session.begin(options).session_id


def test_public_names_are_loaded_when_they_are_used() -> None:
    program = (
        "import sys, dispatch; assert 'glide' not in sys.modules and 'httpx' not in sys.modules;"
        "assert set(dispatch.__all__) <= set(dir(dispatch));"
        "dispatch.DispatchClient; assert 'httpx' not in sys.modules, 'a producer loads no HTTP stack';"
        "assert all(getattr(dispatch, name) is not None for name in dispatch.__all__);"
        "from dispatch.sync import DispatchClient; assert DispatchClient is not dispatch.DispatchClient"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        _ = dispatch.nothing


@pytest.mark.parametrize(
    ("name", "value"),
    [("fairness_key", value) for value in ("", "a b", "a:b", "*", 7, "x" * 129)]
    + [("priority", value) for value in (-1, 4, 1.0, "1", True)],
)
def test_a_key_or_level_out_of_form_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CallOptions(**{name: value})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.param == name

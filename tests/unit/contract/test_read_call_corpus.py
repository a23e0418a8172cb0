"""`read_call` on every call of the corpus, good and bad."""

from __future__ import annotations

import time

import pytest

from dispatch.contract import Call, Operation, read_call
from dispatch.errors import InvalidRequest
from tests.support.corpus import Case, cases, tool

LIMIT = 16 * 1024 * 1024


def operation_of(case: Case) -> Operation:
    path = case.row["path"].removeprefix("/v1/")
    return next(operation for operation in Operation if operation.path == path)


def read(case: Case) -> Call | InvalidRequest:
    started = time.perf_counter()
    try:
        return read_call(operation_of(case), case.data)
    except InvalidRequest as error:
        return error
    finally:
        assert time.perf_counter() - started < 2


@pytest.mark.parametrize("case", cases("requests"), ids=str)
def test_a_good_call_is_read_as_its_row_says(case: Case) -> None:
    row, call = case.row, read(case)
    if isinstance(call, InvalidRequest):
        assert call.status == row["forward"].get("or_refuse", {}).get("status"), call.message
        return
    assert (call.model, call.stream) == (row["model"], row["stream"])
    assert call.body == case.data
    if row["message_count"] is not None:
        assert call.message_count == row["message_count"]
    assert row["envelope"].get("image_count", call.image_count) == row["cost"]["images"]


@pytest.mark.parametrize("case", cases("bad_requests"), ids=str)
def test_a_bad_call_is_refused_or_passes_whole(case: Case) -> None:
    want, call = case.row["expected"], read(case)
    if isinstance(call, InvalidRequest):
        assert want["mode"] != "pass", call.message
        assert call.status in want["status"]
        assert call.param in (want["error"]["param"], None)
        return
    # What the body alone does not show (size, framing, headers) is the front door's to refuse.
    outside = len(case.data) > LIMIT or "length_plus" in case.row["send"] or 415 in want.get("status", ())
    assert outside or want["mode"] != "refuse" or "content-encoding" in case.row["headers"]
    assert call.body == case.data


def test_the_corpus_is_what_its_manifests_say() -> None:
    jsonsame = tool("jsonsame")
    for case in cases("requests"):
        assert jsonsame.same(case.data, case.data)

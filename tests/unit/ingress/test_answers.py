"""The table: every refusal, ending and exception has its status, its reason and its word about another try."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatch import errors
from dispatch.backend import ErrorType
from dispatch.contract import Attempt, Reply, ReplyError, ReplyHead
from dispatch.contract.answers import (
    ENDINGS,
    EXCEPTIONS,
    REFUSALS,
    Answer,
    answer_of_problem,
    answer_of_reply,
    problem_of,
)
from dispatch.fabric.schema import ENDINGS as SCHEMA_ENDINGS
from dispatch.fabric.schema import document
from tests.support.front import OK_BODY, reply


def told(error: errors.DispatchError) -> tuple[int, dict[str, str], dict[str, Any]]:
    return parts(answer_of_problem(problem_of(error)))


def parts(answer: Answer) -> tuple[int, dict[str, str], dict[str, Any]]:
    fields = dict(answer.fields)
    assert fields["content-type"] == "application/json"
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, fields, error


def ended(ending: str, error: ReplyError | None = None, status: int | None = None, **changes: Any) -> Answer:
    return answer_of_reply(reply(ending=ending, head=ReplyHead(status=status, error=error), body=b"", **changes))


def every_class(kind: type[errors.DispatchError]) -> list[type[errors.DispatchError]]:
    return [kind, *(deeper for each in kind.__subclasses__() for deeper in every_class(each))]


def test_the_table_knows_every_refusal_and_ending_of_the_schema() -> None:
    assert set(document()["refusals"]) <= set(REFUSALS)
    assert set(SCHEMA_ENDINGS) == {*ENDINGS, "succeeded"}


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("pool_full", 429),
        ("pool_bytes_full", 429),
        ("group_full", 429),
        ("gateway_full", 429),
        ("pool_disabled", 503),
        ("memory_full", 503),
        ("body_missing", 503),
        ("draining", 503),
        ("body_too_large", 413),
        ("id_conflict", 409),
        ("something_new", 503),
    ],
)
def test_refusals(reason: str, status: int) -> None:
    got, fields, error = told(errors.RequestRefused(reason, pool_id="p", value=3, limit=2))
    assert (got, fields["x-dispatch-reason"], error["code"]) == (status, f"rejected-{reason}", reason)
    assert "retry-after" not in fields  # nobody knows when there will be room
    assert fields.get("x-should-retry") != "false" or reason == "id_conflict"


@pytest.mark.parametrize(
    ("wait_ms", "seconds", "ms"),
    [(0, "1", "1000"), (1500, "2", "1500"), (30_000, "30", "30000"), (900_000, "30", "30000")],
)
def test_retry_after_is_1_to_30_seconds(wait_ms: int, seconds: str, ms: str) -> None:
    _, fields, error = told(errors.RequestRefused("pool_full", retry_after_ms=wait_ms))
    assert (fields["retry-after"], fields["retry-after-ms"], error["type"]) == (seconds, ms, "rate_limit_error")


def test_a_wrong_request_keeps_its_status_member_and_word() -> None:
    status, fields, error = told(errors.InvalidRequest("no", param="model", code="missing_member", status=422))
    assert (status, fields["x-dispatch-reason"]) == (422, "rejected-missing_member")
    assert error == {"message": "no", "type": "invalid_request_error", "param": "model", "code": "missing_member"}


def test_an_unknown_pool_is_named_with_the_known_ones() -> None:
    status, fields, error = told(errors.PoolUnknown('pool "x" is not configured; known: a, b', known=("a", "b")))
    assert (status, fields["x-dispatch-reason"], error["param"]) == (404, "rejected-pool_unknown", "pool")
    assert error["message"] == 'pool "x" is not configured; known: a, b'


@pytest.mark.parametrize(
    ("error", "status", "reason", "retry"),
    [
        (errors.FabricUnavailable("x"), 503, "rejected-fabric_unavailable", "true"),
        (errors.OutcomeUnknown("x"), 502, "ended-outcome_unknown", "false"),
        (errors.LibraryProblem("x"), 503, "rejected-library", "true"),
        (errors.GroupUnknown("x"), 503, "rejected-group_unknown", "true"),
        (errors.ContractMismatch("x"), 503, "rejected-contract_mismatch", "true"),
        (errors.ConfigurationError("x"), 503, "rejected-configuration", "true"),
        (errors.StateConflict("x"), 503, "ended-interrupted", "false"),
        (errors.ScriptFault("x"), 500, "ended-script_fault", "false"),
        (errors.FabricError("x"), 500, "ended-internal", "false"),
    ],
)
def test_exceptions(error: errors.DispatchError, status: int, reason: str, retry: str) -> None:
    got, fields, body = told(error)
    assert (got, fields["x-dispatch-reason"], fields["x-should-retry"]) == (status, reason, retry)
    assert body["type"] == "server_error"
    assert "retry-after" not in fields


def test_no_class_of_the_tree_is_shadowed_by_one_above_it() -> None:
    order = [kind for kind, _ in EXCEPTIONS]
    for at, kind in enumerate(order):
        assert not any(issubclass(kind, earlier) for earlier in order[:at])
    assert all(any(issubclass(kind, each) for each in order) for kind in every_class(errors.DispatchError))


@pytest.mark.parametrize(
    ("ending", "status", "reason"),
    [
        ("cancelled", 503, "ended-cancelled"),
        ("expired", 504, "ended-expired"),
        ("failed", 502, "ended-failed"),
        ("lost", 502, "ended-lost"),
        ("dead", 502, "ended-dead"),
        ("malformed", 400, "rejected-malformed"),
        ("producer_gone", 503, "ended-producer_gone"),
        ("reply_dropped", 502, "ended-reply_dropped"),
    ],
)
def test_endings_without_an_answer_of_the_endpoint(ending: str, status: int, reason: str) -> None:
    why = ReplyError(type="word", message="a sentence", source="dispatch", param="p")
    got, fields, error = parts(ended(ending, why))
    assert (got, fields["x-dispatch-reason"], fields["x-should-retry"]) == (status, reason, "false")
    assert (error["message"], error["param"], error["code"]) == ("a sentence", "p", "word")
    assert "retry-after" not in fields
    assert parts(ended(ending))[2]["message"]


def test_a_deadline_that_passed_in_the_queue_is_want_of_capacity() -> None:
    status, fields, error = parts(ended("expired", queue_ms=500, execution_ms=None))
    assert (status, fields["x-dispatch-reason"], "retry-after" in fields) == (429, "rejected-deadline", False)
    assert (fields["x-dispatch-queue-ms"], error["code"]) == ("500", "deadline_exceeded")
    # Nothing is known of what it did, or an earlier attempt may have done something: no refusal.
    tried = (Attempt(1, 1, 2, None, "endpoint_unreachable", "g", "e"),)
    for more in ({"queue_ms": None}, {"queue_ms": 500, "attempt": 1, "tries": tried}):
        status, fields, _ = parts(ended("expired", execution_ms=None, **more))
        assert (status, fields["x-dispatch-reason"], fields["x-should-retry"]) == (504, "ended-expired", "false")


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422, 429, 500, 503, 504])
def test_a_complete_error_of_the_endpoint_keeps_status_and_bytes(status: int) -> None:
    body = b'{"detail":[{"msg":"the backend\'s own"}]}'
    busy = status in (429, 503)
    kind = ErrorType.OVERLOADED if busy else ErrorType.REJECTED
    why = ReplyError(type=kind, message="x", source="endpoint")
    headers = (("content-type", "application/json"), *([("retry-after", "7")] if busy else []))
    head = ReplyHead(status=status, error=why, headers=headers)
    answer = answer_of_reply(reply(ending="failed", head=head, body=body))
    fields = dict(answer.fields)
    assert (answer.status, answer.body) == (status, body)
    assert fields["x-dispatch-reason"] == "ended-failed"
    assert fields["x-should-retry"] == ("true" if busy else "false")
    assert ("retry-after" in fields) is busy


@pytest.mark.parametrize(
    ("status", "kind", "body", "expected"),
    [
        (None, ErrorType.UNREACHABLE, b"", 502),
        (None, ErrorType.DISCONNECTED, b"", 502),
        (200, ErrorType.UNREADABLE, b"", 502),
        (200, ErrorType.FAILED, b'{"error":{}}', 502),
        (302, ErrorType.REDIRECT, b"", 502),
        (401, ErrorType.UNAUTHORIZED, b'{"error":{}}', 502),
        (None, ErrorType.TIMEOUT, b"", 504),
        (200, ErrorType.TIMEOUT, b"", 504),
        (500, ErrorType.FAILED, b"", 500),
        (999, ErrorType.FAILED, b"", 502),
    ],
)
def test_an_answer_that_is_none_becomes_a_gateways_status(
    status: int | None, kind: ErrorType, body: bytes, expected: int
) -> None:
    why = ReplyError(type=kind, message="x", source="endpoint")
    answer = answer_of_reply(reply(ending="failed", head=ReplyHead(status=status, error=why), body=body))
    assert answer.status == expected
    assert json.loads(answer.body)["error"] is not None
    assert dict(answer.fields)["x-should-retry"] == "false"


def test_a_success_is_the_endpoints_own_answer() -> None:
    answer = answer_of_reply(reply())
    assert (answer.status, answer.body) == (200, OK_BODY)
    assert not {"x-should-retry", "x-dispatch-reason"} & {name for name, _ in answer.fields}
    direct: Reply = reply(queue_ms=None)
    assert "x-dispatch-queue-ms" not in dict(answer_of_reply(direct).fields)

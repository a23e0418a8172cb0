"""Every reply of the corpus through the adapter: ending, retry, breaker verdict, hold, facts, and the caller's part."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from dispatch.backend import Endpoint, EndpointClient, Execution
from dispatch.contract import Call, Operation
from tests.support.corpus import Case, callers, cases, tool
from tests.support.replay import corpus_script
from tests.support.stub import Script, StubBackend, free_port

pytestmark = pytest.mark.anyio

KEYS = {"message", "type", "param", "code"}


def caller_of(case: Case) -> Call:
    caller = callers()[case.row["request"]]
    path = caller["path"].removeprefix("/v1/")
    operation = next(operation for operation in Operation if operation.path == path)
    return Call(operation=operation, body=json.dumps(caller["body"]).encode(), model=caller["body"]["model"])


async def run(case: Case) -> tuple[Execution, StubBackend]:
    response = case.row["response"]
    stub = StubBackend(lambda _: corpus_script(response, case.data, stub.port) if "status" in response else Script())
    if response.get("connect") == "reset":
        stub = StubBackend(corpus_script(response, b"", 0))
    async with stub, EndpointClient() as client:
        port = free_port() if response.get("connect") == "refuse" else stub.port
        endpoint = Endpoint(
            endpoint_id="default", url=f"http://127.0.0.1:{port}/{case.id}/v1", idle_timeout_ms=3_000, api_key="sk-mine"
        )
        deadline_s = case.row.get("request_deadline_ms", 20_000) / 1000
        execution = await client.execute(endpoint, caller_of(case), deadline_s=deadline_s)
        if case.row.get("request_deadline_ms"):
            with anyio.fail_after(1):
                await stub.connections[0].closed.wait()
            assert stub.connections[0].closed_by == "client"
    return execution, stub


@pytest.mark.parametrize("case", cases("replies"), ids=str)
async def test_reply_is_read_as_its_row_says(case: Case) -> None:
    execution, stub = await run(case)
    want = case.row["expected"]
    assert execution.outcome in [want["ending"], *want.get("ending_also", ())]
    assert execution.retryable is want["retryable"]
    assert execution.verdict in want["breaker"]
    head = execution.head
    usage = head.usage and {"input_tokens": head.usage.input_tokens, "output_tokens": head.usage.output_tokens}
    assert usage == want["usage"]
    assert list(head.finish_reasons) == want["finish_reasons"]
    low, high = want.get("hold_endpoint_ms", (0, 0))
    assert low <= execution.hold_ms <= high
    assert len(stub.requests) == (case.row["response"]["connect"] != "refuse")
    assert (head.error is None) == (execution.outcome == "succeeded")
    check_callers_part(case, execution, want["client"])


def check_callers_part(case: Case, execution: Execution, want: dict[str, Any]) -> None:
    """Check what a front door has to work with; one that gets no body makes an OpenAI error of `head.error`."""
    statuses = want["status"] if isinstance(want["status"], list) else [want["status"]]
    head = execution.head
    assert relayed_status(execution) in statuses
    names = {name for name, _ in head.headers}
    assert not names & {
        *want.get("headers_absent", ()),
        "set-cookie",
        "content-encoding",
        "content-length",
        "connection",
    }
    match want["body"]:
        case "same_bytes":
            assert execution.body == case.data
        case "same_json":
            assert tool("jsonsame").same(execution.body, plain(case))
        case "openai_error":
            assert not execution.body or json.loads(execution.body)["error"].keys() == KEYS
        case "same_bytes_or_openai_error":
            assert execution.body == case.data or json.loads(execution.body)["error"].keys() == KEYS
            assert want["must_contain"].encode() in execution.body
    if head.error is not None:
        assert "sk-" not in head.error.message
        assert want.get("must_contain", "\0") not in head.error.message
    if execution.body:
        assert ("content-type", "application/json") in head.headers


def relayed_status(execution: Execution) -> int:
    """Return the status the caller gets, by the rules for front doors."""
    if execution.outcome == "expired":
        return 504
    status = execution.head.status
    return status if status is not None and (status == 200) == (execution.outcome == "succeeded") else 502


def plain(case: Case) -> bytes:
    gzip = dict(case.row["response"]["headers"]).get("content-encoding") == "gzip"
    return __import__("gzip").decompress(case.data) if gzip else case.data

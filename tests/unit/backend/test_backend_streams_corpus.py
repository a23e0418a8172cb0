"""Every stream of the corpus through the adapter, as its row says, however its bytes are cut."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import pytest

from dispatch.backend import Endpoint, EndpointClient, Execution, Payload
from dispatch.contract import Call, Operation
from tests.support.corpus import Case, callers, cases, tool
from tests.support.replay import corpus_script
from tests.support.stub import Script, StubBackend

pytestmark = pytest.mark.anyio

KEYS = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class Streamed:
    """What came of one streamed call."""

    payloads: list[Payload]
    execution: Execution

    @property
    def frames(self) -> bytes:
        """The payloads as a front door frames them."""
        return b"".join(b"data: %b\n\n" % payload.data for payload in self.payloads)


def caller_of(case: Case) -> Call:
    caller = callers()[case.row["request"]]
    path = caller["path"].removeprefix("/v1/")
    operation = next(operation for operation in Operation if operation.path == path)
    body = json.dumps(caller["body"]).encode()
    return Call(operation=operation, body=body, model=caller["body"]["model"], stream=True)


async def run(client: EndpointClient, case: Case, response: dict[str, Any]) -> Streamed:
    async with StubBackend(Script()) as stub:
        stub._answers = corpus_script(response, case.data, stub.port)
        endpoint = Endpoint(endpoint_id="default", url=f"{stub.url}/{case.id}/v1", idle_timeout_ms=3_000)
        deadline_s = case.row.get("request_deadline_ms", 30_000) / 1000
        async with client.stream(endpoint, caller_of(case), deadline_s=deadline_s) as stream:
            payloads = [payload async for payload in stream]
        assert len(stub.requests) == 1
    return Streamed(payloads, stream.execution)


def check(case: Case, streamed: Streamed) -> None:
    want = case.row["expected"]
    execution, head = streamed.execution, streamed.execution.head
    assert execution.outcome in [want["ending"], *want.get("ending_also", ())]
    assert execution.retryable is want["retryable"] or want["reading"] == "open"
    assert execution.verdict in want["breaker"]
    assert (head.error is None) == (execution.outcome == "succeeded")
    assert execution.chunk_count == len(streamed.payloads)
    assert (execution.first_chunk_ms is None) == (not streamed.payloads)
    if want["error"] is not None:
        said = json.loads(execution.body)["error"] if execution.body else {"message": head.error and head.error.message}
        assert want["error"]["must_contain"] in said["message"]
        assert not execution.body or said.keys() == KEYS
    if case.row["file"].endswith(".json"):
        check_turned(case, streamed)
        return
    usage = head.usage and {"input_tokens": head.usage.input_tokens, "output_tokens": head.usage.output_tokens}
    assert usage == want["usage"]
    check_payloads(case, streamed)


def check_payloads(case: Case, streamed: Streamed) -> None:
    want, data, reference = case.row["expected"], plain(case), tool("sse_ref")
    got, sent = reference.collect(streamed.frames), reference.collect(data)
    assert len(streamed.payloads) == want["payloads"]["deliver"]
    assert got["payloads"] == sent["payloads"][: want["payloads"]["deliver"]]
    assert got["bad"] == 0
    assert got["error"] is None
    one_line = {payload for _, payload in reference.events(data) if b"\n" not in payload}
    for payload in streamed.payloads:
        assert b"\n" not in payload.data
        assert b"\r" not in payload.data
    assert sum(payload.data in one_line for payload in streamed.payloads) >= min(len(one_line), got_lines(case))
    for index, choice in want["choices"].items():
        mine = got["choices"][index]
        assert all(mine.get(name) == value for name, value in choice.items())
    if "text_sha256" in want:
        assert hashlib.sha256(got["choices"]["0"]["text"].encode()).hexdigest() == want["text_sha256"]
    reasons = [choice["finish_reason"] for _, choice in sorted(got["choices"].items())]
    if streamed.execution.outcome == "succeeded" and all(reasons):
        assert list(streamed.execution.head.finish_reasons) == reasons
    names = {"model": streamed.execution.head.response_model, "id": streamed.execution.head.response_id}
    for name, value in names.items():
        assert value == next((chunk[name] for chunk in got["payloads"] if name in chunk), None)


def got_lines(case: Case) -> int:
    """How many delivered payloads stood in one line of the file: those come out byte for byte."""
    events = [payload for _, payload in tool("sse_ref").events(plain(case))][
        : case.row["expected"]["payloads"]["deliver"]
    ]
    return sum(b"\n" not in payload for payload in events)


def check_turned(case: Case, streamed: Streamed) -> None:
    """One JSON body instead of a stream comes out as chunks that say the same."""
    body = json.loads(case.data)
    got = tool("sse_ref").collect(streamed.frames)
    for choice in body["choices"]:
        mine = got["choices"][str(choice["index"])]
        assert mine == {"text": choice["message"]["content"], "finish_reason": choice["finish_reason"]}
    usage = streamed.execution.head.usage
    assert usage is not None
    assert usage.output_tokens == body["usage"]["completion_tokens"]


def plain(case: Case) -> bytes:
    return gzip.decompress(case.data) if case.row["file"].endswith(".gz") else case.data


@pytest.mark.parametrize("case", cases("streams"), ids=str)
async def test_stream_is_read_as_its_row_says(client: EndpointClient, case: Case) -> None:
    check(case, await run(client, case, case.row["response"]))

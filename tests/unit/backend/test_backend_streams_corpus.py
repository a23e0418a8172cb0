"""Every stream of the corpus through the adapter, as its row says, however its bytes are cut."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
from structlog.testing import capture_logs

from dispatch.backend import Endpoint, EndpointClient
from tests.support.corpus import Case, cases, tool
from tests.support.replay import corpus_script
from tests.support.streams import CannedTransport, Streamed, caller_of, read_canned, run
from tests.support.stub import StubBackend

pytestmark = pytest.mark.anyio

KEYS = {"message", "type", "param", "code"}
ROWS = cases("streams")
SMALL = [case for case in ROWS if case.row["bytes"] < 5_000]
READABLE = [case for case in SMALL if case.row["file"].endswith(".sse")]


async def play(client: EndpointClient, case: Case, response: dict[str, Any]) -> Streamed:
    async with StubBackend(lambda _: corpus_script(response, case.data, stub.port)) as stub:
        endpoint = Endpoint(endpoint_id="default", url=f"{stub.url}/{case.id}/v1", idle_timeout_ms=3_000)
        deadline_s = case.row.get("request_deadline_ms", 30_000) / 1000
        streamed = await run(client, endpoint, caller_of(case), deadline_s=deadline_s)
        assert len(stub.requests) == 1
    return streamed


def check(case: Case, streamed: Streamed) -> None:
    want, execution = case.row["expected"], streamed.execution
    head = execution.head
    assert execution.outcome in [want["ending"], *want.get("ending_also", ())]
    assert execution.retryable is want["retryable"] or want["reading"] == "open"
    assert execution.verdict in want["breaker"]
    assert (head.error is None) == (execution.outcome == "succeeded")
    assert execution.chunk_count == len(streamed.payloads)
    assert (execution.first_chunk_ms is None) == (not streamed.payloads)
    if want["error"] is not None:
        check_error(streamed, want["error"]["must_contain"])
    if case.row["file"].endswith(".json"):
        check_turned(case, streamed)
    else:
        usage = head.usage and {"input_tokens": head.usage.input_tokens, "output_tokens": head.usage.output_tokens}
        assert usage == want["usage"]
        check_payloads(case, streamed)


def check_error(streamed: Streamed, must_contain: str) -> None:
    if streamed.execution.body:
        said = json.loads(streamed.execution.body)["error"]
        assert said.keys() == KEYS
        assert must_contain in said["message"]
    else:
        assert must_contain in streamed.error[1]
        assert streamed.error[1]


def check_payloads(case: Case, streamed: Streamed) -> None:
    """The caller gets the first ones of the file, byte for byte where they stood in one line."""
    want, reference = case.row["expected"], tool("sse_ref")
    deliver = want["payloads"]["deliver"]
    written = [data for _, data in reference.events(plain(case)) if data.strip()]
    assert streamed.data == [data.replace(b"\n", b" ") for data in written[:deliver]]
    got, sent = reference.collect(streamed.frames), reference.collect(plain(case))
    assert got["payloads"] == sent["payloads"][:deliver]
    assert (got["bad"], got["error"]) == (0, None)
    for index, choice in want["choices"].items():
        assert choice.items() <= got["choices"][index].items()
    if "text_sha256" in want:
        assert hashlib.sha256(got["choices"]["0"]["text"].encode()).hexdigest() == want["text_sha256"]
    head = streamed.execution.head
    reasons = tuple(choice["finish_reason"] or "" for _, choice in sorted(got["choices"].items()))
    assert head.finish_reasons == (reasons if any(reasons) else ())
    for name, found in (("model", head.response_model), ("id", head.response_id)):
        assert found == next((chunk[name] for chunk in got["payloads"] if name in chunk), None)


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


@pytest.mark.parametrize("case", ROWS, ids=str)
async def test_stream_is_read_as_its_row_says(client: EndpointClient, case: Case) -> None:
    streamed = await play(client, case, case.row["response"])
    check(case, streamed)
    limits = case.row["expected"]
    assert streamed.execution.execution_ms < limits.get("over_within_ms", 20_000) + 1_000
    assert (streamed.execution.first_chunk_ms or 0) < limits.get("first_payload_within_ms", 20_000) + 1_000


@pytest.mark.parametrize("case", SMALL, ids=str)
async def test_stream_over_the_wire_byte_by_byte_is_the_same(client: EndpointClient, case: Case) -> None:
    by_byte = {**case.row["response"], "writes": {"plan": "every", "n": 1, "gap_ms": 0}}
    check(case, await play(client, case, {name: value for name, value in by_byte.items() if name != "tcp"}))


@pytest.mark.parametrize("case", SMALL, ids=str)
async def test_stream_cut_in_two_anywhere_is_the_same(case: Case) -> None:
    headers = dict(case.row["response"]["headers"])
    # How the connection ends is not what is cut here: what breaks there breaks here.
    error = None if case.row["response"]["end"] == "clean" else broken()
    with capture_logs():
        for offset in range(len(case.data) + 1):
            pieces = [case.data[:offset], case.data[offset:]]
            check(case, await read_canned(CannedTransport(pieces, headers=headers, error=error), caller_of(case)))


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("case", READABLE, ids=str)
async def test_stream_that_ends_anywhere_gives_its_whole_events_and_says_what_it_was(case: Case, breaks: bool) -> None:
    with capture_logs():
        for length in range(len(case.data) + 1):
            body = case.data[:length]
            streamed = await read_canned(CannedTransport([body], error=broken() if breaks else None), caller_of(case))
            payloads, outcome = expected_of(body)
            assert (streamed.data, streamed.execution.outcome) == (payloads, outcome), length
            assert streamed.execution.retryable is (outcome == "failed" and not payloads), length


def broken() -> Exception:
    """Return what the transport raises when a body breaks off."""
    error = httpx.ReadError("broken off")
    error.__cause__ = aiohttp.ClientPayloadError("broken off")
    return error


def expected_of(body: bytes) -> tuple[list[bytes], str]:
    """Return the payloads that stand whole in a body of chat chunks, and how a stream that ends there ends."""
    payloads: list[bytes] = []
    unfinished: set[int] = set()
    finished: set[int] = set()
    for payload in whole_events(body):
        if payload.strip() == b"[DONE]":
            break
        document = json.loads(payload)
        if document.get("error"):
            return payloads, "failed"
        payloads.append(payload.replace(b"\n", b" "))
        for choice in document["choices"]:
            (finished if choice["finish_reason"] else unfinished).add(choice["index"])
    return payloads, "succeeded" if finished and unfinished <= finished else "failed"


def whole_events(body: bytes) -> Iterator[bytes]:
    events = tool("sse_ref").events
    complete = [payload for _, payload in events(body, flush=False) if payload.strip()]
    yield from complete
    for _, payload in list(events(body))[len(complete) :]:
        try:
            whole = payload.strip() == b"[DONE]" or isinstance(json.loads(payload), dict)
        except ValueError:
            whole = False
        if whole:
            yield payload

"""The corpus through the whole path: every good call arrives, every bad one is refused, every odd reply comes back."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest

from tests.support.calls import COMPLETION
from tests.support.corpus import Case, callers, cases, tool
from tests.support.front import Heard, exchange, head
from tests.support.producing import until
from tests.support.replay import corpus_script
from tests.support.stack import Stack, stack
from tests.support.stub import Script, StubBackend, free_port, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

FOUR_KEYS = {"message", "type", "param", "code"}
PIECE = 65_536


async def send(port: int, case: Case, *more: bytes) -> Heard:
    """Send a row's call as its row says."""
    row, data = case.row, case.data
    how = row.get("send", {"framing": row.get("transfer")})
    lines = [b"POST %s HTTP/1.1" % row["path"].encode(), b"host: x", b"connection: close", *more]
    lines += [f"{name}: {value}".encode() for name, value in row["headers"].items()]
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    if how["framing"] == "chunked":
        lines.append(b"transfer-encoding: chunked")
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
    else:
        lines.append(b"content-length: %d" % (len(data) + how.get("length_plus", 0)))
    if how["framing"] == "expect-100":
        lines.append(b"expect: 100-continue")
    return await exchange(port, head(lines), *pieces, half_close=how.get("then") == "half-close", then_wait=5)


def error_of(heard: Heard) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(heard.body)["error"]
    assert set(error) == FOUR_KEYS
    return error


def assert_nothing_queued(path: Stack) -> None:
    assert path.submitted() == 0
    assert path.keys("body:") == []
    assert path.keys("hash:llm:request:") == []
    assert path.leases() == 0


@pytest.mark.parametrize("case", cases("requests"), ids=str)
async def test_a_good_call_reaches_the_backend_as_it_was_sent(valkey: ValkeyProcess, case: Case) -> None:
    row = case.row
    async with StubBackend(json_answer(COMPLETION)) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        heard = await send(path.port, case, b"x-dispatch-metadata: " + json.dumps(row["envelope"]).encode())
        if heard.status == row["forward"].get("or_refuse", {}).get("status"):
            assert error_of(heard)
            assert stub.requests == []
            return
        if row["stream"]:
            assert (heard.status, heard.header(b"content-type")) == (200, b"text/event-stream; charset=utf-8")
            await until(lambda: path.endings() != [])
        else:
            assert (heard.status, heard.body) == (200, COMPLETION)
        [seen] = stub.requests
        assert (seen.method, seen.target) == ("POST", row["path"])
        assert seen.header("content-type") == "application/json"
        assert seen.header("authorization") is None
        if row["forward"]["same_bytes"] == "yes":
            assert seen.body == case.data
        assert tool("jsonsame").same(case.data, seen.body)

        request_id = (heard.header(b"x-dispatch-request-id") or b"").decode()
        [ended] = path.endings()
        assert (ended["request_id"], ended["ending"]) == (request_id, "succeeded")
        assert ended["cost"] in [row["cost"]["units"], *row["cost"].get("also_accepted", ())]
        envelope = path.envelope(request_id)
        assert envelope["model"] == row["model"]
        if row["message_count"] is not None:
            assert envelope["message_count"] == row["message_count"]
        assert path.keys("body:") == []


@pytest.mark.parametrize("case", cases("bad_requests"), ids=str)
async def test_a_bad_call_is_refused_or_passes_whole(valkey: ValkeyProcess, case: Case) -> None:
    want = case.row["expected"]
    async with StubBackend(json_answer(COMPLETION)) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        started = time.monotonic()
        heard = await send(path.port, case)
        assert time.monotonic() - started < 5
        if stub.requests:
            assert want["mode"] != "refuse", heard
            assert heard.status == 200
            passed = [case.data]
            if want["passed_bytes"] == "same_or_without_mark":
                passed.append(case.data.removeprefix(b"\xef\xbb\xbf"))
            assert [seen.body in passed for seen in stub.requests] == [True]
            return
        assert want["mode"] != "pass", heard
        assert_nothing_queued(path)
        if heard.status is None:
            assert case.row["send"].get("then") == "half-close"
            return
        assert heard.status in want["status"]
        error = error_of(heard)
        assert error["type"] == want["error"]["type"]
        assert error["param"] in (want["error"]["param"], None)
        assert (heard.header(b"x-dispatch-reason") or b"").startswith(b"rejected-")


@pytest.mark.parametrize("case", cases("replies"), ids=str)
async def test_an_odd_reply_reaches_the_caller_as_listed(valkey: ValkeyProcess, case: Case) -> None:
    row, response = case.row, case.row["response"]
    want = row["expected"]
    caller = callers()[row["request"]]
    stub = StubBackend(lambda _: corpus_script(response, case.data, stub.port) if "status" in response else Script())
    if response.get("connect") == "reset":
        stub = StubBackend(corpus_script(response, b"", 0))
    async with stub:
        port = free_port() if response.get("connect") == "refuse" else stub.port
        endpoint = {"endpoint_id": "default", "url": f"http://127.0.0.1:{port}/v1", "idle_timeout_ms": 3_000}
        async with stack(valkey.url, "", endpoints=[endpoint]) as path:
            body = json.dumps(caller["body"]).encode()
            lines = [b"POST %s HTTP/1.1" % caller["path"].encode(), b"host: x", b"content-length: %d" % len(body)]
            lines.append(b"accept-encoding: gzip")
            if "request_deadline_ms" in row:
                lines.append(b"x-dispatch-timeout-ms: %d" % row["request_deadline_ms"])
            started = time.monotonic()
            heard = await exchange(path.port, head(lines) + body, then_wait=10)
            assert (time.monotonic() - started) * 1000 < want["client"].get("within_ms", 10_000)
            assert_client_got(case, heard)

            [ended] = path.endings()
            assert ended["ending"] in [want["ending"], *want.get("ending_also", ())]
            usage = want["usage"] or {}
            assert ended.get("input_tokens") == usage.get("input_tokens")
            assert ended.get("output_tokens") == usage.get("output_tokens")
            assert path.leases() == 0
            assert all(row["in_flight"] == 0 for row in path.section("pools")["rows"])
            assert (heard.header(b"x-dispatch-request-id") or b"").decode() == ended["request_id"]
            assert bool(heard.header(b"x-dispatch-reason")) is (ended["ending"] != "succeeded")


def assert_client_got(case: Case, heard: Heard) -> None:
    want = case.row["expected"]["client"]
    allowed = want["status"] if isinstance(want["status"], list) else [want["status"]]
    assert heard.status in allowed
    for name in [*want.get("headers_absent", ()), "set-cookie", "transfer-encoding", "content-encoding"]:
        assert heard.header(name.encode()) is None
    plain = gzip.decompress(case.data) if case.row["file"] and case.row["file"].endswith(".gz") else case.data
    match want["body"]:
        case "same_bytes":
            assert heard.body == plain
        case "same_json":
            assert tool("jsonsame").same(heard.body, plain)
        case "openai_error":
            assert error_of(heard)["message"]
        case _:
            assert heard.body == plain or error_of(heard)
            assert want["must_contain"].encode() in heard.body
    assert (heard.header(b"content-type") or b"").startswith(b"application/json")

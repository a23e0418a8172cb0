"""Calls through the application: routes, pools, headers, ids, refusals before anything is queued."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from dispatch.contract import Operation
from tests.support.front import OK_BODY, FakeClient, FakeGateway, answering, failing, reply

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = b'{"messages":[{"role":"user","content":"hi"}],"model":"m","seed":123456789012345678901234567890}'
FOUR_KEYS = {"message", "type", "param", "code"}


async def post(http: httpx.AsyncClient, path: str = CHAT, body: bytes = BODY, **headers: str | bytes) -> httpx.Response:
    fields: dict[str, Any] = {"content-type": "application/json"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return await http.post(path, content=body, headers=fields)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == FOUR_KEYS
    assert isinstance(error["message"], str)
    assert error["message"]
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize("base", ["", "/pools/backfill"])
@pytest.mark.parametrize("operation", list(Operation))
async def test_every_operation_is_served_under_both_base_urls(
    http: httpx.AsyncClient, client: FakeClient, operation: Operation, base: str
) -> None:
    body = json.dumps({"model": "m", operation.main_member: ["x"]}).encode()
    answer = await post(http, f"{base}/v1/{operation.path}", body)
    assert (answer.status_code, answer.content) == (200, OK_BODY)
    call, options = client.last
    assert (call.operation, call.body, call.model) == (operation, body, "m")
    assert options.pool_id == ("backfill" if base else "default")


async def test_the_answer_says_what_became_of_the_call(http: httpx.AsyncClient) -> None:
    answer = await post(http)
    expected = {
        "content-type": "application/json",
        "x-dispatch-request-id": "r1",
        "x-request-id": "r1",
        "x-dispatch-pool": "default",
        "x-dispatch-gateway": "gw-1",
        "x-dispatch-queue-ms": "3",
        "x-dispatch-execution-ms": "40",
    }
    assert expected.items() <= dict(answer.headers).items()
    assert "x-dispatch-reason" not in answer.headers


async def test_a_pool_is_named_by_header_or_base_url_and_both_must_agree(
    http: httpx.AsyncClient, client: FakeClient
) -> None:
    await post(http, x_dispatch_pool="interactive")
    assert client.last[1].pool_id == "interactive"
    await post(http, f"/pools/a.b{CHAT}", x_dispatch_pool="a.b")
    assert client.last[1].pool_id == "a.b"
    answer = await post(http, f"/pools/a{CHAT}", x_dispatch_pool="b")
    assert (answer.status_code, error_of(answer)["code"]) == (400, "pool_conflict")
    assert len(client.calls) == 2


@pytest.mark.parametrize("pool", ["", "a b", "{x}", "a:b", "é".encode(), b"\xb2", "x" * 129, "a/b"])
async def test_a_name_that_no_pool_can_have_is_refused(
    http: httpx.AsyncClient, client: FakeClient, pool: str | bytes
) -> None:
    answer = await post(http, x_dispatch_pool=pool)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "pool")
    assert not client.calls


async def test_a_pool_header_sent_twice_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, content=BODY, headers=[("x-dispatch-pool", "a"), ("x-dispatch-pool", "a")])
    assert answer.status_code == 400
    assert "more than once" in error_of(answer)["message"]


@pytest.mark.parametrize(("value", "timeout_ms"), [("1", 1), ("1500", 1500), ("3600000", 3_600_000), (" 20 ", 20)])
async def test_a_timeout_travels(http: httpx.AsyncClient, client: FakeClient, value: str, timeout_ms: int) -> None:
    await post(http, x_dispatch_timeout_ms=value)
    assert client.last[1].timeout_ms == timeout_ms


@pytest.mark.parametrize(
    "value",
    ["0", "-5", "0.001", "1.0", "NaN", "soon", "", '"5"', "1e3", "3600001", "1" + "0" * 18, "9" * 5000, "٣", "05"],
)
async def test_a_timeout_that_is_none_is_refused(http: httpx.AsyncClient, client: FakeClient, value: str) -> None:
    answer = await post(http, x_dispatch_timeout_ms=value.encode())
    assert (answer.status_code, error_of(answer)["param"]) == (400, "x-dispatch-timeout-ms")
    assert not client.calls


async def test_metadata_travels_beside_the_body(http: httpx.AsyncClient, client: FakeClient) -> None:
    metadata = {"image_count": 4, "page_count": 17, "chunk_page_count": 0, "estimated_cost_units": 5}
    metadata |= {"team": "é", "rate": 0.5, "dry": True, "note": None, "big": 2**63 - 1}
    await post(http, x_dispatch_metadata=json.dumps(metadata, ensure_ascii=False).encode())
    assert client.last[1].metadata == metadata
    assert client.last[0].body == BODY


@pytest.mark.parametrize(("given", "units"), [(-7, 0), (99, 99), (10**15, 2**31 - 1)])
async def test_explicit_cost_out_of_bounds_is_brought_into_them(
    http: httpx.AsyncClient, client: FakeClient, given: int, units: int
) -> None:
    await post(http, x_dispatch_metadata=json.dumps({"estimated_cost_units": given}))
    assert client.last[1].metadata == {"estimated_cost_units": units}


@pytest.mark.parametrize(
    "value",
    [
        b"x",
        b"",
        b"[]",
        b"7",
        b'{"a":{}}',
        b'{"a":[1]}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":"\xff"}',
        b'{"a":123456789012345678901234567890}',
        b'{"a":"' + b"x" * 9000 + b'"}',
        b"{" + b",".join(b'"%d":1' % n for n in range(65)) + b"}",
        b"[" * 5000,
    ],
)
async def test_metadata_that_is_none_is_refused(http: httpx.AsyncClient, client: FakeClient, value: bytes) -> None:
    answer = await post(http, x_dispatch_metadata=value)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "x-dispatch-metadata")
    assert not client.calls


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_trace_context_travels(http: httpx.AsyncClient, client: FakeClient) -> None:
    await http.post(CHAT, content=BODY, headers=[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")])
    assert (client.last[1].traceparent, client.last[1].tracestate) == (PARENT, "a=1,b=2")


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        PARENT + "-x",
        PARENT.upper(),
        "ff" + PARENT[2:],
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
    ],
)
async def test_a_trace_context_that_is_none_is_ignored(
    http: httpx.AsyncClient, client: FakeClient, parent: str
) -> None:
    answer = await post(http, traceparent=parent, tracestate="a=1")
    assert answer.status_code == 200
    assert (client.last[1].traceparent, client.last[1].tracestate) == (None, None)


@pytest.mark.parametrize("given", ["a", "req_{1}:2/3", "~" * 128, "!"])
async def test_a_callers_request_id_is_echoed_and_is_never_the_internal_one(
    http: httpx.AsyncClient, client: FakeClient, given: str
) -> None:
    answer = await post(http, x_request_id=given)
    assert (answer.headers["x-request-id"], answer.headers["x-dispatch-request-id"]) == (given, "r1")
    options = client.last[1]
    assert (options.caller_request_id, options.request_id) == (given, None)


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "x" * 8192, "é".encode(), b"\xb2", b"\x80\xff", "a\tb"])
async def test_an_unsafe_request_id_is_replaced(
    http: httpx.AsyncClient, client: FakeClient, given: str | bytes
) -> None:
    answer = await post(http, x_request_id=given)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "r1")
    assert client.last[1].caller_request_id is None


async def test_a_request_id_sent_twice_is_replaced(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, content=BODY, headers=[("x-request-id", "a"), ("x-request-id", "b")])
    assert answer.headers["x-request-id"] == "r1"


async def test_refusals_carry_an_id_too(http: httpx.AsyncClient) -> None:
    first, second = await post(http, body=b"no"), await post(http, body=b"no")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert "x-dispatch-request-id" not in first.headers
    assert (await post(http, body=b"no", x_request_id="mine")).headers["x-request-id"] == "mine"


async def test_a_body_that_is_no_call_is_refused_with_its_member(http: httpx.AsyncClient, client: FakeClient) -> None:
    answer = await post(http, body=b'{"messages":[]}')
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "missing_member")
    assert answer.headers["x-dispatch-reason"] == "rejected-missing_member"
    assert "retry-after" not in answer.headers
    assert not client.calls


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON;charset=UTF-8",
        "application/vnd.api+json",
        "",
        None,
    ],
)
async def test_json_and_unlabelled_bodies_are_taken(http: httpx.AsyncClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert (await http.post(CHAT, content=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
        "text/json",
        b"\xff/\xfe",
        "application/jsonx",
        "x" * 5000,
    ],
)
async def test_other_bodies_are_415(http: httpx.AsyncClient, client: FakeClient, kind: str | bytes) -> None:
    answer = await http.post(CHAT, content=BODY, headers={"content-type": kind})
    assert answer.status_code == 415
    assert error_of(answer)["type"] == "invalid_request_error"
    assert answer.headers["x-dispatch-reason"] == "rejected-unsupported_media_type"
    assert not client.calls


@pytest.mark.parametrize(("coding", "status"), [("identity", 200), ("gzip", 415), ("br", 415), ("identity, gzip", 415)])
async def test_an_encoded_body_is_415(http: httpx.AsyncClient, coding: str, status: int) -> None:
    assert (await post(http, content_encoding=coding)).status_code == status


async def test_a_body_over_the_groups_bound_is_413(
    http: httpx.AsyncClient, client: FakeClient, gateway: FakeGateway
) -> None:
    gateway.max_payload_bytes = len(BODY)
    assert (await post(http)).status_code == 200
    gateway.max_payload_bytes -= 1
    answer = await post(http)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")
    assert answer.headers["x-dispatch-reason"] == "rejected-body_too_large"
    assert len(client.calls) == 1


@pytest.mark.parametrize(("facts", "reason"), [({"draining": True}, "draining"), ({"running": False}, "not_running")])
async def test_a_gateway_on_its_way_out_takes_no_calls(
    http: httpx.AsyncClient, client: FakeClient, gateway: FakeGateway, facts: dict[str, Any], reason: str
) -> None:
    gateway.facts = facts
    answer = await post(http)
    assert (answer.status_code, answer.headers["x-dispatch-reason"]) == (503, f"rejected-{reason}")
    assert error_of(answer)["type"] == "server_error"
    assert not client.calls


async def test_admission_gets_time_for_the_bytes_that_are_announced(
    http: httpx.AsyncClient, client: FakeClient
) -> None:
    await post(http)
    assert 700 <= (client.last[1].admission_ms or 0) <= 1000
    await post(http, body=BODY + b" " * 8 * 1024 * 1024)
    assert (client.last[1].admission_ms or 0) >= 8000


async def test_a_bug_is_told_in_the_same_form(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.behave = failing(RuntimeError("boom with a secret"))
    answer = await post(http)
    assert (answer.status_code, error_of(answer)["type"]) == (500, "server_error")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/audio/speech", 404),
        ("POST", "/pools//v1/chat/completions", 404),
        ("POST", "/pools/a/b/v1/chat/completions", 404),
        ("GET", "/%00%ff{}", 404),
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/healthz", 405),
    ],
)
async def test_other_paths_and_methods_are_openai_errors(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path, headers={"x-request-id": "mine"})
    assert answer.status_code == status
    assert error_of(answer)["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-dispatch-reason"].startswith("rejected-")
    assert ("allow" in answer.headers) is (status == 405)


async def test_fields_of_a_reply_that_could_break_the_head_apart_are_left_out(
    http: httpx.AsyncClient, client: FakeClient
) -> None:
    answer = reply()
    bad = (
        ("x-a", "1\r\nset-cookie: x"),
        ("x b", "1"),
        ("content-length", "3"),
        ("x-request-id", "theirs"),
        ("X-C", "é"),
    )
    head = answer.head.__class__(status=200, headers=(("x-good", "1"), *bad))
    client.behave = answering(reply(head=head))
    got = await post(http)
    assert (got.status_code, got.content) == (200, OK_BODY)
    assert got.headers["x-good"] == "1"
    assert got.headers["x-request-id"] == "r1"
    assert not {"x-a", "x b", "x-c", "set-cookie"} & set(got.headers)


async def test_key_and_level_travel(http: httpx.AsyncClient, client: FakeClient) -> None:
    await post(http)
    assert (client.last[1].fairness_key, client.last[1].priority) == (None, None)
    await post(http, x_dispatch_fairness_key=" user.7 ", x_dispatch_priority="0")
    assert (client.last[1].fairness_key, client.last[1].priority) == ("user.7", 0)


@pytest.mark.parametrize("value", ["", "a b", "{x}", "a:b", "é".encode(), b"\xb2", "x" * 129, "a/b", "*"])
async def test_a_key_that_is_no_name_is_refused(
    http: httpx.AsyncClient, client: FakeClient, value: str | bytes
) -> None:
    answer = await post(http, x_dispatch_fairness_key=value)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "x-dispatch-fairness-key")
    assert not client.calls


@pytest.mark.parametrize("value", ["", "4", "-1", "1.0", "01", "high", "9" * 5000, "٣", b"\xb2", "NaN"])
async def test_a_level_that_is_none_is_refused(http: httpx.AsyncClient, client: FakeClient, value: str | bytes) -> None:
    answer = await post(http, x_dispatch_priority=value.encode() if isinstance(value, str) else value)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "x-dispatch-priority")
    assert not client.calls


@pytest.mark.parametrize("name", ["x-dispatch-fairness-key", "x-dispatch-priority"])
async def test_a_key_or_level_sent_twice_is_refused(http: httpx.AsyncClient, client: FakeClient, name: str) -> None:
    answer = await http.post(CHAT, content=BODY, headers=[(name, "1"), (name, "1")])
    assert (answer.status_code, error_of(answer)["param"]) == (400, name)
    assert not client.calls


async def test_a_bug_is_told_and_its_log_line_holds_no_body(
    http: httpx.AsyncClient, client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.behave = failing(RuntimeError("broken"))
    answer = await post(http, body=b'{"messages":[{"role":"user","content":"secret prompt"}],"model":"m"}')
    assert (answer.status_code, error_of(answer)["message"]) == (500, "internal error; see the log")
    said = "".join(capsys.readouterr())
    assert "call_failed" in said
    assert "RuntimeError: broken" in said
    assert "secret prompt" not in said

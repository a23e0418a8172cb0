"""The control API lets in who may: every route with every role, before anything is read, and only the key's pools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dispatch.fabric.records import Outcome
from tests.support.control import BASE, ControlStack, control_stack, told
from tests.support.front import exchange, head
from tests.support.groups import default_document
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

ALL = ("admin", "observe", "submit", "admin-of-backfill", "observe-backfill", "submit-backfill")
READERS = ("admin", "observe", "admin-of-backfill", "observe-backfill")
WHOLE = ("admin", "observe")
CHANGERS = ("admin", "admin-of-backfill")

BACKFILL, DEFAULT, DEAD = "waits-in-backfill", "waits-in-default", "died-in-backfill"
CALL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEEPS = {"document": default_document(), "expected_generation": 99}

ROUTES: list[tuple[str, str, Any, tuple[str, ...], int]] = [
    ("GET", "/snapshot", None, READERS, 200),
    ("GET", "/snapshot?section=group", None, WHOLE, 200),
    ("GET", "/snapshot?section=dead", None, READERS, 200),
    ("GET", "/pools", None, READERS, 200),
    ("GET", "/pools/backfill", None, READERS, 200),
    ("GET", "/pools/default", None, WHOLE, 200),
    ("GET", "/pools/backfill/estimate", None, ALL, 200),
    ("GET", "/pools/default/estimate", None, (*WHOLE, "submit"), 200),
    ("POST", "/pools/backfill/pause", {}, CHANGERS, 200),
    ("POST", "/pools/default/resume", None, ("admin",), 200),
    ("GET", "/config", None, WHOLE, 200),
    ("PUT", "/config", KEEPS, ("admin",), 409),
    ("POST", "/config/check", {"document": default_document()}, ("admin",), 200),
    ("POST", "/config/rollback", {"generation": 1, "expected_generation": 99}, ("admin",), 409),
    ("GET", "/config/generations", None, WHOLE, 200),
    ("GET", "/config/generations/1", None, WHOLE, 200),
    ("GET", "/requests", None, READERS, 200),
    ("GET", "/requests?pool=default", None, WHOLE, 200),
    ("POST", "/requests", CALL, ("submit",), 202),
    ("POST", "/requests/cancel", {"request_ids": ["x"]}, CHANGERS, 200),
    ("GET", "/dead", None, READERS, 200),
    ("GET", "/dead?pool=default", None, WHOLE, 200),
    ("GET", f"/dead/{DEAD}", None, READERS, 200),
    ("GET", f"/dead/{DEAD}?content=true", None, CHANGERS, 200),
    ("GET", "/keys", None, ("admin",), 200),
    ("POST", "/keys", {"name": "one more"}, ("admin",), 201),
    ("GET", "/keys/x", None, ("admin",), 404),
    ("DELETE", "/keys/x", None, ("admin",), 404),
    ("GET", "/events", None, READERS, 200),
    ("GET", "/gateways", None, WHOLE, 200),
    ("GET", "/endpoints", None, WHOLE, 200),
    *(("GET", f"/history/{what}", None, READERS, 404) for what in ("requests", "requests/x", "stats", "tokens")),
    ("GET", "/history/errors", None, READERS, 404),
    ("GET", "/history/series?step_s=60", None, READERS, 404),
    *(("GET", f"/history/{what}", None, WHOLE, 404) for what in ("shares", "gateways", "verify")),
]  # fmt: skip

HIDDEN: list[tuple[str, str, tuple[str, ...], int]] = [
    ("GET", f"/requests/{BACKFILL}", READERS, 200),
    ("GET", f"/requests/{DEFAULT}", WHOLE, 200),
    ("GET", f"/requests/{BACKFILL}/reply", CHANGERS, 409),
    ("GET", f"/requests/{DEFAULT}/reply", ("admin",), 409),
    ("POST", f"/requests/{DEFAULT}/cancel", ("admin",), 200),
    ("POST", f"/requests/{BACKFILL}/cancel", CHANGERS, 200),
]
"""To whom a request is not theirs to see, it is not there: 404."""

GUARDED: list[tuple[str, str, tuple[str, ...], int]] = [
    ("POST", f"/dead/{DEAD}/retry", CHANGERS, 202),
    ("DELETE", f"/dead/{DEAD}", CHANGERS, 200),
]


@pytest.fixture
async def control(valkey: ValkeyProcess) -> AsyncIterator[ControlStack]:
    pools = [
        {"pool_id": "interactive"},
        {"pool_id": "backfill", "delivery": "at_least_once", "max_attempts": 1},
        {"pool_id": "default"},
    ]
    async with control_stack(valkey.url, pools=pools) as running:
        running.hand.submit("backfill", request_id=DEAD)
        [lease] = running.hand.claim(1)
        running.hand.settle([lease], outcome=Outcome.LOST)
        running.hand.submit("backfill", request_id=BACKFILL)
        running.hand.submit("default", request_id=DEFAULT)
        yield running


async def status(control: ControlStack, role: str, method: str, path: str, body: Any = None) -> tuple[int, str | None]:
    """Ask and return status and code; of an event stream, only its head is waited for."""
    request = control.http(role).build_request(method, path, json=body, headers={"x-dispatch-operation": OPERATION})
    answer = await control.http(role).send(request, stream=True)
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            return answer.status_code, None
        await answer.aread()
        return told(answer) if answer.status_code >= 400 else (answer.status_code, None)
    finally:
        await answer.aclose()


OPERATION = "chat.completions"


async def test_each_route_takes_the_roles_that_it_is_for(control: ControlStack) -> None:
    for method, path, body, allowed, expected in ROUTES:
        for role in ALL:
            found, code = await status(control, role, method, path, body)
            if role in allowed:
                assert found == expected, (method, path, role, found, code)
            elif path == "/requests" and method == "POST" and role == "submit-backfill":
                assert found == 202  # its only pool is where its calls go
            else:
                assert (found, code) in {(403, "role_not_allowed"), (403, "pool_not_allowed")}, (method, path, role)


async def test_what_a_key_may_not_see_is_not_there(control: ControlStack) -> None:
    for method, path, allowed, expected in HIDDEN:
        for role in sorted(ALL, key=lambda name: name in CHANGERS):
            found, code = await status(control, role, method, path)
            if role in allowed:
                assert found == expected, (method, path, role, found, code)
            else:
                assert (found, code) == (404, "request_unknown"), (method, path, role)


async def test_the_dead_list_is_changed_by_its_admins(control: ControlStack) -> None:
    for role in ("observe", "submit", "observe-backfill"):
        for method, path, _, _ in GUARDED:
            assert await status(control, role, method, path) == (403, "role_not_allowed")
    assert (await status(control, "admin-of-backfill", *GUARDED[0][:2]))[0] == 202
    assert await status(control, "admin", *GUARDED[1][:2]) == (404, "request_unknown")


async def test_every_route_of_the_document_was_asked(control: ControlStack) -> None:
    paths = (await control.get("/openapi.json", "")).json()["paths"]
    documented = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    asked = {(method, path.partition("?")[0]) for method, path, *_ in (*ROUTES, *HIDDEN, *GUARDED)}

    def fits(method: str, path: str) -> bool:
        parts = path.split("/")
        for other, real in asked:
            found = real.split("/")
            same = len(found) == len(parts) and all(
                mine.startswith("{") or mine == theirs for mine, theirs in zip(parts, found, strict=True)
            )
            if other == method and same:
                return True
        return False

    assert [one for one in sorted(documented) if not fits(*one)] == []


async def test_without_a_key_or_with_a_wrong_one_nothing_is_answered(control: ControlStack) -> None:
    control.tokens["wrong"] = control.tokens["admin"][:-1] + "x"
    for method, path, body, _, _ in ROUTES:
        assert await status(control, "", method, path, body) == (401, "missing_api_key")
        assert await status(control, "wrong", method, path, body) == (401, "invalid_api_key")


@pytest.mark.parametrize(("role", "expected"), [("observe", 403), ("", 401)])
async def test_a_body_is_not_read_before_its_caller_was_let_in(control: ControlStack, role: str, expected: int) -> None:
    token = control.tokens.get(role, "none").encode()
    for method, path in ((b"PUT", b"/config"), (b"POST", b"/keys"), (b"POST", b"/requests")):
        lines = [
            method + b" " + BASE.encode() + path + b" HTTP/1.1", b"host: x", b"content-type: application/json",
            b"content-length: 1000000",
        ]  # fmt: skip
        shown = [b"authorization: Bearer " + token] if role else []
        heard = await exchange(int(control.url.rpartition(":")[2]), head([*lines, *shown]), then_wait=20)
        assert heard.status == expected


async def test_a_key_of_certain_pools_gets_only_what_belongs_to_them(control: ControlStack) -> None:
    await control.http().post("/pools/backfill/pause", json={})
    await control.http().post("/pools/default/pause", json={})
    await control.http().post("/pools/backfill/resume", json={})
    control.hand.claim(1)
    role = "observe-backfill"
    assert [row["pool_id"] for row in await control.rows("/pools", role)] == ["backfill"]
    assert [row["request_id"] for row in await control.rows("/requests", role)] == [BACKFILL]
    assert [row["request_id"] for row in await control.rows("/dead", role)] == [DEAD]
    sections = ["pools", "leases", "dead", "endings", "events"]
    limited = (await control.get("/snapshot", role, section=sections)).json()
    everything = (await control.get("/snapshot", "observe", section=sections)).json()
    assert [row["pool_id"] for row in limited["leases"]["rows"]] == ["backfill"]
    assert {row["pool"] for row in limited["endings"]["rows"]} == {"backfill"}
    assert {row["pool"] for row in limited["events"]["rows"]} == {"backfill"}
    assert {"config", "key"} <= {row["kind"] for row in everything["events"]["rows"]}
    assert set((await control.get("/snapshot", role)).json()) == {"server_ms", "pools"}
    assert "backfill" in (await control.get("/pools/default", role)).json()["error"]["message"]


async def test_a_gateway_of_another_group_is_told_from_the_one_that_is_meant(control: ControlStack) -> None:
    mine, other = ({"x-dispatch-fabric-group": name} for name in (control.group, "elsewhere"))
    assert (await control.http().get("/pools", headers=mine)).status_code == 200
    answer = await control.http().post("/pools/backfill/pause", json={}, headers=other)
    assert told(answer) == (421, "another_group")
    assert "paused" not in control.hand.pool("backfill")


async def test_where_no_key_is_asked_for_everybody_may_do_everything(valkey: ValkeyProcess) -> None:
    async with control_stack(valkey.url, keys=False) as control:
        assert (await control.http("").put("/config", json=KEEPS)).status_code == 409
        await control.http("").post("/pools/backfill/pause", json={"actor": "anna", "reason": "why"})
        assert control.hand.pool("backfill")["paused"] | {"at_ms": 0} == {"by": "anna", "at_ms": 0, "reason": "why"}
        await control.http("").post("/pools/default/pause", json={})
        assert control.hand.pool("default")["paused"]["by"] == "anonymous"


async def test_a_page_of_another_site_changes_nothing_where_no_key_is_asked_for(valkey: ValkeyProcess) -> None:
    async with control_stack(valkey.url, keys=False) as stack:
        for name, value in (
            ("Origin", "http://evil.example"),
            ("Sec-Fetch-Site", "cross-site"),
            ("Host", "evil.example"),
        ):
            answer = await stack.http().post("/pools/backfill/pause", headers={name: value})
            code = "unknown_host" if name == "Host" else "cross_site"
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
        assert stack.hand.section("pools", subject="backfill")["rows"][0].get("paused") is None

"""The control API: what it says of pools, requests, dead requests and keys, and what it changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dispatch.fabric.functions import lease_settle
from dispatch.fabric.records import Outcome, Settlement
from dispatch.fabric.schema import key
from tests.support.control import ControlStack, control_stack, told
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

POOLS = [
    {"pool_id": "interactive", "quantum": 4},
    {"pool_id": "backfill", "delivery": "at_least_once", "max_attempts": 1},
    {"pool_id": "again", "max_attempts": 3, "retry_base_ms": 3_600_000, "retry_cap_ms": 3_600_000,
     "default_timeout_ms": 86_400_000, "max_timeout_ms": 86_400_000},
    {"pool_id": "default"},
]  # fmt: skip
ENDPOINTS = [
    {"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"},
    {"endpoint_id": "gated", "url": "http://127.0.0.1:9/v1", "gate": "vllm"},
]
SECRET = "a prompt that is nobody's business"


@pytest.fixture
async def control(valkey: ValkeyProcess) -> AsyncIterator[ControlStack]:
    async with control_stack(valkey.url, pools=POOLS, endpoints=ENDPOINTS) as running:
        yield running


def die(control: ControlStack, name: str, **fields: Any) -> None:
    """Have one request of `backfill` end dead. Nothing else may wait."""
    control.hand.submit("backfill", request_id=name, **fields)
    [lease] = control.hand.claim(1)
    control.hand.settle([lease], outcome=Outcome.LOST)


async def test_every_list_comes_whole_in_parts_of_any_size(control: ControlStack) -> None:
    for number in range(7):
        die(control, f"dead-{number}")
    ids = {pool: control.hand.submit(pool, 5) for pool in ("interactive", "default")}
    running = {lease.request_id for lease in control.hand.claim(3)}
    everybody = {*ids["interactive"], *ids["default"]}
    for limit in (1, 2, 3, 100):
        assert [row["pool_id"] for row in await control.rows("/pools", limit=limit)] == [
            pool["pool_id"] for pool in POOLS
        ]
        assert len(await control.rows("/dead", limit=limit)) == 7
        assert len(await control.rows("/endpoints", limit=limit)) == 2
        assert [row["generation"] for row in await control.rows("/config/generations", limit=limit)] == [1]
        rows = await control.rows("/requests", limit=limit)
        assert sorted(row["request_id"] for row in rows) == sorted(everybody)
        assert {row["request_id"] for row in rows if row["state"] == "leased"} == running
        for state, wanted in (("running", running), ("queued", everybody - running)):
            rows = await control.rows("/requests", limit=limit, state=state)
            assert {row["request_id"] for row in rows} == wanted


async def test_requests_are_found_by_what_they_are(control: ControlStack) -> None:
    control.hand.submit("interactive", request_id="a", model="m1", fairness_key="anna")
    control.hand.submit("default", request_id="b", model="m2", fairness_key="anna")
    control.hand.submit("default", request_id="c", model="m2", producer_id="q")
    [lease] = control.hand.claim(1, gateway="g-7")
    for wanted, expected in (
        ({"model": "m2"}, {"b", "c"}),
        ({"pool": "default"}, {"b", "c"}),
        ({"fairness_key": "anna"}, {"a", "b"}),
        ({"fairness_key": "anna", "model": "m2"}, {"b"}),
        ({"producer_id": "q"}, {"c"}),
        ({"gateway_id": "g-7"}, {lease.request_id}),
        ({"endpoint_id": "default"}, {lease.request_id}),
        ({"endpoint_id": "gated"}, set()),
    ):
        found = {
            row["request_id"] for limit in (1, 100) for row in await control.rows("/requests", limit=limit, **wanted)
        }
        assert found == expected, wanted
    assert told(await control.get("/requests", pool="nowhere")) == (404, "pool_unknown")


async def test_what_waits_for_its_next_attempt_is_listed(control: ControlStack) -> None:
    for number in range(3):
        control.hand.submit("again", request_id=f"r-{number}")
        [lease] = control.hand.claim(1)
        item = Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=Outcome.FAILED,
            error_type="endpoint_disconnected", retryable=True,
        )  # fmt: skip
        control.hand.run(lease_settle("g", "g/1", nonce=f"s-{number}", want=0, items=[item]))
    control.hand.submit("default")
    for limit in (1, 2, 100):
        rows = await control.rows("/requests", limit=limit, state="delayed")
        assert {row["request_id"] for row in rows} == {"r-0", "r-1", "r-2"}
        assert len(await control.rows("/requests", limit=limit)) == 4
        assert len(await control.rows("/requests", limit=limit, pool="again")) == 3
    found = (await control.get("/requests/r-0")).json()
    assert (found["state"], found["due_ms"] > found["submitted_ms"]) == ("delayed", True)
    assert found["tries"][0]["error_type"] == "endpoint_disconnected"


async def test_a_request_says_where_it_is(control: ControlStack) -> None:
    control.hand.submit("again", request_id="a")
    control.hand.submit("again", request_id="b")
    waiting = (await control.get("/requests/a")).json()
    assert (waiting["state"], waiting["pool_id"], waiting["attempt"], waiting["cost"]) == ("queued", "again", 0, 1)
    assert waiting["queue"] | {"reason": None} == {
        "pool_id": "again", "pending": 2, "delayed": 0, "in_flight": 0, "per_second": None, "wait_ms": None,
        "reason": None,
    }  # fmt: skip
    assert not {"gateway_id", "claimed_ms", "ending", "reply"} & set(waiting)
    [lease] = control.hand.claim(1)
    running = (await control.get("/requests/a")).json()
    assert (running["state"], running["gateway_id"], running["claimed_ms"]) == ("leased", "g", lease.claimed_ms)
    assert "queue" not in running
    await control.http().post("/requests/b/cancel", json={"actor": "anna"})
    ended = (await control.get("/requests/b")).json()
    assert (ended["state"], ended["ending"]) == ("ended", "cancelled")
    assert "reply" not in ended
    assert told(await control.get("/requests/nothing")) == (404, "request_unknown")


async def test_cancelling_says_what_became_of_each(control: ControlStack) -> None:
    control.hand.submit("interactive", request_id="runs")
    control.hand.claim(1, gateway="g-7")
    control.hand.submit("default", request_id="waits")
    control.hand.submit("default", request_id="ended")
    stop = {"request_ids": ["waits", "runs", "nothing", "waits"], "actor": "anna", "reason": "wrong prompt"}
    left = await control.http().post("/requests/runs/cancel", json={"only_waiting": True})
    assert left.json() == {"request_id": "runs", "result": "running", "ending": None, "gateway_id": "g-7"}
    answer = (await control.http().post("/requests/cancel", json=stop)).json()["requests"]
    assert [(one["request_id"], one["result"], one["gateway_id"]) for one in answer] == [
        ("waits", "cancelled", None), ("runs", "cancelling", "g-7"), ("nothing", "unknown", None),
        ("waits", "cancelled", None),
    ]  # fmt: skip
    again = await control.http().post("/requests/waits/cancel")
    assert again.json() == {"request_id": "waits", "result": "ended", "ending": "cancelled", "gateway_id": None}
    running = (await control.get("/requests/runs")).json()
    key_id = control.key_ids["admin"]
    assert running["cancel_asked_by"] == f"anna with key admin ({key_id}): wrong prompt"
    assert told(await control.http().post("/requests/nothing/cancel")) == (404, "request_unknown")
    assert control.hand.pool("default")["pending"] == 1


async def test_a_pool_is_paused_and_resumed_with_a_name_to_it(control: ControlStack) -> None:
    control.hand.submit("backfill", 2)
    post = control.http().post
    paused = (await post("/pools/backfill/pause", json={"actor": "anna", "reason": "moving"})).json()
    assert paused == {"pool_id": "backfill", "changed": True, "state": "paused", "pending": 2, "in_flight": 0}
    assert (await post("/pools/backfill/pause")).json()["changed"] is False
    row = (await control.get("/pools/backfill")).json()
    key_id = control.key_ids["admin"]
    assert row["paused"] | {"at_ms": 0} == {"by": f"anna with key admin ({key_id})", "at_ms": 0, "reason": "moving"}
    assert control.hand.claim(2) == []
    assert (await post("/pools/backfill/resume")).json()["state"] == "active"
    assert (await post("/pools/backfill/drain")).json()["state"] == "draining"
    assert len(control.hand.claim(2)) == 2
    estimate = (await control.get("/pools/backfill/estimate", "submit")).json()
    assert (estimate["in_flight"], estimate["reason"]) == (2, "pool_draining")
    events = (await control.get("/snapshot", section="events")).json()["events"]["rows"]
    assert [row["kind"] for row in events][:3] == ["drain", "resume", "pause"]
    assert told(await post("/pools/nowhere/pause")) == (404, "pool_unknown")


async def test_what_is_not_known_is_null_and_what_does_not_apply_is_left_out(control: ControlStack) -> None:
    estimate = (await control.get("/pools/default/estimate")).json()
    assert (estimate["per_second"], estimate["reason"]) == (None, None)
    plain, gated = await control.rows("/endpoints")
    assert "gate" not in plain
    assert {name: gated["gate"][name] for name in ("waiting", "token_ms", "sampled_ms", "age_ms", "gateway_id")} == {
        "waiting": None, "token_ms": None, "sampled_ms": None, "age_ms": None, "gateway_id": None,
    }  # fmt: skip
    row = (await control.get("/pools/default")).json()
    assert not {"max_concurrent", "paused", "head_cost", "block_reason"} & set(row)
    die(control, "gone")
    dead = (await control.get("/dead/gone")).json()
    assert dead["tries"][0]["status"] is None


async def test_the_dead_list_shows_content_only_to_admins_who_ask(control: ControlStack) -> None:
    small, large = json.dumps({"say": SECRET}).encode(), json.dumps({"say": SECRET * 1000}).encode()
    die(control, "small", body=small, body_bytes=len(small), envelope=b'{"metadata":{"who":"anna"}}')
    nonce = "n-large"
    with eye(control.hand.url) as look:
        look.set(key(control.group, "request_body", id="large", nonce=nonce), large, px=60_000)
    die(control, "large", body=b"", body_bytes=len(large), nonce=nonce)
    for path in ("/dead", "/dead/small", "/snapshot?section=dead", "/requests/small"):
        text = (await control.get(path)).text
        assert SECRET not in text
        assert "anna" not in text
    said = (await control.get("/dead/small", content="true")).json()
    assert (said["body"], said["envelope"]) == (small.decode(), '{"metadata":{"who":"anna"}}')
    assert (await control.get("/dead/large", content="true")).json()["body"] == large.decode()
    assert said["last_error_type"] == "lost"
    assert [row["request_id"] for row in await control.rows("/dead", pool="backfill")] == ["large", "small"]
    assert await control.rows("/dead", pool="default") == []


async def test_dead_requests_are_retried_and_dropped(control: ControlStack) -> None:
    for name in ("a", "b"):
        die(control, name)
    answer = await control.http().post("/dead/a/retry", json={"actor": "anna"})
    retried = answer.json()
    assert (answer.status_code, retried["request_id"]) == (202, "a")
    assert answer.headers["location"] == retried["href"] == f"/api/v1/requests/{retried['new_id']}"
    assert (await control.get(f"/requests/{retried['new_id']}")).json()["detached"] is True
    dropped = await control.http().delete("/dead/b", params={"actor": "anna"})
    assert dropped.json() == {"request_id": "b", "dropped": True}
    for method, path in (("POST", "/dead/a/retry"), ("DELETE", "/dead/b"), ("GET", "/dead/b")):
        assert told(await control.http().request(method, path)) == (404, "request_unknown")
    die_again = control.hand.claim(1)
    control.hand.settle(die_again, outcome=Outcome.LOST)
    await control.http().post("/pools/backfill/drain")
    refused = await control.http().post(f"/dead/{retried['new_id']}/retry")
    assert told(refused) == (503, "pool_draining")
    assert "stays in the list" in refused.json()["error"]["message"]


async def test_keys_are_made_shown_without_hashes_and_revoked(control: ControlStack) -> None:
    grant = {"name": "batch", "roles": ["submit", "observe"], "pools": ["backfill"], "cost": 3, "actor": "anna"}
    answer = await control.http().post("/keys", json=grant)
    made = answer.json()
    assert answer.status_code == 201
    facts = made["key"] | {"created_ms": 0}
    key_id = made["key"]["key_id"]
    assert facts == {
        "key_id": key_id, "name": "batch", "roles": ["submit", "observe"], "pools": ["backfill"], "pool": None,
        "fairness_key": None, "cost": 3, "created_ms": 0, "readable": True,
    }  # fmt: skip
    assert answer.headers["location"] == f"/api/v1/keys/{key_id}"
    assert (await control.get(f"/keys/{key_id}")).json() == made["key"]
    assert made["notes"] == []
    control.tokens["new"] = made["token"]
    assert [row["pool_id"] for row in await control.rows("/pools", "new")] == ["backfill"]
    with eye(control.hand.url) as look:
        look.hset(key(control.group, "keys"), "odd", b"{")
        hashes = [json.loads(record)["hash"] for name, record in look.hgetall(key(control.group, "keys")).items()
                  if name != b"odd"]  # fmt: skip
    listed = await control.get("/keys")
    assert not [one for one in hashes if one in listed.text]
    rows = {row["key_id"]: row for row in listed.json()["keys"]}
    assert set(rows) == {*control.key_ids.values(), key_id, "odd"}
    assert (rows["odd"]["readable"], rows["odd"]["created_ms"]) == (False, None)
    assert (await control.http().delete(f"/keys/{key_id}")).json() == {"key_id": key_id, "revoked": True}
    assert told(await control.http().delete(f"/keys/{key_id}")) == (404, "key_unknown")
    events = (await control.get("/snapshot", section="events")).json()["events"]["rows"]
    assert [(row["action"], row["key"]) for row in events if row["kind"] == "key"][:2] == [
        ("revoke", key_id), ("create", key_id),
    ]  # fmt: skip


WRONG: list[tuple[str, str, Any, int, str, str]] = [
    ("GET", "/pools?limit=0", None, 400, "invalid_value", "limit"),
    ("GET", "/pools?limit=many", None, 400, "invalid_value", "limit"),
    ("GET", "/pools?cursor=-1", None, 400, "invalid_value", "cursor"),
    ("GET", "/pools?colour=red", None, 400, "unknown_parameter", "colour"),
    ("GET", "/pools?limit=1&limit=2", None, 400, "invalid_value", "limit"),
    ("GET", "/pools/default/estimate?cost=-1", None, 400, "unknown_parameter", "cost"),
    ("GET", "/pools/default?limit=1", None, 400, "unknown_parameter", "limit"),
    ("GET", "/keys?limit=1", None, 400, "unknown_parameter", "limit"),
    ("DELETE", "/keys/x?actor=a&actor=b", None, 400, "invalid_value", "actor"),
    ("GET", "/pools/a%7Bb", None, 400, "invalid_value", "pool"),
    ("GET", "/snapshot?section=prompts", None, 400, "invalid_value", "section.0"),
    ("GET", "/snapshot?cursor=1", None, 400, "invalid_value", "cursor"),
    ("GET", "/snapshot?section=events&cursor=0-0", None, 400, "invalid_value", "cursor"),
    ("GET", "/requests?cursor=queued", None, 400, "invalid_value", "cursor"),
    ("GET", "/requests?state=running&cursor=queued:a:", None, 400, "invalid_value", "cursor"),
    ("GET", "/requests/a:b", None, 400, "invalid_value", "request_id"),
    ("GET", "/config/generations/0", None, 400, "invalid_value", "generation"),
    ("GET", "/config/generations/77", None, 404, "generation_unknown", "generation"),
    ("POST", "/pools/default/purge", None, 400, "invalid_value", "action"),
    ("POST", "/pools/default/pause", b"[]", 400, "invalid_value", ""),
    ("POST", "/pools/default/pause", b"{", 400, "invalid_json", ""),
    ("POST", "/pools/default/pause", b'{"reason":"\xff"}', 400, "invalid_utf8", ""),
    ("POST", "/pools/default/pause", b'{"reason":"a","reason":"b"}', 400, "duplicate_member", ""),
    ("POST", "/pools/default/pause", b'{"reason":NaN}', 400, "invalid_json", ""),
    ("POST", "/pools/default/pause", b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 413, "body_too_large", ""),
    ("POST", "/pools/default/pause", b"[" * 30_000 + b"]" * 30_000, 400, "nested_too_deep", ""),
    ("POST", "/pools/default/pause", b'{"reason":7}', 400, "invalid_value", "reason"),
    ("POST", "/pools/default/pause", b'{"colour":"red"}', 400, "invalid_value", "colour"),
    ("POST", "/requests/cancel", b'{"request_ids":[]}', 400, "invalid_value", "request_ids"),
    ("POST", "/requests/cancel", b'{"request_ids":["a","b c"]}', 400, "invalid_value", "request_ids.1"),
    ("POST", "/keys", b"{}", 400, "missing_member", "name"),
    ("POST", "/keys", b'{"name":"a","roles":["root"]}', 400, "invalid_value", "roles.0"),
    ("POST", "/keys", b'{"name":"a\\n"}', 400, "invalid_value", "name"),
    ("POST", "/keys", b'{"name":"a","cost":0}', 400, "invalid_value", "cost"),
    ("GET", "/nowhere", None, 404, "not_found", ""),
    ("DELETE", "/pools", None, 405, "method_not_allowed", ""),
]  # fmt: skip


async def test_what_is_wrong_is_told_in_one_form_with_the_field_named(control: ControlStack) -> None:
    for method, path, body, status, code, param in WRONG:
        headers = {"content-type": "application/json"} if body else {}
        answer = await control.http().request(method, path, content=body, headers=headers)
        assert told(answer) == (status, code), (method, path, answer.text)
        assert answer.json()["error"]["param"] == (param or None), (method, path, answer.text)
    form = await control.http().post("/keys", data={"name": "a"})
    assert told(form) == (415, "unsupported_media_type")


async def test_a_key_of_a_pool_that_is_not_there_is_made_with_a_note(control: ControlStack) -> None:
    grant = {"name": "early", "pools": ["backfill", "later"], "pool": "later"}
    answer = await control.http().post("/keys", json=grant)
    assert answer.status_code == 201
    assert answer.json()["notes"] == [f"pool 'later' is not configured in group {control.group}"]


async def test_answers_carry_an_id_and_are_not_to_be_stored(control: ControlStack) -> None:
    document = await control.http().get("/openapi.json", headers={"x-request-id": "mine"})
    assert document.headers["x-request-id"] == "mine"
    for path in ("/pools", "/requests/nothing"):
        answer = await control.http().get(path, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert answer.headers["cache-control"] == "no-store"
    assert len((await control.get("/pools")).headers["x-request-id"]) == 32

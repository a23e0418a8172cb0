"""Bearer keys at the front door: who gets in, what they may, how soon a change counts, and what is told meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import structlog.testing

from dispatch.fabric.api_keys import Grant as KeyGrant
from dispatch.fabric.api_keys import NewKey, Role, new_key
from tests.support.calls import COMPLETION
from tests.support.front import exchange, head
from tests.support.groups import default_document
from tests.support.producing import eye, until
from tests.support.stack import Stack, stack
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
SLACK_S = 3.0
"""What a busy machine may take on top of each bound."""


@asynccontextmanager
async def keyed(url: str, **more: Any) -> AsyncIterator[tuple[Stack, StubBackend, httpx.AsyncClient]]:
    """Start a stack that asks for keys as soon as there is one."""
    async with (
        StubBackend(lambda _: json_answer(COMPLETION)) as stub,
        stack(url, f"{stub.url}/v1", keys="auto", **more) as path,
        httpx.AsyncClient(base_url=path.url, timeout=30) as client,
    ):
        yield path, stub, client


def showing(key: NewKey, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key.token}", **headers}


def refused(answer: httpx.Response, status: int, code: str) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert answer.headers["x-dispatch-reason"] == f"rejected-{code}"
    assert set(error) == {"message", "type", "param", "code"}
    assert ("www-authenticate" in answer.headers) is (status == 401)
    return str(error["message"])


async def test_a_key_lets_its_holder_in_and_nobody_else(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (path, stub, client):
        assert (await client.post(CHAT, json=BODY)).status_code == 200  # there is no key yet
        key = path.create_key()
        await until(lambda: path.submitted() == 1)
        started = time.monotonic()
        while (answer := await client.post(CHAT, json=BODY)).status_code == 200:
            assert time.monotonic() - started < 2 + SLACK_S
        assert "Authorization: Bearer" in refused(answer, 401, "missing_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        submitted, called = path.submitted(), len(stub.requests)
        for value in ("Bearer nonsense", f"Bearer {new_key(KeyGrant(name='x')).token}", "Basic dTpw"):
            refused(await client.post(CHAT, json=BODY, headers={"authorization": value}), 401, "invalid_api_key")
        assert (path.submitted(), len(stub.requests)) == (submitted, called)
        assert (await client.post(CHAT, json=BODY, headers=showing(key))).status_code == 200


async def test_nothing_is_read_of_a_call_before_its_key_is_right(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (path, _, _client):
        path.create_key()
        for lines in ([b"content-length: 9000000000"], [b"transfer-encoding: chunked"], [b"content-type: text/plain"]):
            asked = head([b"POST /v1/chat/completions HTTP/1.1", b"host: x", b"expect: 100-continue", *lines])
            heard = await exchange(path.port, asked, then_wait=5)
            assert heard.status == 401, heard  # and not the leave to send, nor what is wrong with it
        for call in (b"GET /v1/models HTTP/1.1", b"GET /pools/nowhere/v1/models HTTP/1.1"):
            assert (await exchange(path.port, head([call, b"host: x"]))).status == 401
        for call in (b"GET /healthz HTTP/1.1", b"GET /readyz HTTP/1.1"):
            assert (await exchange(path.port, head([call, b"host: x"]))).status == 200


async def test_a_key_is_for_its_pools_and_its_roles(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (path, _, client):
        one = path.create_key(pools=("backfill",))
        two = path.create_key(pools=("backfill", "interactive"))
        watcher = path.create_key(roles=(Role.OBSERVE,))
        answer = await client.post(CHAT, json=BODY, headers=showing(one, **{"x-dispatch-pool": "interactive"}))
        assert "'interactive' is not allowed to this key; allowed: backfill" in refused(answer, 403, "pool_not_allowed")
        answer = await client.post(f"/pools/default{CHAT}", json=BODY, headers=showing(two))
        assert "allowed: backfill, interactive" in refused(answer, 403, "pool_not_allowed")
        refused(await client.post(CHAT, json=BODY, headers=showing(two)), 403, "pool_not_allowed")
        refused(await client.post("/pools/nowhere" + CHAT, json=BODY, headers=showing(two)), 403, "pool_not_allowed")
        for key, way, pool in (
            (one, CHAT, "backfill"),  # the only one it may
            (one, f"/pools/backfill{CHAT}", "backfill"),
            (two, f"/pools/interactive{CHAT}", "interactive"),
        ):
            answer = await client.post(way, json=BODY, headers=showing(key))
            assert (answer.status_code, answer.headers["x-dispatch-pool"]) == (200, pool)
        assert "submit is needed" in refused(
            await client.post(CHAT, json=BODY, headers=showing(watcher)), 403, "role_not_allowed"
        )
        assert (await client.get("/v1/models", headers=showing(watcher))).status_code != 403
        assert (await client.get("/v1/models", headers=showing(one))).status_code != 403


async def test_what_a_key_fixes_holds_whatever_the_caller_says(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (path, _, client):
        bound = path.create_key(pool="backfill", fairness_key="team-a", cost=7)
        free = path.create_key()
        said = {"x-dispatch-fairness-key": "somebody", "x-dispatch-metadata": '{"estimated_cost_units": 2, "t": "x"}'}
        told = {}
        for key in (bound, free):
            answer = await client.post(CHAT, json=BODY, headers=showing(key, **said))
            assert answer.status_code == 200, answer.text
            told[key] = path.envelope(answer.headers["x-dispatch-request-id"]), answer.headers["x-dispatch-pool"]
        envelope, pool = told[bound]
        assert (pool, envelope["fairness_key"], envelope["estimated_cost_units"]) == ("backfill", "team-a", 7)
        assert envelope["metadata"]["t"] == "x"
        envelope, pool = told[free]
        assert (pool, envelope["fairness_key"], envelope["estimated_cost_units"]) == ("default", "somebody", 2)
        costs = {row["pool"]: int(row["cost"]) for row in path.endings()}
        assert costs == {"backfill": 7, "default": 2}
        elsewhere = showing(bound, **{"x-dispatch-pool": "interactive"})
        refused(await client.post(CHAT, json=BODY, headers=elsewhere), 403, "pool_not_allowed")


async def test_idempotency_keys_of_two_callers_never_meet(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (path, stub, client):
        one, two = path.create_key(), path.create_key()
        ids = []
        for key in (one, two, one):
            answer = await client.post(CHAT, json=BODY, headers=showing(key, **{"idempotency-key": "same"}))
            assert answer.status_code == 200
            ids.append((answer.headers["x-dispatch-request-id"], "x-dispatch-replayed" in answer.headers))
        assert (ids[0][0] == ids[2][0], ids[0][0] == ids[1][0]) == (True, False)
        assert [replayed for _, replayed in ids] == [False, False, True]
        assert len(stub.requests) == 2


async def test_a_revoked_key_stops_within_two_seconds_and_a_new_one_works_at_once(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (path, _, client):
        path.create_key()
        key = path.create_key()
        assert (await client.post(CHAT, json=BODY, headers=showing(key))).status_code == 200
        path.revoke_key(key)
        revoked = time.monotonic()
        while (answer := await client.post(CHAT, json=BODY, headers=showing(key))).status_code == 200:
            assert time.monotonic() - revoked < 2 + SLACK_S
        assert "revoked" in refused(answer, 401, "invalid_api_key")
        for _ in range(3):
            fresh = path.create_key()
            assert (await client.post(CHAT, json=BODY, headers=showing(fresh))).status_code == 200


async def test_a_callers_key_goes_nowhere_and_is_never_written_down(
    valkey: ValkeyProcess, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as logs:
        async with keyed(valkey.url) as (path, stub, client):
            key = path.create_key(name="one")
            wrong = new_key(KeyGrant(name="x"))
            for shown in (key, wrong):
                for body in (BODY, {"model": 1}, {**BODY, "messages": [{"content": "x" * 100_000}]}):
                    await client.post(CHAT, json=body, headers=showing(shown, **{"x-dispatch-pool": "interactive"}))
            assert [request.header("authorization") for request in stub.requests] == [None, None]
            stored = b""
            with eye(valkey.url) as server:
                for name in server.scan_iter(match=f"{{{path.group}}}:*", count=1000):
                    stored += name + (server.dump(name) or b"")
    said = stored.decode("latin-1") + str(logs) + "".join(capsys.readouterr()) + caplog.text
    for token in (key.token, wrong.token):
        assert token.split("_", 2)[2] not in said
    assert {"event": "key_refused", "key_id": None, "log_level": "info"} in logs


async def test_while_valkey_is_away_the_right_key_is_told_so(start_valkey: Any) -> None:
    server = start_valkey()
    async with keyed(server.url) as (path, _, client):
        key = path.create_key()
        assert (await client.post(CHAT, json=BODY, headers=showing(key))).status_code == 200
        server.pause()
        try:
            for _ in range(4):
                started = time.monotonic()
                answer = await client.post(CHAT, json=BODY, headers=showing(key))
                assert time.monotonic() - started < 1 + SLACK_S
                assert answer.status_code == 503, answer.text
                assert answer.headers["x-dispatch-reason"] == "rejected-fabric_unavailable"
                assert "Valkey" in answer.json()["error"]["message"]
            refused(await client.post(CHAT, json=BODY), 401, "missing_api_key")
            wrong = f"fd_{key.key_id}_{'x' * 43}"
            answer = await client.post(CHAT, json=BODY, headers={"authorization": f"Bearer {wrong}"})
            refused(answer, 401, "invalid_api_key")
        finally:
            server.resume()
        started = time.monotonic()
        while (await client.post(CHAT, json=BODY, headers=showing(key))).status_code != 200:
            assert time.monotonic() - started < 2 + SLACK_S


async def test_a_key_of_one_group_is_none_of_another(valkey: ValkeyProcess) -> None:
    async with keyed(valkey.url) as (one, _, client), keyed(valkey.url) as (other, _, _elsewhere):
        key, foreign = one.create_key(), other.create_key()
        assert (await client.post(CHAT, json=BODY, headers=showing(key))).status_code == 200
        refused(await client.post(CHAT, json=BODY, headers=showing(foreign)), 401, "invalid_api_key")


async def test_the_openai_package_shows_its_key_and_understands_a_refusal(valkey: ValkeyProcess) -> None:
    import openai  # noqa: PLC0415 - takes a second to load

    async with keyed(valkey.url) as (path, _, _client):
        key = path.create_key(pools=("interactive",))
        base = f"{path.url}/pools/{{}}/v1"
        async with openai.AsyncOpenAI(base_url=base.format("interactive"), api_key=key.token) as client:
            reply = await client.chat.completions.create(**BODY)
            assert reply.choices[0].message.content == "hi"
        async with openai.AsyncOpenAI(base_url=base.format("backfill"), api_key=key.token) as client:
            with pytest.raises(openai.PermissionDeniedError, match="not allowed to this key"):
                await client.chat.completions.create(**BODY)
        async with openai.AsyncOpenAI(base_url=base.format("interactive"), api_key="sk-wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**BODY)
        assert path.submitted() == 1


def test_the_default_pools_are_those_named_here() -> None:
    pools = {row["pool_id"] for row in default_document("http://x/v1")["pools"]}
    assert {"interactive", "backfill", "default"} <= pools

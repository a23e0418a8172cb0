"""Valkey goes away and comes back: what runs is told, what is new is refused in time, and all goes on by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
import redis

from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from dispatch.fabric.schema import LIMITS
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.engines import OK, Engine, Fabric, call, slow, text_of
from tests.support.groups import default_document
from tests.support.producing import eye, until
from tests.support.stack import Stack, stack
from tests.support.stub import Pause, Reset, Script, SeenRequest, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SLACK_S = 2.0
"""What a busy machine may take on top of each bound."""


def http(path: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=path.url, timeout=60)


async def refused_in_time(client: httpx.AsyncClient) -> None:
    """See that new work is refused within a second with a reason, and that only readiness suffers."""
    started = time.monotonic()
    answer = await client.post(CHAT, json=BODY)
    assert time.monotonic() - started < 1 + SLACK_S
    assert answer.status_code == 503, answer.text
    assert answer.headers["x-dispatch-reason"] == "rejected-fabric_unavailable"
    assert "Valkey" in answer.json()["error"]["message"]
    assert (await client.get("/healthz")).status_code == 200
    ready = await client.get("/readyz")
    assert ready.status_code == 503
    assert "Valkey" in ready.json()["reason"]


class Outage:
    """One way in which a server is away."""

    def __init__(self, server: ValkeyProcess) -> None:
        self.server = server

    def begin(self) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError


class Killed(Outage):
    def begin(self) -> None:
        self.server.kill()

    async def end(self) -> None:
        self.server.start()


class Frozen(Outage):
    def begin(self) -> None:
        self.server.pause()

    async def end(self) -> None:
        self.server.resume()


class Paused(Outage):
    """The server takes connections and commands, and does nothing for some seconds; then it does all of it."""

    def begin(self) -> None:
        self.client = eye(self.server.url)
        self.client.execute_command("CLIENT", "PAUSE", "2500")

    async def end(self) -> None:
        await anyio.to_thread.run_sync(self.client.ping)  # answered when the pause is over
        self.client.close()


@pytest.mark.parametrize("kind", [Killed, Frozen, Paused])
async def test_after_each_of_several_outages_idle_gateways_and_clients_serve_at_once(
    start_valkey: Callable[..., ValkeyProcess], kind: type[Outage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.fabric.glide.REQUEST_TIMEOUT_S", 1.0)
    server = start_valkey(aof=True)
    async with Engine() as engine, stack(server.url, engine.url) as path, http(path) as client:
        outage = kind(server)
        for _ in range(3):
            outage.begin()
            await refused_in_time(client)
            await anyio.sleep(1.2)
            await outage.end()
            back = time.monotonic()
            answer = await client.post(CHAT, json=BODY)
            while answer.status_code == 503 and time.monotonic() - back < 2 + SLACK_S:
                await anyio.sleep(0.05)
                answer = await client.post(CHAT, json=BODY)
            assert answer.content == COMPLETION
            assert time.monotonic() - back < 2 + SLACK_S
            await until(lambda: path.gateway.status().fabric_reachable)
            assert (await client.get("/readyz")).status_code == 200


async def test_connections_that_are_killed_or_time_out_are_not_noticed_by_callers(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    async with Engine() as engine, stack(server.url, engine.url) as path, http(path) as client:
        with eye(server.url) as admin:
            admin.config_set("timeout", 1)
            for _ in range(3):
                await anyio.sleep(1.5)
                admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                started, answer = time.monotonic(), await client.post(CHAT, json=BODY)
                while answer.status_code == 503 and time.monotonic() - started < 2 + SLACK_S:
                    answer = await client.post(CHAT, json=BODY)
                assert answer.content == COMPLETION
                assert time.monotonic() - started < 2 + SLACK_S


@pytest.mark.parametrize("kind", [Killed, Frozen, Paused])
async def test_under_load_what_was_admitted_is_executed_once_and_told(
    start_valkey: Callable[..., ValkeyProcess], kind: type[Outage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.fabric.glide.REQUEST_TIMEOUT_S", 0.6)
    server = start_valkey(aof=True)
    seen: dict[str, int] = {}

    def answer(request: SeenRequest) -> Script:
        text = text_of(request)
        seen[text] = seen.get(text, 0) + 1
        return slow(0.05 + 0.01 * (int(text) % 20))

    async with Engine() as engine:
        engine.calls = answer
        fabric = Fabric(server.url, engine.url, total_concurrent_dispatch=8, lease_ms=6000)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            outage = kind(server)
            calls = [asyncio.create_task(call(client, str(number))) for number in range(100)]
            for _ in range(2):
                await anyio.sleep(0.4)
                outage.begin()
                await anyio.sleep(1.0)
                await outage.end()
            found = await asyncio.gather(*calls)
            wrong = [one for one in found if not isinstance(one, Reply)]
            assert wrong == []
            assert seen == {str(number): 1 for number in range(100)}
            assert fabric.pool()["endings"] == {"succeeded": 100}
            assert len({row["request_id"] for row in fabric.endings()}) == len(fabric.endings()) == 100
            await fabric.until_clean()


async def test_what_runs_through_an_outage_is_settled_and_waiting_producers_are_not_taken_for_gone(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey(aof=True)
    async with Engine(slow(2.5)) as engine:
        fabric = Fabric(server.url, engine.url, total_concurrent_dispatch=2, lease_ms=4000, liveness_ms=1000)
        async with fabric.gateway(), fabric.client(liveness_ms=1000) as client:
            calls = [asyncio.create_task(call(client, str(number))) for number in range(4)]
            await until(lambda: engine.count("call") == 2)
            server.kill()
            await anyio.sleep(2)
            server.start()
            found = await asyncio.gather(*calls)
            assert [type(one) for one in found] == [Reply] * 4, found
            assert engine.count("call") == 4
            await fabric.until_clean()


async def test_what_came_due_in_the_outage_happens_after_it(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(aof=True)

    def answer(request: SeenRequest) -> Script:
        first = not any(text_of(request) == text_of(one) for one in engine.stub.requests[:-1] if one.body)
        return Script((Reset(),)) if text_of(request) == "retried" and first else Script((Pause(8), *OK.steps))

    pools = [
        {"pool_id": "default", "max_attempts": 2, "retry_base_ms": 3000, "retry_cap_ms": 3000},
        {"pool_id": "narrow", "max_concurrent": 1},
    ]
    async with Engine() as engine:
        engine.calls = answer
        fabric = Fabric(server.url, engine.url, pools=pools, endpoint={"breaker_failures": 1000}, lease_ms=20_000)
        async with fabric.gateway(), fabric.client() as client:
            retried = asyncio.create_task(call(client, "retried", timeout=60))
            holder = asyncio.create_task(call(client, "holder", pool="narrow"))
            await until(lambda: engine.count("call") >= 2)
            other = ByHand(server.url, fabric.group)
            [expiring] = other.submit("narrow", timeout_ms=2000, liveness_ms=600_000)
            server.kill()
            await anyio.sleep(3.2)
            server.start()
            await until(lambda: fabric.ending_of(expiring) == "expired", within_s=2 + SLACK_S)
            await until(lambda: engine.count("call") == 3, within_s=2 + SLACK_S)
            for one in (retried, holder):
                assert isinstance(await one, Reply)
            other.close()


async def test_an_outage_longer_than_the_lease_ends_the_runs_and_their_callers_are_told_after_it(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey(aof=True)
    async with Engine(slow(60)) as engine:
        fabric = Fabric(server.url, engine.url, lease_ms=900, liveness_ms=1000)
        async with fabric.gateway() as gateway, fabric.client(liveness_ms=1000) as client:
            running = asyncio.create_task(call(client))
            await until(lambda: engine.count("call") == 1)
            server.kill()
            await engine.stub.until(lambda stub: stub.open_connections == 0)
            assert gateway.in_flight == 0
            server.start()
            found = await running
            assert isinstance(found, RequestEnded)
            assert found.reply.ending == "lost"
            await fabric.until_clean()
        assert engine.count("call") == 1


async def test_full_memory_refuses_new_work_and_ends_what_was_admitted(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey(options=("--maxmemory-policy", "noeviction"))
    large = COMPLETION.replace(b'"hi"', b'"' + b"x" * (2 * LIMITS["inline_reply_bytes"]) + b'"')
    async with Engine() as engine, AsyncExitStack() as full:
        engine.calls = lambda _: Script((Pause(0.5), *json_answer(large).steps))
        path = await full.enter_async_context(
            stack(server.url, engine.url, **(default_document(engine.url) | {"total_concurrent_dispatch": 5}))
        )
        client = await full.enter_async_context(http(path))
        calls = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(20)]
        await until(lambda: path.submitted() == 20 and engine.count("call") >= 5)
        with redis.Redis(port=server.port) as admin:
            admin.config_set("maxmemory", 1)
            answer = await client.post(CHAT, json=BODY)
            assert (answer.status_code, answer.headers["x-dispatch-reason"]) == (503, "rejected-memory_full")
            assert [(one.status_code, one.content == large) for one in await asyncio.gather(*calls)] == [
                (200, True)
            ] * 20
            assert path.leases() == 0
            admin.config_set("maxmemory", 0)
        assert (await client.post(CHAT, json=BODY)).content == large

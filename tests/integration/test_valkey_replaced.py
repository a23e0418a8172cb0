"""Another server behind the same address: an empty one, one without the library, one that lost the newest writes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import redis

from dispatch.config import GatewaySettings
from dispatch.contract import Reply
from dispatch.errors import DispatchError, FabricUnavailable, OutcomeUnknown
from dispatch.fabric.schema import key
from dispatch.gateway import Gateway
from dispatch.producer.client import DispatchClient
from tests.conftest import load_library
from tests.support.broken_library import load_broken
from tests.support.calls import COMPLETION
from tests.support.engines import OK, SILENT, Engine, Fabric, call, slow, text_of
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import eye, until
from tests.support.proxy import TcpProxy
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Script, SeenRequest
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SLACK_S = 2.0
LOAD = "dispatch scripts load"

OLDER = {
    "schema.toml": [("version = 1\n# Names", "version = 0\n# Names")],
    "functions/lease_settle.lua": [("local FIRST_ITEM, ITEM_LENGTH = 5, 16", "local FIRST_ITEM, ITEM_LENGTH = 5, 9")],
}
"""A library that takes settles in another form."""


def http(path: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=path.url, timeout=60)


async def until_served(client: httpx.AsyncClient, within_s: float) -> None:
    with anyio.fail_after(within_s):
        while (await client.post(CHAT, json=BODY)).content != COMPLETION:  # noqa: ASYNC110 - asked from outside
            await anyio.sleep(0.05)


async def refused_by_library(client: httpx.AsyncClient) -> None:
    """See that calls and readiness name the command that helps, and that liveness is untouched."""
    answer = await client.post(CHAT, json=BODY)
    assert (answer.status_code, answer.headers["x-dispatch-reason"][:9]) == (503, "rejected-")
    assert LOAD in answer.json()["error"]["message"]
    ready = await client.get("/readyz")
    assert ready.status_code == 503
    assert LOAD in ready.json()["reason"]
    assert (await client.get("/healthz")).status_code == 200


async def test_an_empty_server_is_told_and_served_as_soon_as_it_is_set_up(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()  # without AOF: a restart is another server
    async with Engine(SILENT) as engine, stack(server.url, engine.url) as path, http(path) as client:
        running = asyncio.create_task(path.client.complete(model="m", messages=BODY["messages"], timeout=100))
        await until(lambda: engine.count("call") == 1)
        held = engine.last_call.connection
        server.kill()
        server.start()
        await until(lambda: LOAD in path.gateway.status().fabric_problem)
        await refused_by_library(client)
        with eye(server.url) as look:
            assert look.function_list() == []  # no gateway loads anything
        load_library(server.url)
        # The caller is told, the run is broken off, and its slot is free.
        with pytest.raises(OutcomeUnknown, match="does not know request"):
            with anyio.fail_after(10):
                await running
        await engine.stub.until(lambda _: held.closed_by == "client")
        await until(lambda: path.gateway.in_flight == 0)
        ready = await client.get("/readyz")
        assert (ready.status_code, "has no configuration" in ready.json()["reason"]) == (503, True)
        engine.calls = OK
        configure(server.url, path.group, default_document(engine.url))
        await until_served(client, 3 + SLACK_S)
        assert (await client.get("/readyz")).status_code == 200
        [row] = path.section("gateways")["rows"]
        assert row["gateway_id"] == path.gateway.settings.gateway_id


async def test_a_gateway_that_knows_an_endpoint_configures_the_empty_group_again(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server, group = start_valkey(), unique_group()
    async with Engine() as engine:
        settings = GatewaySettings(valkey_url=server.url, fabric_group=group, endpoint_url=engine.url)
        async with Gateway(settings) as gateway, DispatchClient(server.url, fabric_group=group) as client:
            assert isinstance(await call(client), Reply)
            with eye(server.url) as look:
                look.flushall()  # the group goes under an idle gateway whose connections stay
                await until(lambda: look.exists(key(group, "group")) == 1)
            await until(lambda: gateway.status().fabric_reachable)
            begun = time.monotonic()
            assert isinstance(await call(client), Reply)
            assert time.monotonic() - begun < 2 + SLACK_S


async def test_the_config_of_the_new_group_is_used_though_it_has_the_same_number(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    async with Engine() as engine, Engine() as other, stack(server.url, engine.url) as path, http(path) as client:
        await until_served(client, 5)
        server.kill()
        server.start()
        load_library(server.url)
        assert configure(server.url, path.group, default_document(other.url)) == 1
        await until_served(client, 5 + SLACK_S)
        assert (engine.count("call"), other.count("call")) == (1, 1)


async def test_functions_flushed_under_load_cost_no_admitted_request(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server, seen = start_valkey(), Counter[str]()

    def answer(request: SeenRequest) -> Script:
        seen[text_of(request)] += 1
        return slow(0.05)

    async with Engine() as engine:
        engine.calls = answer
        fabric = Fabric(server.url, engine.url, total_concurrent_dispatch=8, lease_ms=6000)
        async with fabric.gateway() as gateway, fabric.gateway(), fabric.client() as client:
            calls = [asyncio.create_task(call(client, str(number))) for number in range(100)]
            await until(lambda: len(seen) > 10)
            with eye(server.url) as look:
                for _ in range(2):
                    look.function_flush()
                    await until(lambda: LOAD in gateway.status().fabric_problem)
                    refused = await call(client, "refused")
                    assert LOAD in str(refused), refused
                    assert look.function_list() == []
                    load_library(server.url)
                    await until(lambda: gateway.status().fabric_reachable)
            found = await asyncio.gather(*calls)
            assert [one for one in found if not isinstance(one, Reply)] == []
            assert seen == Counter({str(number): 1 for number in range(100)})
            await fabric.until_clean()


async def test_an_older_library_is_told_and_costs_no_result(
    start_valkey: Callable[..., ValkeyProcess], tmp_path: Path
) -> None:
    server = start_valkey()
    async with Engine() as engine, stack(server.url, engine.url) as path, http(path) as client:
        engine.calls = slow(1.0)
        running = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(3)]
        await until(lambda: engine.count("call") == 3)
        with eye(server.url) as look:
            look.function_flush()
        load_broken(server, tmp_path, OLDER)
        await until(lambda: "contract 0" in path.gateway.status().fabric_problem)
        await refused_by_library(client)
        await anyio.sleep(0.5)
        with eye(server.url) as look:
            look.function_flush()
        load_library(server.url)
        assert [(await one).content for one in running] == [COMPLETION] * 3
        assert engine.count("call") == 3
        await until_served(client, 3 + SLACK_S)


async def test_a_primary_that_lost_the_newest_writes_leads_to_no_second_run(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    old, new = start_valkey(), start_valkey(library=False)
    seen = Counter[str]()

    def answer(request: SeenRequest) -> Script:
        text = text_of(request)
        seen[text] += 1
        if text.startswith("done"):
            return slow(0.1)
        return Script((Hold(),)) if text.startswith("long") and seen[text] > 1 else slow(3.0)

    with redis.Redis(port=old.port) as before, redis.Redis(port=new.port) as after:
        async with Engine() as engine, TcpProxy(old.port) as front, TcpProxy(old.port) as between:
            engine.calls = answer
            after.execute_command("REPLICAOF", "127.0.0.1", str(between.port))
            await until(lambda: after.info("replication")["master_link_status"] == "up", within_s=15)
            fabric = Fabric(old.url, engine.url, lease_ms=20_000)
            url = f"valkey://127.0.0.1:{front.port}"
            settings = GatewaySettings(valkey_url=url, fabric_group=fabric.group, drain_timeout_ms=500)
            async with DispatchClient(url, fabric_group=fabric.group, close_ms=300) as client:
                names = [f"done {number}" for number in range(10)] + [f"long {number}" for number in range(10)]
                calls = {name: asyncio.create_task(call(client, name)) for name in names}
                await until(lambda: fabric.pool()["pending"] == 20)
                await until(lambda: after.exists(key(fabric.group, "group")) == 1)
                await until(lambda: _caught_up(before))
                between.freeze()
                async with Gateway(settings) as gateway:
                    await until(lambda: len(seen) == 20 and sum(calls[name].done() for name in names) == 10)
                    front._target = new.port
                    old.kill()
                    between.cut()
                    after.execute_command("REPLICAOF", "NO", "ONE")
                    front.cut()
                    fabric.url = new.url
                    found = dict(zip(names, await asyncio.gather(*calls.values()), strict=True))
                    assert all(isinstance(one, Reply | DispatchError) for one in found.values())
                    assert seen == Counter(dict.fromkeys(names, 1))
                    assert {name for name in names if isinstance(found[name], Reply)} == set(names)
                    await until(lambda: gateway.in_flight == 0)
                    await fabric.until_clean()
                    endings = Counter(row["ending"] for row in fabric.endings())
                    assert endings == {"succeeded": 10, "lost": 10}  # what had been told already cannot be told again


async def test_a_demoted_primary_is_left_for_its_successor(start_valkey: Callable[..., ValkeyProcess]) -> None:
    old, new = start_valkey(), start_valkey(library=False)
    with redis.Redis(port=old.port) as before, redis.Redis(port=new.port) as after:
        async with Engine() as engine, TcpProxy(old.port) as front:
            after.execute_command("REPLICAOF", "127.0.0.1", str(old.port))
            await until(lambda: after.info("replication")["master_link_status"] == "up", within_s=15)
            fabric, url = Fabric(old.url, engine.url), f"valkey://127.0.0.1:{front.port}"
            settings = GatewaySettings(valkey_url=url, fabric_group=fabric.group, drain_timeout_ms=500)
            async with Gateway(settings) as gateway, DispatchClient(url, fabric_group=fabric.group) as client:
                assert isinstance(await call(client), Reply)
                await until(lambda: _caught_up(before))
                front._target = new.port  # connections that are open stay where they are
                after.execute_command("REPLICAOF", "NO", "ONE")
                before.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
                begun = time.monotonic()
                while not isinstance(found := await call(client), Reply):
                    assert isinstance(found, FabricUnavailable), found
                    await anyio.sleep(0.05)
                assert time.monotonic() - begun < 2 + SLACK_S
                await until(lambda: gateway.status().fabric_reachable)


def _caught_up(primary: redis.Redis) -> bool:
    facts = primary.info("replication")
    replica = facts.get("slave0")
    return bool(replica) and replica["offset"] >= facts["master_repl_offset"]

"""Limits are the group's: any number of gateways share them, and every queue has a bound."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import httpx
import pytest

from dispatch.errors import RequestRefused
from dispatch.fabric import functions as f
from dispatch.fabric.sync import BlockingConnection
from dispatch.producer.client import DispatchClient
from tests.behaviours.scene import BOTH_CLIENTS, Caller, Watching, assert_settled, gateway_on, section
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.groups import configure, unique_group
from tests.support.producing import MESSAGES, until, wide_group
from tests.support.stack import stack
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio


def calls(client: DispatchClient, count: int, **more: Any) -> list[asyncio.Task[Any]]:
    return [
        asyncio.create_task(client.complete(**dict[str, Any](model="m", messages=MESSAGES, timeout=30) | more))
        for _ in range(count)
    ]


async def test_three_gateways_share_one_cap(valkey: ValkeyProcess) -> None:
    group, executor = wide_group(valkey.url, total_concurrent_dispatch=5), Watching()
    async with (
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor, valkey_client="redis"),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        sent = calls(client, 40)
        await executor.until_begun(5)
        await anyio.sleep(0.1)
        assert executor.begun.total() == 5
        counted = section(valkey.url, group, "group")
        assert (counted["in_flight"], counted["pending"]) == (5, 35)
        executor.release()
        assert all(reply.succeeded for reply in await asyncio.gather(*sent))
    assert executor.peak["group"] == 5
    assert_settled(valkey.url, group)


async def test_protected_slots_are_seen_by_every_gateway(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "interactive", "min_concurrent": 2}, {"pool_id": "backfill", "quantum": 16}]
    group, executor = wide_group(valkey.url, total_concurrent_dispatch=4, pools=pools), Watching()
    async with (
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        noise = calls(client, 30, pool="backfill")
        await executor.until_begun(4)
        mine = calls(client, 1, pool="interactive", request_id="i-1")
        mine += calls(client, 1, pool="interactive", request_id="i-2")
        await until(lambda: section(valkey.url, group, "group")["pending"] == 28)
        for number in (1, 2):  # whichever gateway frees the slot, it is theirs
            executor.release(executor.order[number])
            await executor.until_begun(4 + number)
        assert set(executor.order[4:]) == {"i-1", "i-2"}
        executor.release()
        await asyncio.gather(*noise, *mine)
    assert executor.peak["group"] == 4


async def test_the_caps_of_pools_and_endpoints_hold_over_all_gateways(valkey: ValkeyProcess) -> None:
    pools = [
        {"pool_id": "capped", "max_concurrent": 3},
        {"pool_id": "one", "endpoint": "small"},
        {"pool_id": "two", "endpoint": "small", "quantum": 4},
        {"pool_id": "free"},
    ]
    address = {"url": "http://127.0.0.1:9/v1"}
    endpoints = [{"endpoint_id": "default"} | address, {"endpoint_id": "small", "max_concurrent": 2} | address]
    group = wide_group(valkey.url, pools=pools, endpoints=endpoints, default_endpoint="default")
    executor = Watching(held=False, takes_s=0.004)
    async with (
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        gateway_on(valkey.url, group, executor),
        DispatchClient(valkey.url, fabric_group=group) as client,
    ):
        sent = [task for pool in ("capped", "one", "two", "free") for task in calls(client, 40, pool=pool)]
        assert all(reply.succeeded for reply in await asyncio.gather(*sent))
    assert (executor.peak["pool capped"], executor.peak["endpoint small"]) == (3, 2)
    assert_settled(valkey.url, group)


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_a_full_queue_refuses_at_once_with_what_is_there_and_what_is_allowed(
    valkey: ValkeyProcess, kind: str
) -> None:
    group = wide_group(valkey.url, pools=[{"pool_id": "default", "max_queue_depth": 2}])
    async with Caller(kind, valkey.url, fabric_group=group) as caller, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(caller.ended)
        await until(lambda: section(valkey.url, group, "group")["pending"] == 2)
        with pytest.raises(RequestRefused) as refused:
            await caller.complete()
        error = refused.value
        assert (error.reason, error.pool_id, error.value, error.limit) == ("pool_full", "default", 2, 2)
        await caller.aclose()  # tells the two that wait
    assert_settled(valkey.url, group)


def test_every_bound_of_a_queue_is_refused_by_its_name_and_counted(valkey: ValkeyProcess) -> None:
    document = {
        "max_queued": 5,
        "max_payload_bytes": 2000,
        "pools": [
            {"pool_id": "deep", "max_queue_depth": 2},
            {"pool_id": "heavy", "max_queue_bytes": 1000},
            {"pool_id": "off", "enabled": False},
            {"pool_id": "default"},
        ],
        "endpoints": [{"endpoint_id": "default", "url": "http://127.0.0.1:9/v1"}],
    }
    group = unique_group()
    configure(valkey.url, group, document)
    hand = ByHand(valkey.url, group)
    hand.submit("deep", 2)
    assert hand.refusal("deep") == "pool_full"
    hand.submit("heavy", size=999)
    assert hand.refusal("heavy") == "pool_bytes_full"
    assert hand.refusal("off") == "pool_disabled"
    hand.submit("default", 2)
    assert hand.refusal("default") == "group_full"
    assert [hand.pool(name)["rejected"] for name in ("deep", "heavy", "off", "default")] == [
        {"pool_full": 1},
        {"pool_bytes_full": 1},
        {"pool_disabled": 1},
        {"group_full": 1},
    ]
    hand.close()


async def test_http_callers_of_a_full_queue_are_told_when_to_come_back(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default", "max_queue_depth": 1}]
    call: dict[str, Any] = {"url": "/v1/chat/completions", "json": {"model": "m", "messages": MESSAGES}}
    async with (
        StubBackend(json_answer(COMPLETION)) as stub,
        stack(valkey.url, f"{stub.url}/v1", pools=pools) as path,
        httpx.AsyncClient(base_url=path.url, timeout=20) as http,
    ):
        assert (await http.post(**call)).status_code == 200  # before anything was launched, it is not known
        with BlockingConnection(valkey.url) as connection:
            connection.run(path.group, f.pool_pause("default", "pause", actor="test"))
        waiting = asyncio.create_task(http.post(**call))
        await until(lambda: section(valkey.url, path.group, "group")["pending"] == 1)
        answer = await http.post(**call)
        assert (answer.status_code, answer.headers["x-dispatch-reason"]) == (429, "rejected-pool_full")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert (path.submitted(), len(stub.requests)) == (2, 1)
        waiting.cancel()

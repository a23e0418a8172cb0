"""Who lives and who does not: nothing but silence of the producer itself is taken for its death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dispatch.contract import Reply
from dispatch.errors import OutcomeUnknown
from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome, Settlement
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from tests.behaviours.scene import (
    BOTH_CLIENTS,
    Caller,
    Watching,
    assert_settled,
    gateway_on,
    records,
    section,
)
from tests.support.by_hand import ByHand
from tests.support.producing import MESSAGES, eye, owner, until, wide_group
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

TTL_MS = 900
BLOCKED_S = 1.6
"""Much longer than the marker lives."""


def silence(hand: ByHand, producer: str) -> None:
    """Let a producer's marker run out now."""
    with eye(hand.url) as client:
        assert client.delete(key(hand.group, "alive", producer=producer)) == 1


def test_work_of_a_dead_producer_is_dropped_before_dispatch(hand: ByHand) -> None:
    hand.submit(count=2, producer_id="dead")
    hand.submit(producer_id="alive")
    silence(hand, "dead")
    assert [lease.request_id for lease in hand.claim(8)] == ["r3"]
    row = hand.pool("default")
    assert (row["endings"], row["launched"]) == ({"producer_gone": 2}, 1)
    assert {record["producer"] for record in records(hand.url, hand.group)} == {"dead"}


def test_the_reply_to_a_dead_producer_is_dropped_and_its_outcome_is_kept(hand: ByHand) -> None:
    hand.submit(producer_id="dead")
    leases = hand.claim(1)
    silence(hand, "dead")
    hand.settle(leases)
    [record] = records(hand.url, hand.group)
    assert (record["ending"], record["outcome"]) == ("reply_dropped", "succeeded")
    assert hand.pool("default")["endings"] == {"reply_dropped": 1}
    with eye(hand.url) as client:
        assert client.exists(key(hand.group, "replies", producer="dead")) == 0


def test_the_first_request_cannot_race_the_first_heartbeat(hand: ByHand) -> None:
    hand.submit(producer_id="new", liveness_ms=60_000)  # no other sign of life was ever given
    with eye(hand.url) as client:
        assert client.pttl(key(hand.group, "alive", producer="new")) > 50_000
    assert len(hand.claim(1)) == 1


async def test_a_store_error_is_not_death(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    async with TcpProxy(server.port) as proxy, AsyncExitStack() as stack:
        calls = []
        for kind in BOTH_CLIENTS:
            options = {"fabric_group": group, "producer_id": kind, "liveness_ms": TTL_MS}
            caller = await stack.enter_async_context(Caller(kind, f"valkey://127.0.0.1:{proxy.port}", **options))
            calls.append(asyncio.create_task(caller.complete()))
        await until(lambda: section(server.url, group, "group")["pending"] == 2)
        for _ in range(3):  # connections break and are refused, for longer in all than the marker lives
            proxy.refuse()
            await anyio.sleep(TTL_MS / 3000)
            proxy.allow()
            await anyio.sleep(TTL_MS / 2000)
            assert None not in [owner(server.url, group, kind) for kind in BOTH_CLIENTS]
        with eye(server.url) as admin:
            admin.config_set("maxmemory", 1)  # then the server takes no writes
            await anyio.sleep(TTL_MS / 1000)
            admin.config_set("maxmemory", 0)
            library = admin.execute_command("FUNCTION", "DUMP")
            admin.execute_command("FUNCTION", "FLUSH")  # then it has no functions
            await anyio.sleep(TTL_MS / 2000)
            admin.execute_command("FUNCTION", "RESTORE", library)
        async with gateway_on(server.url, group, Watching(held=False)):
            assert [reply.ending for reply in await asyncio.gather(*calls)] == ["succeeded"] * 2


async def test_a_server_that_answers_with_errors_only_is_not_death(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    async with DispatchClient(server.url, fabric_group=group, producer_id="p", liveness_ms=TTL_MS) as client:
        call = asyncio.create_task(client.complete(model="m", messages=MESSAGES, request_id="r", timeout=30))
        await until(lambda: section(server.url, group, "group")["pending"] == 1)
        with eye(server.url) as admin:
            for _ in range(3):
                admin.execute_command("ACL", "SETUSER", "default", "nocommands", "+acl", "+client")
                await anyio.sleep(TTL_MS / 3000)
                admin.execute_command("ACL", "SETUSER", "default", "allcommands")
                await anyio.sleep(TTL_MS / 3000)
            assert owner(server.url, group, "p") is not None
        async with gateway_on(server.url, group, Watching(held=False)):
            assert (await call).succeeded


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_a_callback_that_blocks_does_not_stop_the_heartbeat(valkey: ValkeyProcess, kind: str) -> None:
    group, executor = wide_group(valkey.url), Watching(held=False)
    options: dict[str, Any] = {"fabric_group": group, "producer_id": "p", "liveness_ms": TTL_MS}

    def block(finished: int, _total: int) -> None:
        if finished == 1:  # in the event loop, or in the thread that asked
            end = time.monotonic() + BLOCKED_S
            while time.monotonic() < end:
                assert owner(valkey.url, group, "p") is not None
                time.sleep(0.02)

    items = [{"model": "m", "messages": MESSAGES, "timeout": 30} for _ in range(6)]
    async with gateway_on(valkey.url, group, executor) as gateway, Caller(kind, valkey.url, **options) as caller:
        await gateway.check(1)
        if caller.blocking is not None:
            client = caller.blocking
            replies = await anyio.to_thread.run_sync(lambda: client.batch_generate(items, block, concurrency=2))
        else:
            assert caller.asynchronous is not None
            replies = await caller.asynchronous.batch_generate(items, block, concurrency=2)
    assert [getattr(reply, "ending", reply) for reply in replies] == ["succeeded"] * 6
    assert_settled(valkey.url, group)


async def lengths_of_replies_after_a_block(url: str, blocked_s: float) -> list[int] | OutcomeUnknown:
    """Block the event loop while a small and a large reply come in time; returns what their callers get."""
    group = wide_group(url)
    hand = ByHand(url, group)
    async with DispatchClient(url, fabric_group=group) as client:
        calls = [
            asyncio.create_task(client.complete(model="m", messages=MESSAGES, request_id=name, timeout=0.5))
            for name in ("small", "large")
        ]
        await until(lambda: section(url, group, "group")["pending"] == 2)
        hand.connection.put(key(group, "reply_body", id="large"), b"x" * 100_000, ttl_ms=60_000)
        items = [
            Settlement(
                request_id=lease.request_id, fence=lease.fence, outcome=Outcome.SUCCEEDED, head=b"{}",
                by_reference=lease.request_id == "large",
            )
            for lease in hand.claim(2)
        ]  # fmt: skip
        hand.run(f.lease_settle("g", "g/1", nonce="n", want=0, items=items))
        hand.close()
        time.sleep(blocked_s)  # noqa: ASYNC251 - a callback that blocks is what this is about
        replies = await asyncio.gather(*calls, return_exceptions=True)
    lost = [reply for reply in replies if isinstance(reply, BaseException)]
    if lost:
        assert isinstance(lost[0], OutcomeUnknown), lost
        return lost[0]
    return [len(reply.body) for reply in replies if isinstance(reply, Reply)]


@pytest.mark.parametrize("blocked_s", [2.53, 3.0], ids=["until just after", "for longer"])  # than 0.5 s and the grace
async def test_replies_that_came_while_the_event_loop_was_blocked_are_handed_over(
    valkey: ValkeyProcess, blocked_s: float
) -> None:
    for _ in range(3):  # they are looked for within a second, which may be too short on a very busy machine
        found = await lengths_of_replies_after_a_block(valkey.url, blocked_s)
        if isinstance(found, list):
            break
    assert found == [0, 100_000]


def test_an_outage_longer_than_a_marker_lives_is_not_death_however_long_leases_are(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey(aof=True)
    hand = ByHand(server.url, wide_group(server.url, lease_ms=60_000, liveness_ms=900))
    hand.beat()
    hand.submit(liveness_ms=900)
    server.kill()
    time.sleep(1.2)
    server.start()
    hand.beat()
    assert [lease.request_id for lease in hand.claim(1)] == ["r1"]
    hand.close()

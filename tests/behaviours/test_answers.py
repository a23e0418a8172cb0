"""Whatever becomes of a request, its caller is told at once: nobody waits out a timeout for something that is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dispatch.contract import Reply
from dispatch.errors import OutcomeUnknown
from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from tests.behaviours.scene import BOTH_CLIENTS, Caller, Watching, assert_settled, gateway_on, section
from tests.support.by_hand import ByHand
from tests.support.producing import eye, until, wide_group
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

AT_ONCE_S = 3.0
"""The callers' timeout is ten times as long."""


@asynccontextmanager
async def waiting(valkey: ValkeyProcess, kind: str, ids: tuple[str, ...]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield a group and tasks of callers whose requests stand in its queue."""
    group = wide_group(valkey.url)
    async with Caller(kind, valkey.url, fabric_group=group) as caller:
        tasks = {name: asyncio.create_task(caller.ended(request_id=name, timeout=30)) for name in ids}
        await until(lambda: section(valkey.url, group, "group")["pending"] == len(ids))
        yield group, tasks
        await caller.aclose()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def told(tasks: dict[str, Any]) -> dict[str, Reply]:
    with anyio.fail_after(AT_ONCE_S):
        replies = await asyncio.gather(*tasks.values())
    return dict(zip(tasks, replies, strict=True))


@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_dropped_and_malformed_requests_are_answered_at_once(valkey: ValkeyProcess, kind: str) -> None:
    async with waiting(valkey, kind, ("body", "envelope", "purged")) as (group, tasks):
        with eye(valkey.url) as client:
            client.hset(key(group, "request", id="body"), "body", b"{}")
            client.hdel(key(group, "request", id="envelope"), "envelope")
        hand = ByHand(valkey.url, group)
        assert hand.run(f.request_cancel("purged", actor="operator", reason="wrong prompt")).status == "CANCELLED"
        hand.close()
        async with gateway_on(valkey.url, group, Watching(held=False)):
            replies = await told(tasks)
        assert {name: reply.ending for name, reply in replies.items()} == {
            "body": "malformed", "envelope": "malformed", "purged": "cancelled",
        }  # fmt: skip
        sentences = {name: reply.error.message for name, reply in replies.items() if reply.error is not None}
        assert "cannot be read" in sentences["body"]
        assert "wrong prompt" in sentences["purged"]
        assert_settled(valkey.url, group)


async def test_an_envelope_that_no_gateway_can_read_is_answered_at_once(valkey: ValkeyProcess) -> None:
    async with waiting(valkey, "asynchronous", ("r",)) as (group, tasks):
        with eye(valkey.url) as client:
            client.hset(key(group, "request", id="r"), "envelope", b'{"contract":1')
        async with gateway_on(valkey.url, group, Watching(held=False)):
            reply = (await told(tasks))["r"]
        assert reply.ending == "failed"
        assert reply.error is not None
        assert (reply.error.type, reply.error.source) == ("envelope_unreadable", "dispatch")


async def test_a_body_that_is_not_there_any_more_is_answered_at_once(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url)
    async with Caller("asynchronous", valkey.url, fabric_group=group) as caller:
        large = [{"role": "user", "content": "x" * 10_000}]
        call = asyncio.create_task(caller.ended(messages=large, request_id="r"))
        await until(lambda: section(valkey.url, group, "group")["pending"] == 1)
        with eye(valkey.url) as look:
            look.delete(*look.keys(f"{{{group}}}:body:llm:request:*"))
        async with gateway_on(valkey.url, group, Watching(held=False)):
            reply = (await told({"r": call}))["r"]
    assert (reply.ending, reply.error and reply.error.type) == ("failed", "body_missing")


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.EXPIRED, Outcome.LOST])
async def test_every_outcome_of_a_gateway_is_told_to_the_caller(valkey: ValkeyProcess, outcome: Outcome) -> None:
    async with waiting(valkey, "asynchronous", ("r",)) as (group, tasks):
        hand = ByHand(valkey.url, group)
        hand.settle(hand.claim(1), outcome=outcome)
        hand.close()
        reply = (await told(tasks))["r"]
        assert (reply.ending, reply.attempt) == (outcome.value, 1)


async def test_a_fault_of_the_gateway_itself_is_told_to_the_caller(valkey: ValkeyProcess) -> None:
    executor = Watching(held=False)
    executor.error = RuntimeError("a bug")
    async with waiting(valkey, "blocking", ("r",)) as (group, tasks):
        async with gateway_on(valkey.url, group, executor):
            reply = (await told(tasks))["r"]
        assert (reply.ending, reply.error and reply.error.type) == ("failed", "gateway_fault")


async def test_a_caller_whose_group_lost_its_request_is_told_at_once(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url)
    async with DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=300) as client:
        call = asyncio.create_task(client.complete(model="m", messages=[], request_id="r", timeout=30))
        await until(lambda: section(valkey.url, group, "group")["pending"] == 1)
        with eye(valkey.url) as look:  # an eviction, or a server that came back with less than it had
            look.delete(key(group, "request", id="r"), key(group, "alive", producer="p"))
        with anyio.fail_after(AT_ONCE_S), pytest.raises(OutcomeUnknown):
            await call

"""A reply tells of the attempts before it, over HTTP and through the SDK."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from dispatch import DispatchClient
from dispatch.contract import Reply
from dispatch.errors import RequestEnded
from dispatch.fabric.functions import lease_reap
from dispatch.fabric.records import Lease
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.producing import MESSAGES, until, wide_group
from tests.support.stack import Stack, stack
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

OK = json_answer(COMPLETION)
BUSY = json_answer(b'{"error":{"message":"busy","type":"x","param":null,"code":null}}', status="503 Busy")
POOLS: list[dict[str, Any]] = [
    {"pool_id": "default", "quantum": 1, "max_attempts": 3, "retry_base_ms": 10, "retry_cap_ms": 20}
]


async def over_http(path: Stack) -> httpx.Response:
    async with httpx.AsyncClient(base_url=path.url, timeout=30) as client:
        return await client.post("/v1/chat/completions", json={"model": "m", "messages": MESSAGES})


async def through_sdk(path: Stack, **more: Any) -> Reply:
    try:
        return await path.client.complete(model="m", messages=MESSAGES, timeout=20, **more)
    except RequestEnded as error:
        return error.reply


async def test_a_reply_of_the_first_attempt_says_nothing_of_attempts(valkey: ValkeyProcess) -> None:
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1", pools=POOLS) as path:
        assert "x-dispatch-attempt" not in (await over_http(path)).headers
        reply = await through_sdk(path)
        assert (reply.attempt, reply.tries) == (1, ())


async def test_a_later_attempt_says_what_became_of_those_before(valkey: ValkeyProcess) -> None:
    limits = {"pools": POOLS, "hold_max_ms": 100}
    async with StubBackend([BUSY, BUSY, OK]) as stub, stack(valkey.url, f"{stub.url}/v1", **limits) as path:
        answer = await over_http(path)
        assert (answer.status_code, answer.headers["x-dispatch-attempt"]) == (200, "3")
    async with StubBackend([BUSY, OK]) as stub, stack(valkey.url, f"{stub.url}/v1", **limits) as path:
        reply = await through_sdk(path, request_id="r")
        again = await through_sdk(path, request_id="r")
        gateway_id = path.gateway.status().gateway_id
    assert (reply.succeeded, reply.attempt, len(stub.requests)) == (True, 2, 2)
    [first] = reply.tries
    assert (first.number, first.status, first.error_type) == (1, 503, "endpoint_overloaded")
    assert (first.gateway_id, first.endpoint_id) == (gateway_id, "default")
    assert 0 < first.claimed_ms <= first.ended_ms
    assert (again.replayed, again.tries) == (True, reply.tries)


async def test_when_no_attempt_succeeded_the_last_ones_answer_stays(valkey: ValkeyProcess) -> None:
    limits = {"pools": POOLS, "hold_max_ms": 100}
    async with StubBackend(lambda _: BUSY) as stub, stack(valkey.url, f"{stub.url}/v1", **limits) as path:
        answer = await over_http(path)
        assert (answer.status_code, answer.headers["x-dispatch-reason"]) == (503, "ended-failed")
        assert answer.headers["x-dispatch-attempt"] == str(len(stub.requests)) == "3"


async def test_an_attempt_whose_gateway_died_is_told_as_lost(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default", "quantum": 1, "delivery": "at_least_once"}]
    group = wide_group(valkey.url, pools=pools, lease_ms=1_000)
    hand = ByHand(valkey.url, group)
    replies: list[Reply] = []

    async def call(client: DispatchClient) -> None:
        replies.append(await client.complete(model="m", messages=MESSAGES, timeout=30))

    async with DispatchClient(valkey.url, fabric_group=group) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(call, client)
        await until(lambda: hand.claim(1, "gone") != [])
        leases: list[Lease] = []

        def claimed_again() -> bool:
            hand.beat(gateway="other")
            hand.run(lease_reap(limit=10))
            leases.extend(hand.claim(1, "other"))
            return leases != []

        await until(claimed_again, within_s=20)
        hand.settle(leases, gateway="other")
    hand.close()
    [lost] = replies[0].tries
    assert (replies[0].attempt, lost.number, lost.error_type, lost.gateway_id) == (2, 1, "lost", "gone")
    assert (lost.status, replies[0].replayed) == (None, False)

"""A newcomer's walk through the seed's six symptoms: each is provoked for real, and `dispatch doctor` names it."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from dispatch import DispatchClient
from dispatch.errors import DispatchError
from tests.behaviours.scene import gateway_process
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.commands import Commands
from tests.support.producing import MESSAGES, until, wide_group
from tests.support.stub import Hold, Script, SeenRequest, StubBackend, free_port, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

SYMPTOMS = (
    "pending-grows", "in-flight-sticks", "requests-vanish", "backend-errors", "fallback-missing", "history-missing",
)  # fmt: skip


def endpoints(url: str, **more: Any) -> list[dict[str, Any]]:
    return [{"endpoint_id": "default", "url": f"{url}/v1"} | more]


async def examine(valkey: ValkeyProcess, group: str) -> dict[str, dict[str, Any]]:
    """Run the doctor and return its table by symptom."""
    command = Commands(valkey.url, group)
    done = await anyio.to_thread.run_sync(lambda: command("doctor", "--json", "--window", "0.5"))
    assert done.code in {0, 1}, done.err  # 1: an audit met a group that moves
    found = {row["signal"]: row for row in done.json["signals"]}
    assert tuple(found) == SYMPTOMS
    return found


async def examine_until(valkey: ValkeyProcess, group: str, symptom: str, rule: str) -> dict[str, Any]:
    """Examine until the doctor sees the symptom for this reason; returns the cause."""
    with anyio.fail_after(90):
        while True:
            row = (await examine(valkey, group))[symptom]
            for cause in row["causes"]:
                if cause["rule"] == rule:
                    assert row["seen"] is True
                    return dict(cause)


async def call(url: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await http.post("/v1/chat/completions", json={"model": "m", "messages": MESSAGES})


@asynccontextmanager
async def calls(valkey: ValkeyProcess, group: str, count: int) -> AsyncIterator[None]:
    """Make calls whose answers nobody needs."""

    async def make(client: DispatchClient) -> None:
        with contextlib.suppress(DispatchError):
            await client.complete(model="m", messages=MESSAGES)

    async with DispatchClient(valkey.url, fabric_group=group) as client, anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(make, client)
        yield
        tasks.cancel_scope.cancel()


def answering(_request: SeenRequest) -> Script:
    return json_answer(COMPLETION)


@contextmanager
def arriving(hand: ByHand, pool: str) -> Iterator[None]:
    """Submit again and again."""
    over = threading.Event()
    other = ByHand(hand.url, hand.group)

    def submit() -> None:
        number = 0
        while not over.wait(0.05):
            number += 1
            other.submit(pool, request_id=f"more-{number}", producer_id="q", nonce=f"more-{number}", timeout_ms=600_000)

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        other.connection.close()


async def test_pending_grows_at_a_cap_while_the_backend_has_room(valkey: ValkeyProcess) -> None:
    async with StubBackend(never) as stub:
        pools = [{"pool_id": "default", "max_concurrent": 1}]
        group = wide_group(valkey.url, pools=pools, endpoints=endpoints(stub.url, max_concurrent=9))
        hand = ByHand(valkey.url, group)
        async with calls(valkey, group, 1), gateway_process(valkey.url, group):
            await until(lambda: hand.section("group")["in_flight"] == 1, within_s=30)
            with arriving(hand, "default"):
                cause = await examine_until(valkey, group, "pending-grows", "pool_capped")
        assert cause["sentence"].startswith("default grows by ")
        assert cause["sentence"].endswith("/s at its cap of 1, while default has 8 slots free.")
        assert cause["look_first"] == "max_concurrent of default"
        hand.connection.close()


def never(_request: SeenRequest) -> Script:
    return Script((Hold(),))


async def test_in_flight_sticks_and_then_requests_vanish_when_a_gateway_dies(valkey: ValkeyProcess) -> None:
    async with StubBackend(never) as stub:
        group = wide_group(valkey.url, lease_ms=3_000, endpoints=endpoints(stub.url))
        hand = ByHand(valkey.url, group)
        async with calls(valkey, group, 2):
            async with gateway_process(valkey.url, group, gateway_id="gw-dying") as gateway:
                await until(lambda: hand.section("group")["in_flight"] == 2, within_s=30)
                gateway.signal(signal.SIGKILL)
                await gateway.ended(10)
            cause = await examine_until(valkey, group, "in-flight-sticks", "gateway_silent")
            assert "gw-dying" in cause["sentence"]
            assert "holds 2 requests" in cause["sentence"]
            assert cause["look_first"] == "the process and the log of gateway gw-dying"
            async with gateway_process(valkey.url, group, gateway_id="gw-next"):
                cause = await examine_until(valkey, group, "requests-vanish", "ended_lost")
        assert cause["sentence"].startswith("2 requests ended as lost in 5 m 00 s: gw-dying died or lost touch")
        assert cause["look_first"] == "the log of gw-dying; delivery of default (now at_most_once)"
        hand.connection.close()


async def test_requests_vanish_when_their_producer_is_gone(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url, liveness_ms=300)
    hand = ByHand(valkey.url, group)
    hand.submit(liveness_ms=300)
    async with gateway_process(valkey.url, group):
        cause = await examine_until(valkey, group, "requests-vanish", "ended_producer_gone")
    assert "p stopped refreshing its liveness key" in cause["sentence"]
    hand.connection.close()


async def test_backend_connection_errors_name_the_address(valkey: ValkeyProcess) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    group = wide_group(valkey.url, endpoints=endpoints(address, breaker_failures=2, open_ms=600_000))
    async with gateway_process(valkey.url, group) as gateway:
        assert (await call(gateway.url)).status_code >= 500
        cause = await examine_until(valkey, group, "backend-errors", "endpoint_fails")
        assert cause["sentence"].startswith("default cannot be reached: 1 failed call in a row")
        assert (await call(gateway.url)).status_code >= 500
        cause = await examine_until(valkey, group, "backend-errors", "breaker_open")
        assert "the breaker of default is open after 2 failed calls in a row" in cause["sentence"].lower()
        assert f"the address {address}/v1" in cause["look_first"]


async def test_a_fallback_that_did_not_happen_is_the_endpoints(valkey: ValkeyProcess) -> None:
    def overloaded(_request: SeenRequest) -> Script:
        said = json.dumps({"error": {"message": "out of budget", "type": "insufficient_quota"}})
        return json_answer(said.encode(), status="429 Too Many Requests", headers=[("retry-after", "0")])

    async with StubBackend(overloaded) as stub:
        group = wide_group(valkey.url, endpoints=endpoints(stub.url))
        async with gateway_process(valkey.url, group) as gateway:
            assert (await call(gateway.url)).status_code == 429
            cause = await examine_until(valkey, group, "fallback-missing", "refused_by_endpoint")
    assert cause["sentence"].startswith("default answered 1 request with status 429; no other provider was asked")
    assert cause["look_first"].endswith("(LiteLLM, OpenRouter, vLLM or the provider's gateway)")


async def test_a_finished_item_that_is_not_in_history(valkey: ValkeyProcess) -> None:
    async with StubBackend(answering) as stub:
        group = wide_group(valkey.url, endpoints=endpoints(stub.url))
        async with gateway_process(valkey.url, group) as gateway:
            assert (await call(gateway.url)).status_code == 200
            cause = await examine_until(valkey, group, "history-missing", "history_off")
    assert cause["sentence"].startswith("Nothing takes the endings of this group to a history")


async def test_a_group_that_is_well_shows_no_symptom(valkey: ValkeyProcess) -> None:
    async with StubBackend(answering) as stub:
        group = wide_group(valkey.url, endpoints=endpoints(stub.url))
        async with gateway_process(valkey.url, group):
            found = await examine(valkey, group)
            assert {name: row["seen"] for name, row in found.items()} == dict.fromkeys(SYMPTOMS, False)
            command = Commands(valkey.url, group)
            strict = await anyio.to_thread.run_sync(lambda: command("doctor", "--strict", "--window", "0.2"))
    assert strict.code == 0
    assert "no symptom is seen" in strict.out


def test_strict_says_by_its_exit_code_that_something_is_broken(valkey: ValkeyProcess) -> None:
    group = wide_group(valkey.url)
    hand = ByHand(valkey.url, group)
    hand.submit()
    done = Commands(valkey.url, group)("doctor", "--strict", "--window", "0.2")
    assert (done.code, "No gateway is live: 1 request waits" in done.out) == (3, True)
    assert Commands(valkey.url, group)("doctor", "--window", "0.2").code == 0
    hand.connection.close()

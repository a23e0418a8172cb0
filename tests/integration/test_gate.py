"""The gate of an endpoint: gateways sample the engine's metrics, and launches stop while its own queue is full."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import pytest

from dispatch.contract import Reply
from tests.support.engines import SILENT, Engine, Fabric, call, slow
from tests.support.producing import until
from tests.support.stub import Hold, Script, StubBackend, Write
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

POLL_MS = 100
GATE = {"gate": "vllm", "gate_poll_ms": POLL_MS, "gate_stale_ms": 3000}
SLACK_S = 2.0


def page(waiting: float | None = None, *, tokens: int = 0, spent_s: float = 0.0) -> bytes:
    """Return a metrics page of vLLM."""
    lines = [] if waiting is None else [f'vllm:num_requests_waiting{{engine="0"}} {waiting}']
    lines += [f"vllm:inter_token_latency_seconds_sum {spent_s}", f"vllm:inter_token_latency_seconds_count {tokens}"]
    return "\n".join(["# TYPE vllm:num_requests_waiting gauge", *lines, ""]).encode()


def fabric_of(valkey: ValkeyProcess, engine: Engine, **endpoint: Any) -> Fabric:
    return Fabric(valkey.url, engine.url, endpoint=GATE | endpoint, lease_ms=1500)


async def until_sampled(fabric: Fabric, **members: Any) -> dict[str, Any]:
    """Wait for a sample with these members and return it."""
    found: dict[str, Any] = {}

    def sampled() -> bool:
        found.update(fabric.endpoint()["gate"])
        return all(found[name] == value for name, value in members.items())

    await until(sampled)
    return found


async def test_one_gateway_at_a_time_samples_the_engine_and_the_snapshot_shows_it(valkey: ValkeyProcess) -> None:
    async with Engine(page=page(2)) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(gateway_id="one"), fabric.gateway(gateway_id="two"):
            gate = await until_sampled(fabric, waiting=2)
            assert gate["gateway_id"] in {"one", "two"}
            assert not gate["stale"]
            before, begun = engine.count("metrics"), time.monotonic()
            await anyio.sleep(1.0)
            took = time.monotonic() - begun
            assert (
                1 <= engine.count("metrics") - before <= took * 1000 / POLL_MS + 2
            )  # not twice as many by two gateways


async def test_launches_stop_at_the_target_and_go_on_when_the_engine_has_room(valkey: ValkeyProcess) -> None:
    async with Engine(SILENT, page=page(0)) as engine:
        fabric = fabric_of(valkey, engine, gate_target=3, gate_poll_ms=3000, gate_stale_ms=10_000)
        async with fabric.gateway(), fabric.client() as client:
            await until_sampled(fabric, waiting=0)
            calls = [asyncio.create_task(call(client)) for _ in range(10)]
            await until(lambda: fabric.endpoint().get("block_reason") == "endpoint_gated")
            await until(lambda: engine.count("call") >= 3)
            assert engine.count("call") == 3  # none waits there, and three were launched since
            await until(lambda: engine.count("call") == 6, within_s=8)  # by the next sample
            engine.page = page(3)
            await until_sampled(fabric, waiting=3)
            assert engine.count("call") == 6
            assert fabric.pool()["skips"]["endpoint_gated"] >= 1
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await fabric.until_clean()


async def test_a_full_engine_lets_one_trial_of_ours_through(valkey: ValkeyProcess) -> None:
    async with Engine(slow(0.1), page=page(50)) as engine:
        fabric = fabric_of(valkey, engine)
        async with fabric.gateway(), fabric.gateway(), fabric.client() as client:
            await until_sampled(fabric, waiting=50)
            calls = [asyncio.create_task(call(client)) for _ in range(6)]
            most = 0
            while not all(one.done() for one in calls):
                most = max(most, fabric.endpoint()["in_flight"])
                await anyio.sleep(0.01)
            assert all(isinstance(one, Reply) for one in await asyncio.gather(*calls))
            assert most == 1


async def test_slow_tokens_close_the_gate_until_they_come_faster(valkey: ValkeyProcess) -> None:
    async with Engine(SILENT, page=page(0, tokens=100, spent_s=1.0)) as engine:
        fabric = fabric_of(valkey, engine, gate_target=1000, gate_token_ms=150)
        async with fabric.gateway(), fabric.client() as client:
            await until_sampled(fabric, waiting=0)
            assert fabric.endpoint()["gate"]["token_ms"] is None  # nothing is known from one look
            calls = [asyncio.create_task(call(client)) for _ in range(2)]
            await until(lambda: engine.count("call") == 2)
            engine.page = page(0, tokens=110, spent_s=3.0)
            await until_sampled(fabric, token_ms=200)
            calls.append(asyncio.create_task(call(client)))
            await until(lambda: fabric.endpoint().get("block_reason") == "endpoint_gated")
            assert engine.count("call") == 2
            engine.page = page(0, tokens=120, spent_s=3.1)
            await until(lambda: engine.count("call") == 3)
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("fail", ["open", "closed"])
async def test_a_stale_sample_follows_the_fail_mode(valkey: ValkeyProcess, fail: str) -> None:
    async with Engine(SILENT, page=page(0)) as engine:
        fabric = fabric_of(valkey, engine, gate_fail=fail, gate_stale_ms=500, gate_target=1)
        async with fabric.gateway(), fabric.client() as client:
            await until_sampled(fabric, waiting=0)
            engine.page = b"<html>proxy error</html>"
            gate = await until_sampled(fabric, stale=True)
            assert gate["waiting"] == 0  # the last one is shown, and that it is old
            calls = [asyncio.create_task(call(client)) for _ in range(4)]
            if fail == "open":
                await until(lambda: engine.count("call") == 4)
            else:
                await until(lambda: fabric.endpoint().get("block_reason") == "endpoint_gated")
                await until(lambda: engine.count("call") == 1)  # the trial stays
                assert fabric.endpoint()["in_flight"] == 1
                engine.page = page(0)
                await until(lambda: engine.count("call") > 1)
            for one in calls:
                one.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


ENDLESS = Script((Write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10\r\n" + b"x" * 16 + b"\r\n"), Hold()))
HUGE = Script((Write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n" + b"x" * 1000), Hold()))


@pytest.mark.parametrize("script", [SILENT, ENDLESS, HUGE], ids=["silent", "endless", "huge"])
async def test_a_metrics_page_that_does_not_end_holds_up_nothing(valkey: ValkeyProcess, script: Script) -> None:
    async with Engine(page=page(1)) as engine, StubBackend(script) as metrics:
        bad = {"endpoint_id": "bad", "url": engine.url, "gate_url": f"{metrics.url}/metrics"} | GATE
        fabric = Fabric(valkey.url, engine.url, endpoint=GATE, more_endpoints=[bad], lease_ms=600)
        async with fabric.gateway() as gateway, fabric.client() as client:
            await metrics.until(lambda stub: len(stub.requests) == 1)
            await until_sampled(fabric, waiting=1)
            ages, seen = [], engine.count("metrics")
            for _ in range(10):
                started = time.monotonic()
                assert isinstance(await call(client), Reply)
                assert time.monotonic() - started < 0.5 + SLACK_S
                ages.append(gateway.status().heartbeat_age_s)
                await anyio.sleep(0.05)
            assert all(age is not None and age < 1.5 for age in ages)  # a sample takes longer
            await until(lambda: engine.count("metrics") >= seen + 3)  # the other engine's samples go on
            assert not fabric.endpoint("e")["gate"]["stale"]
            assert fabric.endpoint("bad")["gate"]["waiting"] is None
        await metrics.until(lambda stub: stub.open_connections == 0)


async def test_names_of_the_config_are_looked_for_on_the_page_it_names(valkey: ValkeyProcess) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\nq 7\nt_ms 12.5\n"
    async with Engine() as engine, StubBackend(Script((Write(answer),))) as metrics:
        fabric = fabric_of(
            valkey,
            engine,
            gate="custom",
            gate_url=f"{metrics.url}/stats",
            gate_waiting_metric="q",
            gate_token_metric="t_ms",
        )
        async with fabric.gateway():
            await until_sampled(fabric, waiting=7, token_ms=12.5)
            assert metrics.requests[0].target == "/stats"


async def test_a_gateway_that_dies_with_a_sample_delays_it_only(valkey: ValkeyProcess) -> None:
    async with Engine(page=page(1)) as engine:
        fabric = fabric_of(valkey, engine)
        gateway = fabric.gateway()
        await gateway.start()
        await until_sampled(fabric, waiting=1)
        await gateway.stop()
        engine.page = page(2)
        async with fabric.gateway():
            await until_sampled(fabric, waiting=2)

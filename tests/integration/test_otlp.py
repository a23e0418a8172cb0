"""A gateway process that is told of a collector sends it what happened, and loses nothing when it is killed."""

from __future__ import annotations

import signal
from typing import Any

import httpx
import pytest

from dispatch.backend.simulated import SimulatorOptions, running_simulator
from dispatch.telemetry import names
from tests.support.collector import Collector, attributes
from tests.support.gateway_process import GatewayProcess
from tests.support.producing import MESSAGES, until, wide_group

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

SEEN, UNSEEN = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
BODY: dict[str, Any] = {"model": "qwen3", "messages": MESSAGES}


async def ask(gateway: GatewayProcess, trace_id: str, flags: str = "01") -> None:
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json=BODY, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Any:
    with Collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found


async def test_a_gateway_sends_sampled_traces_to_the_collector_of_its_environment(valkey, collector) -> None:
    async with running_simulator(SimulatorOptions.fast()) as backend:
        group = wide_group(valkey.url, endpoints=[{"endpoint_id": "default", "url": backend}])
        async with GatewayProcess(valkey.url, group, gateway_id="gw-1") as gateway:
            await ask(gateway, UNSEEN, "00")
            await ask(gateway, SEEN)
            await until(lambda: len(collector.of(SEEN)) >= 3, within_s=30)
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended(30) == 0
            assert "opentelemetry" not in gateway.stderr
    found = collector.of(SEEN)
    assert set(found) == {"send", "process", "chat", "deliver"}
    assert collector.of(UNSEEN) == {}
    assert found["send"].parent_span_id.hex() == PARENT
    assert found["process"].parent_span_id == found["send"].span_id
    assert found["chat"].parent_span_id == found["deliver"].parent_span_id == found["process"].span_id
    said = attributes(found["process"])
    assert (said[names.GATEWAY_ID], said[names.FABRIC_GROUP_ID], said[names.ENDING]) == ("gw-1", group, "succeeded")
    assert said[names.TOTAL_LATENCY_MS] >= said[names.QUEUE_WAIT_MS] >= 0
    assert attributes(found["chat"])[names.GEN_AI_REQUEST_MODEL] == "qwen3"
    assert collector.services() == {"fabric-dispatch-gateway"}


async def test_a_gateway_killed_after_its_settle_loses_no_record(valkey, monkeypatch, collector) -> None:
    async with running_simulator(SimulatorOptions.fast()) as backend:
        group = wide_group(valkey.url, endpoints=[{"endpoint_id": "default", "url": backend}])
        with monkeypatch.context() as without:
            without.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
            doomed = GatewayProcess(valkey.url, group, gateway_id="doomed")
        async with doomed:
            await ask(doomed, SEEN)
            doomed.signal(signal.SIGKILL)
            await doomed.ended(10)
        assert collector.spans() == []
        async with GatewayProcess(valkey.url, group, gateway_id="heir"):
            await until(lambda: "chat" in collector.of(SEEN), within_s=30)
    assert attributes(collector.of(SEEN)["process"])[names.GATEWAY_ID] == "doomed"


async def test_a_collector_that_is_away_is_told_of_once_and_stops_nothing(valkey, collector) -> None:
    collector.status = 503
    async with running_simulator(SimulatorOptions.fast()) as backend:
        group = wide_group(valkey.url, endpoints=[{"endpoint_id": "default", "url": backend}])
        async with GatewayProcess(valkey.url, group) as gateway:
            await ask(gateway, SEEN)
            await until(lambda: gateway.event("sink_away") is not None, within_s=60)
            await ask(gateway, UNSEEN)
            collector.status = 200
            await until(lambda: "process" in collector.of(SEEN) and "process" in collector.of(UNSEEN), within_s=60)
            assert gateway.stderr.count('"sink_away"') == 1
            assert "opentelemetry" not in gateway.stderr

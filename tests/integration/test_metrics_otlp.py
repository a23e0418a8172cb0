"""Metrics by OTLP, as the standard variables ask for it: what `/metrics` shows, to a collector."""

from __future__ import annotations

import gzip

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from dispatch.errors import ConfigurationError
from dispatch.telemetry.metrics.exporting import wanted_otlp
from tests.support.engines import Engine
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import say
from tests.support.stub import Script, StubBackend, Write, answer_bytes
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

ENDPOINT, METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
TAKEN = Script((Write(answer_bytes(b"", headers=[("content-type", "application/x-protobuf")])),))


def exported(stub: StubBackend) -> dict[str, float]:
    """Return the newest value of each metric, summed over its points."""
    found: dict[str, float] = {}
    for request in stub.requests:
        body = gzip.decompress(request.body) if request.header("content-encoding") == "gzip" else request.body
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (one for scope in resource.scope_metrics for one in scope.metrics):
                kind = metric.WhichOneof("data")
                points = getattr(metric, kind).data_points
                found[metric.name] = sum(
                    point.count if kind == "histogram" else point.as_double or point.as_int for point in points
                )
    return found


async def test_a_collector_gets_what_is_counted_and_what_the_group_says(
    valkey: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine() as engine, StubBackend(TAKEN) as collector:
        monkeypatch.setenv(METRICS_ENDPOINT, f"{collector.url}/v1/metrics")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        group = unique_group()
        configure(valkey.url, group, default_document(engine.url))
        async with (
            GatewayProcess(valkey.url, group, gateway_id="gw") as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
        ):
            for _ in range(3):
                body = {"model": "m", "messages": say("x")}
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            wanted = {
                "llm_dispatch.pool.endings": 3,
                "llm_dispatch.request_duration": 3,
                "llm_dispatch.gateway.slots": 64,
            }
            await collector.until(lambda stub: wanted.items() <= exported(stub).items(), timeout_s=30)
            assert "gen_ai.client.inference.duration" in exported(collector)
            assert all(request.target == "/v1/metrics" for request in collector.requests)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({ENDPOINT: "http://c:4318"}, True),
        ({METRICS_ENDPOINT: "http://c:4318/v1/metrics"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_METRICS_EXPORTER": "prometheus"}, False),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, True),
        ({"OTEL_METRICS_EXPORTER": "prometheus, otlp"}, True),
    ],
)
def test_the_variables_say_whether(environ: dict[str, str], wanted: bool) -> None:
    assert wanted_otlp(environ) is wanted


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_METRICS_EXPORTER": "carbon"},
        {ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"},
    ],
)
def test_what_is_not_there_is_refused_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="OTEL_"):
        wanted_otlp(environ)

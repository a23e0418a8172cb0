"""What the environment asks of traces."""

from __future__ import annotations

import pytest

from dispatch.errors import ConfigurationError
from dispatch.telemetry.tracing import set_up_tracing, wanted_exporters

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, ()),
        (ENDPOINT, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, ("otlp",)),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "True"}, ()),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, ("otlp",)),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "console, otlp,otlp"}, ("console", "otlp")),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": ""}, ("otlp",)),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ()),
    ],
)
def test_traces_are_exported_where_the_environment_says_so(environ, wanted) -> None:
    assert wanted_exporters(environ) == wanted


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER: 'jaeger'"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc'"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
    ],
)
def test_what_there_is_not_is_named(environ, named) -> None:
    with pytest.raises(ConfigurationError, match=named):
        wanted_exporters(environ)


def test_without_a_wish_there_is_a_resource_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    tracing = set_up_tracing("gw-1", environ={})
    assert (tracing.sinks, tracing.provider) == ((), None)
    assert tracing.resource.attributes["service.name"] == "fabric-dispatch-gateway"
    assert tracing.resource.attributes["service.instance.id"] == "gw-1"
    tracing.close()


def test_the_service_may_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    found = set_up_tracing("gw-1", environ={}).resource.attributes
    assert (found["service.name"], found["deployment.environment.name"]) == ("mine", "test")

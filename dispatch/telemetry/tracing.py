"""Traces of a process: set up from the standard `OTEL_*` variables, and off where they ask for nothing.

Read are those of the SDK and its OTLP exporter: `OTEL_EXPORTER_OTLP_ENDPOINT` and its kin switch traces on,
`OTEL_TRACES_EXPORTER` (`otlp`, `console`, `none`), `OTEL_SDK_DISABLED`, `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`. Only a process that is a command does this: a library
uses the provider that it finds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler

from dispatch.telemetry.identity import always
from dispatch.telemetry.otel_variables import OTLP, asked_exporters
from dispatch.telemetry.sinks import ExporterSink, Sink

GATEWAY_SERVICE = "fabric-dispatch-gateway"
"""`service.name` where `OTEL_SERVICE_NAME` gives no other."""

_OUTAGE_LOGS = ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk.trace.export")


@dataclass(frozen=True, slots=True)
class Tracing:
    """What a process knows of traces. `sinks` get the spans of requests; without one nothing is exported."""

    resource: Resource
    sinks: tuple[Sink, ...] = ()
    samples_root: Callable[[int], bool] = always
    provider: TracerProvider | None = None

    def close(self) -> None:
        """Export what the process's own spans are still waiting with; blocks. Repeatable."""
        if self.provider is not None:
            self.provider.shutdown()


def _otlp() -> SpanExporter:
    # Only where it is wanted: it loads an HTTP stack of its own.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - see above

    return OTLPSpanExporter()


_EXPORTERS: dict[str, Callable[[], SpanExporter]] = {OTLP: _otlp, "console": ConsoleSpanExporter}


def set_up_tracing(
    instance_id: str, *, service: str = GATEWAY_SERVICE, environ: Mapping[str, str] = os.environ
) -> Tracing:
    """Make this process's resource and, where `OTEL_*` asks for it, its tracer provider and exporters.

    Raises:
        ConfigurationError: a variable asks for what is not there.
    """
    resource = _resource(instance_id, service)
    wanted = wanted_exporters(environ)
    if not wanted:
        return Tracing(resource)
    for name in _OUTAGE_LOGS:  # an outage of the collector is told once, by the recorder
        logging.getLogger(name).setLevel(logging.CRITICAL)
    provider = TracerProvider(resource=resource)
    for word in wanted:
        provider.add_span_processor(BatchSpanProcessor(_EXPORTERS[word]()))
    trace.set_tracer_provider(provider)
    sinks = tuple(ExporterSink(word, _EXPORTERS[word]()) for word in wanted)
    return Tracing(resource, sinks, _root_sampling(provider.sampler), provider)


def wanted_exporters(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the exporters of traces that the environment asks for, by their words in `OTEL_TRACES_EXPORTER`.

    Raises:
        ConfigurationError: one of them is unknown, or its protocol.
    """
    said = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    return asked_exporters(environ, "TRACES", said, tuple(_EXPORTERS))


def _resource(instance_id: str, service: str) -> Resource:
    """Return what the environment says of this process, with our names where it says nothing."""
    found = Resource.create()
    ours = {SERVICE_INSTANCE_ID: instance_id}
    if str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        ours[SERVICE_NAME] = service
    return found.merge(Resource(ours))


def _root_sampling(sampler: Sampler) -> Callable[[int], bool]:
    def samples(trace_id: int) -> bool:
        return sampler.should_sample(None, trace_id, "").decision is Decision.RECORD_AND_SAMPLE

    return samples

"""How metrics leave the process: a Prometheus page, and OTLP by the standard `OTEL_*` variables.

Both are readers of one MeterProvider of OpenTelemetry's. What is counted here and read of the group is handed to them
beside whatever comes of the provider's own instruments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

import anyio.to_thread
import structlog
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest

from dispatch.contract import CONTRACT_VERSION
from dispatch.fabric.library import current_library, package_version
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.telemetry import names
from dispatch.telemetry.metrics import catalogue as c
from dispatch.telemetry.metrics.bridging import scope_metrics
from dispatch.telemetry.metrics.counting import Counting
from dispatch.telemetry.metrics.group import read_group
from dispatch.telemetry.metrics.reading import WITHIN_S, GroupReader
from dispatch.telemetry.metrics.recording import read_recorders
from dispatch.telemetry.metrics.tallies import Labels, Reading
from dispatch.telemetry.otel_variables import OTLP, asked_exporters
from dispatch.telemetry.recorder import RecorderStats

log = structlog.get_logger(__name__)

_LAST_EXPORT_MS = 500
_OUTAGE_LOGS = ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk.metrics")
_TOO_OLD_S = 5.0
"""A look at the group that is older is none: what it says is left out."""


class Standing(Protocol):
    """How a gateway stands; `GatewayStatus` is one."""

    @property
    def draining(self) -> bool:
        """Whether it stops."""

    @property
    def slots(self) -> int:
        """How many requests it may run."""

    @property
    def in_flight(self) -> int:
        """How many it runs."""

    @property
    def fabric_reachable(self) -> bool:
        """Whether calls get through."""

    @property
    def heartbeat_age_s(self) -> float | None:
        """Since the last confirmed heartbeat; None = there was none."""


class Metrics:
    """The metrics of one gateway process. Made, used and closed in one event loop.

    `counting` is the observer to hand around. `attach` says whose state is shown; before it, only counts are.
    """

    def __init__(self, resource: Resource, group: str, *, then: Observer = NOBODY) -> None:
        """Count for a process (`resource`) of a group. `then` is told of results, too.

        Raises:
            ConfigurationError: a variable `OTEL_*` asks for what is not there.
        """
        self.counting = Counting(then)
        self._status: Callable[[], Standing | None] = lambda: None
        self._standing: Standing | None = None
        self._recorders: list[Callable[[], RecorderStats]] = []
        self._reader: GroupReader | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started_ns = time.time_ns()
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        readers: list[MetricReader] = [_Page(self._add, self._registry)]
        if wanted_otlp(os.environ):
            readers.append(PeriodicExportingMetricReader(_Exporter(_otlp_exporter(), self._refresh, self._add)))
        self._provider = MeterProvider(readers, resource=resource.merge(Resource({names.FABRIC_GROUP_ID: group})))
        self._describe()

    def attach(self, status: Callable[[], Standing | None], reader: GroupReader) -> None:
        """Show this gateway and this group from now on."""
        self._loop = asyncio.get_running_loop()
        self._status, self._reader = status, reader

    def watch(self, recorder: Callable[[], RecorderStats]) -> None:
        """Show what a recorder of this process says of itself, too."""
        self._recorders.append(recorder)

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page for Prometheus and its content type, in the form that `accept` prefers.

        Answers whatever Valkey does, within about 2 s: what could not be read of the group is missing then.
        """
        await self._look()
        return await anyio.to_thread.run_sync(self._write, accept)

    def close(self) -> None:
        """Send out what is left and stop. Blocks for at most about half a second."""
        self._loop = None  # the last export shows no group: nobody is there to look
        self._provider.shutdown(_LAST_EXPORT_MS)

    def _write(self, accept: str) -> tuple[bytes, str]:
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # a version that is none
            encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
        return encode(self._registry), content_type

    async def _look(self) -> None:
        """See how things stand now."""
        self._standing = self._status()
        if self._reader is not None:
            await self._reader.look()

    def _refresh(self) -> None:
        """See how things stand now. For other threads than the loop's."""
        loop = self._loop
        if loop is None or not loop.is_running():
            return
        look = asyncio.run_coroutine_threadsafe(self._look(), loop)
        try:
            look.result(WITHIN_S + 1)
        except FutureTimeout:
            look.cancel()

    def _add(self, data: MetricsData) -> None:
        """Put this process's counts and the group's state beside what the SDK has collected."""
        scope = scope_metrics(self._read(), self._started_ns, time.time_ns())
        data.resource_metrics[0].scope_metrics.append(scope)  # type: ignore[attr-defined]  # the SDK makes lists

    def _read(self) -> Iterator[Reading]:
        yield from self.counting.read()
        status = self._standing
        if status is not None:
            yield c.SLOTS, {(): status.slots}
            yield c.SLOTS_USED, {(): status.in_flight}
            yield c.DRAINING, {(): int(status.draining)}
            yield c.FABRIC_UP, {(): int(status.fabric_reachable)}
            beat: dict[Labels, float] = {} if status.heartbeat_age_s is None else {(): status.heartbeat_age_s}
            yield c.BEAT_AGE, beat
        yield from read_recorders([recorder() for recorder in self._recorders])
        if self._reader is not None:
            yield from read_group(*self._reader.newest(_TOO_OLD_S))

    def _describe(self) -> None:
        facts = {
            "version": package_version(),
            "contract": str(CONTRACT_VERSION),
            "library": current_library().digest,
            "python": platform.python_version(),
        }

        def build(_options: CallbackOptions) -> list[Observation]:
            return [Observation(1, facts)]

        meter = self._provider.get_meter(names.SCOPE, schema_url=names.SCHEMA_URL)
        meter.create_observable_gauge(c.BUILD.name, [build], description=c.BUILD.says)


class _Page(PrometheusMetricReader):
    """The SDK's Prometheus reader, with ours beside what it collects."""

    def __init__(self, add: Callable[[MetricsData], None], registry: CollectorRegistry) -> None:
        super().__init__(scope_info_enabled=False, registry=registry)
        self._add = add

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        self._add(metrics_data)
        super()._receive_metrics(metrics_data, timeout_millis, **kwargs)


class _Exporter(MetricExporter):
    """Another exporter, with ours beside what was collected. An outage of the collector is logged once."""

    def __init__(self, inner: MetricExporter, refresh: Callable[[], None], add: Callable[[MetricsData], None]) -> None:
        super().__init__()
        self._inner = inner
        self._refresh = refresh
        self._add = add
        self._away = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Export what was collected, and ours."""
        self._refresh()
        self._add(metrics_data)
        result = self._inner.export(metrics_data, timeout_millis, **kwargs)
        away = result is not MetricExportResult.SUCCESS
        if away is not self._away:
            self._away = away
            if away:
                log.warning("metrics_not_exported")
            else:
                log.info("metrics_exported_again")
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Flush the other exporter."""
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Stop the other exporter."""
        self._inner.shutdown(timeout_millis, **kwargs)


def wanted_otlp(environ: Mapping[str, str]) -> bool:
    """Say whether the standard variables ask for metrics by OTLP: an endpoint is given, or OTLP by name.

    Raises:
        ConfigurationError: they ask for what is not there.
    """
    said = environ.get("OTEL_METRICS_EXPORTER", "").strip().lower()
    return OTLP in asked_exporters(environ, "METRICS", said, (OTLP, "prometheus"))  # the page is there anyway


def _otlp_exporter() -> MetricExporter:
    for name in _OUTAGE_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Only where it is wanted: it loads an HTTP stack of its own.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415 - see above

    return OTLPMetricExporter()

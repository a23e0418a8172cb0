"""`/metrics` of a simulated engine, with vLLM's names, so that a gate can be tried on it.

By prometheus-client: the text format has corners (escapes, types, buckets) that are not worth writing again.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from dispatch.backend.simulated.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FIRST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)


class EngineMetrics:
    """The metrics of one engine. Gauges are read when asked for, so they are never stale."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(engine, model))
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to the first token, queue included.",
            ["model_name"],
            registry=self._registry,
            buckets=_FIRST_BUCKETS,
        ).labels(model)
        self._token = Histogram(
            "vllm:time_per_output_token_seconds",
            "Time of each further token.",
            ["model_name"],
            registry=self._registry,
            buckets=_TOKEN_BUCKETS,
        ).labels(model)

    def observe(self, first_s: float, token_s: float) -> None:
        """Record one call's time to its first token and per further token."""
        self._first.observe(first_s)
        self._token.observe(token_s)

    def text(self) -> bytes:
        """Return the page in the text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", engine.running),
            ("vllm:num_requests_waiting", "Requests that wait for a place in it.", engine.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", engine.cache_usage),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of finished requests.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.output_tokens),
            ("vllm:request_success", "Finished requests.", stats.finished),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter

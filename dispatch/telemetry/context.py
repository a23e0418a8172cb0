"""W3C trace context of the running code, for envelopes."""

from __future__ import annotations

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def current_trace() -> tuple[str | None, str | None]:
    """Return `traceparent` and `tracestate` of the current span; None where there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent"), carrier.get("tracestate")

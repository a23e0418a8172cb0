"""Spans as columns of `otel_traces`, with every value written as the OpenTelemetry collector writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import format_span_id, format_trace_id

_SERVICE_NAME = "service.name"

Attributes = Mapping[str, Any] | None


def columns_of(spans: Sequence[ReadableSpan]) -> list[list[Any]]:
    """Return the values of `spans`, column by column in the order of `COLUMNS`. Times are nanoseconds since 1970."""
    return [[value(span) for span in spans] for _, value in COLUMNS.values()]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | tuple | list):
        return msgspec.json.encode(value).decode()
    return str(value)


def _map(attributes: Attributes) -> dict[str, str]:
    if not attributes:
        return {}
    return {name: value if type(value) is str else _text(value) for name, value in attributes.items()}


class _Resources:
    """The attributes of the resource that was asked for last: spans come by the thousand, of one and the same."""

    def __init__(self) -> None:
        self._last: tuple[Resource | None, dict[str, str]] = None, {}

    def __call__(self, span: ReadableSpan) -> dict[str, str]:
        resource, found = self._last
        if resource is not span.resource:
            found = _map(span.resource.attributes)
            self._last = span.resource, found
        return found


_resource_map = _Resources()


def _parent(span: ReadableSpan) -> str:
    return "" if span.parent is None else format_span_id(span.parent.span_id)


def _duration(span: ReadableSpan) -> int:
    start = span.start_time or 0
    return max(0, (span.end_time or start) - start)


def _scope(span: ReadableSpan, part: str) -> str:
    return str(getattr(span.instrumentation_scope, part, None) or "")


COLUMNS: Final[dict[str, tuple[str, Callable[[ReadableSpan], Any]]]] = {
    "Timestamp": ("DateTime64(9)", lambda span: span.start_time or 0),
    "TraceId": ("String", lambda span: format_trace_id(span.context.trace_id)),
    "SpanId": ("String", lambda span: format_span_id(span.context.span_id)),
    "ParentSpanId": ("String", _parent),
    "TraceState": ("String", lambda span: span.context.trace_state.to_header()),
    "SpanName": ("LowCardinality(String)", lambda span: span.name),
    "SpanKind": ("LowCardinality(String)", lambda span: span.kind.name.capitalize()),
    "ServiceName": (
        "LowCardinality(String)",
        lambda span: _resource_map(span).get(_SERVICE_NAME, ""),
    ),
    "ResourceAttributes": (
        "Map(LowCardinality(String), String)",
        _resource_map,
    ),
    "ScopeName": ("String", lambda span: _scope(span, "name")),
    "ScopeVersion": ("String", lambda span: _scope(span, "version")),
    "SpanAttributes": ("Map(LowCardinality(String), String)", lambda span: _map(span.attributes)),
    "Duration": ("UInt64", _duration),
    "StatusCode": ("LowCardinality(String)", lambda span: span.status.status_code.name.capitalize()),
    "StatusMessage": ("String", lambda span: span.status.description or ""),
    "Events.Timestamp": ("Array(DateTime64(9))", lambda span: [event.timestamp for event in span.events]),
    "Events.Name": ("Array(LowCardinality(String))", lambda span: [event.name for event in span.events]),
    "Events.Attributes": (
        "Array(Map(LowCardinality(String), String))",
        lambda span: [_map(event.attributes) for event in span.events],
    ),
    "Links.TraceId": ("Array(String)", lambda span: [format_trace_id(link.context.trace_id) for link in span.links]),
    "Links.SpanId": ("Array(String)", lambda span: [format_span_id(link.context.span_id) for link in span.links]),
    "Links.TraceState": (
        "Array(String)",
        lambda span: [link.context.trace_state.to_header() for link in span.links],
    ),
    "Links.Attributes": (
        "Array(Map(LowCardinality(String), String))",
        lambda span: [_map(link.attributes) for link in span.links],
    ),
}
"""By column: its type, and its value of a span."""

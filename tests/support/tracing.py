"""Spans under test: those of producers in a provider of the test's own, those of a recorder in a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from dispatch.fabric.connecting import connect
from dispatch.telemetry import names, producing
from dispatch.telemetry.recorder import Recorder, RecorderOptions

RESOURCE = Resource({"service.name": "test"})


class Kept:
    """A sink that keeps what it takes, unless it is told to fail or to wait."""

    def __init__(self, name: str = "history", patience_s: float | None = None) -> None:
        self.name = name
        self.patience_s = patience_s
        self.spans: list[ReadableSpan] = []
        self.problem: Exception | None = None
        self.open = anyio.Event()
        self.open.set()
        self.offered = 0
        self.at_once = 0

    async def take(self, spans: Sequence[ReadableSpan]) -> None:
        self.offered += 1
        self.at_once = max(self.at_once, len(spans))
        await self.open.wait()
        if self.problem is not None:
            raise self.problem
        self.spans += spans

    async def aclose(self) -> None:
        pass

    def of(self, kind: str) -> list[ReadableSpan]:
        """Return the spans whose name begins with this word, in the order in which they were taken."""
        return [span for span in self.spans if span.name.startswith(f"{kind} ")]

    def requests(self) -> Counter[str]:
        """Count the dispatch spans of each request."""
        return Counter(str((span.attributes or {})[names.REQUEST_ID]) for span in self.of("process"))


@asynccontextmanager
async def recording(url: str, group: str, sink: Any, **changes: Any) -> AsyncIterator[Recorder]:
    """Run a recorder of a group; in the end it flushes."""
    known: dict[str, Any] = {
        "group": group, "consumer": "g", "resource": RESOURCE, "pause_s": 0.01, "retry_s": 0.02,
    }  # fmt: skip
    connection = await connect(url)
    recorder = Recorder(connection, RecorderOptions(**known | changes), sink)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recorder.run)
            yield recorder
            recorder.stop(2)
    finally:
        await connection.aclose()


@contextmanager
def tracing_producers(
    monkeypatch: pytest.MonkeyPatch, sampler: Sampler | None = None
) -> Iterator[InMemorySpanExporter]:
    """Let producers use a provider of the test's own: a process has one for good, and other tests run in it."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with monkeypatch.context() as patch:
        patch.setattr(producing, "_tracer", provider.get_tracer(names.SCOPE))
        yield exporter
    provider.shutdown()

"""Histories for tests: an embedded one in this process, the same over HTTP from a process of its own, and records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from dispatch.contract import Operation, RequestEnvelope
from dispatch.contract.details import AttemptDetails
from dispatch.fabric.schema import key
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.spans import DeliveryRecord, EndingRecord, delivery_span, spans_of
from dispatch.telemetry.stream_records import read_ending
from tests.support.producing import eye

PASSWORD_ENV = "HISTORY_TEST_PASSWORD"
PASSWORD = "not-for-the-log"
RESOURCE = Resource({"service.name": "fabric-dispatch", "service.instance.id": "g-1"})
NOW_MS = time.time_ns() // 1_000_000
"""When this run began: rows older than their TTL go, so times of tests are near the present."""


class ServedHistory:
    """`dispatch history serve` as a process. `port` 0 = any free one; a restart keeps port and folder."""

    def __init__(self, folder: Path, *, ttl_days: int = 90) -> None:
        self._folder = folder
        self._ttl_days = ttl_days
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it and wait until it answers."""
        port = self.url.rpartition(":")[2] or "0"
        command = [
            sys.executable, "-P", "-m", "dispatch", "history", "serve", "--path", str(self._folder), "--port", port,
            "--password-env", PASSWORD_ENV, "--ttl-days", str(self._ttl_days),
        ]  # fmt: skip
        environment = os.environ | {PASSWORD_ENV: PASSWORD}
        # S603: the command is ours
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("clickhouse://127.0.0.1:"), "it did not start"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return code

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None:
            self.stop(signal.SIGKILL)


@contextmanager
def served_history(folder: Path, **options: Any) -> Iterator[ServedHistory]:
    """Serve an embedded history from a process of its own."""
    served = ServedHistory(folder, **options)
    try:
        served.start()
        yield served
    finally:
        served.close()


def record(number: int = 0, **facts: Any) -> EndingRecord:
    """Return the record of a request that succeeded a little before `NOW_MS`, with changes."""
    ended_ms = facts.get("ended_ms", NOW_MS - 60_000 + number)
    request_id = facts.get("request_id", f"r-{number}")
    usual: dict[str, Any] = {
        "record_id": f"{ended_ms}-{number}", "ending": "succeeded", "outcome": "succeeded", "pool_id": "default",
        "request_id": request_id, "producer_id": "p-1", "gateway_id": "g-1", "dispatcher_id": "g-1/prod",
        "endpoint_id": "e-1", "attempt": 1, "cost_units": 2, "body_bytes": 99, "submitted_ms": ended_ms - 1_000,
        "claimed_ms": ended_ms - 700, "ended_ms": ended_ms, "status": 200, "input_tokens": 7, "output_tokens": 5,
        "details": AttemptDetails(
            backend_address="http://10.0.0.7:8000/v1", finish_reasons=("stop",), cached_input_tokens=3,
            reasoning_output_tokens=2, first_chunk_ms=250, verdict="good",
        ),
        "envelope": envelope(request_id=request_id, pool_id=facts.get("pool_id", "default")),
    }  # fmt: skip
    return EndingRecord(**usual | facts)


def envelope(**facts: Any) -> RequestEnvelope:
    """Return an envelope, with changes."""
    usual: dict[str, Any] = {
        "contract": 1, "request_id": "r", "producer_id": "p-1", "pool_id": "default",
        "operation": Operation.CHAT_COMPLETIONS, "model": "qwen3", "message_count": 2,
    }  # fmt: skip
    return RequestEnvelope(**usual | facts)


def queued_only(number: int = 0, **facts: Any) -> EndingRecord:
    """Return the record of a request that never ran: its deadline passed in the queue."""
    never: dict[str, Any] = {
        "ending": "expired", "outcome": "expired", "claimed_ms": None, "attempt": 0, "gateway_id": "",
        "dispatcher_id": "", "endpoint_id": "", "status": None, "error_type": "deadline_exceeded",
        "error_message": "the deadline passed", "input_tokens": None, "output_tokens": None,
        "details": AttemptDetails(),
    }  # fmt: skip
    return record(number, **never | facts)


def delivery(of: EndingRecord, after_ms: int) -> DeliveryRecord:
    """Return the record of a reply that was taken so long after its request had ended."""
    return DeliveryRecord(
        record_id=of.record_id, request_id=of.request_id, pool_id=of.pool_id, producer_id=of.producer_id,
        ending=of.ending, submitted_ms=of.submitted_ms, ended_ms=of.ended_ms, acked_ms=of.ended_ms + after_ms,
    )  # fmt: skip


def write(store: HistoryStore, group: str, *records: EndingRecord | DeliveryRecord) -> None:
    """Write the spans of records, as the recorder does."""
    spans: list[ReadableSpan] = []
    for one in records:
        spans += (
            spans_of(one, group, RESOURCE) if isinstance(one, EndingRecord) else [delivery_span(one, group, RESOURCE)]
        )
    store.write(spans)


def read_endings(valkey_url: str, group: str) -> list[EndingRecord]:
    """Return the records of a group's endings stream, the oldest first."""
    with eye(valkey_url) as client:
        found: Any = client.xrange(key(group, "endings"))
    return [read_ending(record_id.decode(), fields) for record_id, fields in found]

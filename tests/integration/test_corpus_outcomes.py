"""Every reply of the corpus as its endpoint's breaker, hold and retries take it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from dispatch.fabric.schema import key
from tests.support.corpus import Case, callers, cases
from tests.support.front import exchange, head
from tests.support.producing import eye
from tests.support.replay import corpus_script
from tests.support.stack import Stack, stack
from tests.support.stub import Script, StubBackend, free_port
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

HOLD_MS = 200


@asynccontextmanager
async def called(valkey: ValkeyProcess, case: Case, **document: Any) -> AsyncIterator[Stack]:
    """Make the row's call against a backend that answers as the row says; any failure opens the breaker."""
    row, response = case.row, case.row["response"]
    caller = callers()[row["request"]]
    stub = StubBackend(lambda _: corpus_script(response, case.data, stub.port) if "status" in response else Script())
    if response.get("connect") == "reset":
        stub = StubBackend(corpus_script(response, b"", 0))
    async with stub:
        port = free_port() if response.get("connect") == "refuse" else stub.port
        endpoint = {
            "endpoint_id": "default",
            "url": f"http://127.0.0.1:{port}/v1",
            "idle_timeout_ms": 3_000,
            "breaker_failures": document.pop("breaker_failures", 1),
        }
        async with stack(valkey.url, "", endpoints=[endpoint], **document) as path:
            body = json.dumps(caller["body"]).encode()
            lines = [b"POST %s HTTP/1.1" % caller["path"].encode(), b"host: x", b"content-length: %d" % len(body)]
            if "request_deadline_ms" in row:
                lines.append(b"x-dispatch-timeout-ms: %d" % row["request_deadline_ms"])
            await exchange(path.port, head(lines) + body, then_wait=15)
            yield path


def record_of(path: Stack) -> dict[str, Any]:
    """Return the endpoint's packed record."""
    with eye(path.valkey_url) as client:
        found: dict[str, Any] = msgspec.msgpack.decode(
            client.hget(key(path.group, "endpoint", endpoint="default"), "record")
        )
    return found


@pytest.mark.parametrize("case", cases("replies"), ids=str)
async def test_breaker_and_hold_are_as_the_row_says(valkey: ValkeyProcess, case: Case) -> None:
    want = case.row["expected"]
    async with called(valkey, case, hold_max_ms=60_000) as path:
        [ended] = path.endings()
        record = record_of(path)
    verdict = "failure" if record.get("breaker") else "backpressure" if record.get("hold_until") else "good or neutral"
    assert verdict in [one if one in ("failure", "backpressure") else "good or neutral" for one in want["breaker"]]
    low, high = want.get("hold_endpoint_ms", (0, 0))
    held_ms = record["hold_until"] - ended["ended_ms"] if verdict == "backpressure" else 0
    assert low <= held_ms <= high


@pytest.mark.parametrize("case", cases("replies"), ids=str)
async def test_it_is_tried_again_exactly_if_the_row_says_so(valkey: ValkeyProcess, case: Case) -> None:
    pool = {"pool_id": "default", "max_attempts": 2, "retry_base_ms": 1, "retry_cap_ms": 1}
    async with called(valkey, case, pools=[pool], hold_max_ms=HOLD_MS, breaker_failures=100) as path:
        [ended] = path.endings()
    assert ended["attempt"] == (2 if case.row["expected"]["retryable"] else 1)

"""A scripted engine behind an endpoint, and a group that uses it, as tests of breaker, gate and retries need them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from dispatch.config import GatewaySettings
from dispatch.contract import Reply
from dispatch.fabric import audit, functions
from dispatch.fabric.sync import BlockingConnection
from dispatch.gateway import Gateway
from dispatch.producer.client import DispatchClient
from tests.support.calls import COMPLETION
from tests.support.leftovers import counters_above_zero
from tests.support.producing import MESSAGES, say, until, wide_group
from tests.support.stub import Hold, Pause, Script, SeenRequest, StubBackend, Write, answer_bytes, json_answer

OK = json_answer(COMPLETION)
LIST = json_answer(b'{"object":"list","data":[]}')
BROKEN = json_answer(
    b'{"error":{"message":"boom"}}', status="500 Internal Server Error", headers=[("connection", "close")]
)
SILENT = Script((Hold(),))


def slow(seconds: float) -> Script:
    """Answer well, but late."""
    return Script((Pause(seconds), Write(answer_bytes(COMPLETION, headers=[("content-type", "application/json")]))))


class Engine:
    """A stub whose answers may be changed while it runs; `calls` answers chat calls, `models` questions for /models.

    `begun` notes when each came in (`time.monotonic()`) with its kind.
    """

    def __init__(self, calls: Script = OK, models: Script = LIST, page: bytes = b"") -> None:
        self.calls: Script | Callable[[SeenRequest], Script] = calls
        self.models = models
        self.page = page
        self.begun: list[tuple[float, str]] = []
        self._calls: list[SeenRequest] = []
        self.stub = StubBackend(self._answer)

    async def __aenter__(self) -> Engine:
        await self.stub.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stub.__aexit__(*exc)

    @property
    def url(self) -> str:
        return f"{self.stub.url}/v1"

    def count(self, kind: str) -> int:
        """Return how many came in of a kind: call, models or metrics."""
        return sum(one == kind for _, one in self.begun)

    @property
    def last_call(self) -> SeenRequest:
        """Return the call that came in last."""
        return self._calls[-1]

    def _answer(self, request: SeenRequest) -> Script:
        kind = {"/v1/models": "models", "/metrics": "metrics"}.get(request.target, "call")
        self.begun.append((time.monotonic(), kind))
        if kind == "models":
            return self.models
        if kind == "metrics":
            return Script((Write(answer_bytes(self.page)),))
        self._calls.append(request)
        return self.calls if isinstance(self.calls, Script) else self.calls(request)


class Fabric:
    """A group of its own with one endpoint (`endpoint` = members of its row), and an eye on it."""

    def __init__(self, url: str, engine_url: str, *, endpoint: dict[str, Any] | None = None, **document: Any) -> None:
        row = {"endpoint_id": "e", "url": engine_url} | (endpoint or {})
        rows = [row, *document.pop("more_endpoints", ())]
        self.url = url
        self.group = wide_group(url, endpoints=rows, default_endpoint="e", **document)

    def gateway(self, **settings: Any) -> Gateway:
        """Make a gateway of this process."""
        values = {"valkey_url": self.url, "fabric_group": self.group, "drain_timeout_ms": 500} | settings
        return Gateway(GatewaySettings(**values))

    def client(self, **options: Any) -> DispatchClient:
        return DispatchClient(self.url, fabric_group=self.group, close_ms=300, **options)

    def section(self, name: str, **more: Any) -> Any:
        """Read a section of the group's snapshot."""
        with BlockingConnection(self.url) as connection:
            return connection.run(self.group, functions.fabric_snapshot(name, **more))

    def endpoint(self, name: str = "e") -> dict[str, Any]:
        """Return the snapshot's row of an endpoint."""
        [row] = [row for row in self.section("endpoints")["rows"] if row["endpoint_id"] == name]
        return dict(row)

    def moves(self, name: str = "e") -> list[tuple[str, str]]:
        """Return the moves of an endpoint's breaker and hold, the oldest first."""
        rows = [row for row in self.section("events")["rows"] if row["kind"] == "breaker" and row["endpoint"] == name]
        return [(row["from"], row["to"]) for row in reversed(rows)]

    def endings(self) -> list[dict[str, Any]]:
        """Return the records of what ended, the newest first."""
        rows: list[dict[str, Any]] = self.section("endings")["rows"]
        return rows

    def ending_of(self, request_id: str) -> str:
        """Return how a request ended, "" while it has not."""
        return next((row["ending"] for row in self.endings() if row["request_id"] == request_id), "")

    def pool(self, name: str = "default") -> dict[str, Any]:
        """Return the snapshot's row of a pool."""
        [row] = self.section("pools", subject=name)["rows"]
        return dict(row)

    def run(self, call: Any) -> Any:
        with BlockingConnection(self.url) as connection:
            return connection.run(self.group, call)

    async def until_state(self, breaker: str, *, within_s: float = 5.0, name: str = "e") -> None:
        """Wait until the endpoint's breaker is in this state."""
        await until(lambda: self.endpoint(name)["breaker"] == breaker, within_s=within_s)

    async def until_clean(self, within_s: float = 5.0) -> None:
        """Wait until nothing runs or waits and every counter is zero; then the audit finds no difference."""
        await until(lambda: counters_above_zero(self.url, self.group) == {}, within_s=within_s)
        with BlockingConnection(self.url) as connection:
            assert audit.differences(connection, self.group) == []


async def call(client: DispatchClient, text: str = "hello", **options: Any) -> Reply | BaseException:
    """Make a call; an exception is returned, too."""
    messages = say(text) if text else MESSAGES
    [found] = await asyncio.gather(
        client.complete(model="m", messages=messages, **({"timeout": 30} | options)), return_exceptions=True
    )
    return found


def text_of(request: SeenRequest) -> str:
    """Return the text of the one message of a call."""
    return str(json.loads(request.body)["messages"][0]["content"])

"""The whole path in one event loop: HTTP front, client, Valkey, gateway, and a scripted backend behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource

from dispatch.config import GatewaySettings
from dispatch.fabric import functions
from dispatch.fabric.api_keys import Grant, NewKey, new_key
from dispatch.fabric.connecting import connect
from dispatch.fabric.observing import NOBODY
from dispatch.fabric.sync import BlockingConnection
from dispatch.fabric.timed import TimedConnection
from dispatch.gateway import Gateway
from dispatch.ingress import IngressSettings, IngressState, create_app
from dispatch.ingress.authority import Authority, KeysMode
from dispatch.ingress.waits import Waits
from dispatch.producer.client import DispatchClient
from dispatch.telemetry.metrics.exporting import Metrics
from dispatch.telemetry.metrics.reading import GroupReader
from tests.support.front import serving
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import eye


@dataclass(frozen=True)
class Stack:
    """A running stack. `group` is its own."""

    valkey_url: str
    group: str
    port: int
    gateway: Gateway
    client: DispatchClient
    metrics: Metrics | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def section(self, name: str, **more: Any) -> Any:
        """Read a section of the group's snapshot."""
        with BlockingConnection(self.valkey_url) as connection:
            return connection.run(self.group, functions.fabric_snapshot(name, **more))

    def endings(self) -> list[dict[str, Any]]:
        """Return the records of what ended, the newest first."""
        rows: list[dict[str, Any]] = self.section("endings")["rows"]
        return rows

    def keys(self, part: str = "") -> list[str]:
        """Return the group's keys that contain `part`."""
        with eye(self.valkey_url) as client:
            return sorted(key.decode() for key in client.scan_iter(match=f"{{{self.group}}}:*{part}*", count=1000))

    def envelope(self, request_id: str) -> dict[str, Any]:
        """Return the envelope that travelled with a request that ended."""
        with eye(self.valkey_url) as client:
            for _, record in client.xrevrange(f"{{{self.group}}}:stream:llm:endings"):
                if record[b"request_id"].decode() == request_id:
                    found: dict[str, Any] = json.loads(record[b"envelope"])
                    return found
        raise AssertionError(f"{request_id} has not ended")

    def submitted(self) -> int:
        """Return how many requests were ever admitted."""
        return sum(row["submitted"] for row in self.section("pools")["rows"])

    def create_key(self, **grant: Any) -> NewKey:
        """Create a key in the group."""
        key = new_key(Grant(**({"name": "one"} | grant)))
        with BlockingConnection(self.valkey_url) as connection:
            call = functions.key_change("create", key.key_id, key.record, actor="test")
            assert connection.run(self.group, call) == "CREATED"
        return key

    def revoke_key(self, key: NewKey) -> None:
        """Revoke a key of the group."""
        with BlockingConnection(self.valkey_url) as connection:
            assert connection.run(self.group, functions.key_change("revoke", key.key_id, actor="test")) == "REVOKED"

    def leases(self) -> int:
        """Return how many leases there are."""
        with eye(self.valkey_url) as client:
            return int(client.zcard(f"{{{self.group}}}:zset:llm:leases"))


@asynccontextmanager
async def stack(
    valkey_url: str,
    endpoint_url: str,
    *,
    settings: IngressSettings | None = None,
    through: str | None = None,
    keys: KeysMode = "off",
    metrics: bool = False,
    group: str = "",
    **document: Any,
) -> AsyncIterator[Stack]:
    """Start a stack on a group of its own (`group` = on one that is there); `document` = changes to its config.

    `through`: the URL by which gateway and client reach Valkey, if that is another way than the test's own. `keys`: how
    keys are asked for. `metrics`: count, and serve the page.
    """
    if not group:
        group = unique_group()
        configure(valkey_url, group, default_document(endpoint_url) | document)
    counts = Metrics(Resource.create(), group) if metrics else None
    observer = NOBODY if counts is None else counts.counting
    way = through or valkey_url
    gateway = Gateway(GatewaySettings(valkey_url=way, fabric_group=group, drain_timeout_ms=500), observer=observer)
    async with AsyncExitStack() as exits:
        await exits.enter_async_context(gateway)
        opened = await connect(way)
        exits.push_async_callback(opened.aclose)
        connection = TimedConnection(opened, observer)
        client = await exits.enter_async_context(
            DispatchClient(way, connection=connection, fabric_group=group, close_ms=200)
        )
        if counts is not None:
            counts.attach(gateway.status, GroupReader(connection, group))
            exits.callback(counts.close)
        authority = Authority(lambda: connection.run(group, functions.key_read()), keys)
        exits.push_async_callback(authority.aclose)
        state = IngressState(
            client=client, gateway=gateway, authority=authority, waits=Waits(client.estimate),
            settings=settings or IngressSettings(), observer=observer, metrics=counts,
        )  # fmt: skip
        port = await exits.enter_async_context(serving(create_app(state)))
        yield Stack(valkey_url, group, port, gateway, client, counts)

"""The group's config as this gateway needs it: endpoints to call, bounds and times, by generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import structlog

from dispatch.backend.endpoint import Endpoint
from dispatch.backend.gauge import Gauge
from dispatch.errors import ConfigurationError, DispatchError
from dispatch.fabric import functions
from dispatch.gateway.link import Link

log = structlog.get_logger(__name__)

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
"""Largest body where the group's config is not known yet."""


class EndpointUnusable(DispatchError):
    """A request cannot be sent to its endpoint; `error_type` says which way, as a word."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class Endpoints:
    """Read once for each generation. `expect` is told which one is in force by whoever gets an answer that names it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = anyio.Lock()
        self._in_force = 0
        self._endpoints: dict[str, Endpoint | EndpointUnusable] = {}
        self._gauges: dict[str, Gauge] = {}
        self._at_least_once = frozenset[str]()
        self._default = ""
        self.generation = 0
        self.lease_ms = 30_000
        self.beat_s = 10.0
        """Time between two heartbeats, as the library reckons it."""
        self.max_payload_bytes = MAX_PAYLOAD_BYTES
        self.on_stale: Callable[[], None] = lambda: None

    @property
    def stale(self) -> bool:
        """Whether another generation is in force than the one that was read."""
        return self.generation != self._in_force

    def expect(self, generation: int) -> None:
        """Note which generation the server acts on; the next use reads the config if it is another one.

        Not "newer": a group that was lost and configured again begins at 1.
        """
        if generation != self._in_force:
            self._in_force = generation
            if self.stale:
                self.on_stale()

    def forget(self) -> None:
        """Take no generation for known: after an outage the same number may be of another group's config."""
        self.generation = -1
        self.on_stale()

    async def load(self) -> None:
        """Read the config now.

        Raises:
            GroupUnknown: the group was never configured.
            FabricError, ConfigurationError: what the connection says.
        """
        self._apply((await self._link.once(functions.fabric_snapshot("config"))).value)

    async def find(self, endpoint_id: str) -> Endpoint:
        """Return an endpoint of the generation last heard of ("" = the default one).

        Raises:
            EndpointUnusable: it is not configured (any more), or its key cannot be read in this process.
        """
        if self.stale:
            await self._refresh()
        found = self._endpoints.get(endpoint_id or self._default)
        if found is None:
            raise EndpointUnusable(
                "endpoint_unknown", f"endpoint {endpoint_id!r} is not in the group's config (any more)"
            )
        if isinstance(found, EndpointUnusable):
            raise found.with_traceback(None)
        return found

    async def gauge(self, endpoint_id: str) -> Gauge | None:
        """Return where an endpoint's engine shows its metrics, None where it has no gate or cannot be asked here."""
        if self.stale:
            await self._refresh()
        return self._gauges.get(endpoint_id)

    def is_given_back(self, pool_id: str) -> bool:
        """Whether the pool's delivery mode is `at_least_once`, in the config last read."""
        return pool_id in self._at_least_once

    def address_of(self, endpoint_id: str) -> str | None:
        """Return an endpoint's address without credentials, in the config last read; None = it is not in it."""
        found = self._endpoints.get(endpoint_id or self._default)
        return found.address if isinstance(found, Endpoint) else None

    async def usable(self) -> tuple[Endpoint, ...]:
        """Return every endpoint this process could call."""
        if self.stale:
            await self._refresh()
        return tuple(endpoint for endpoint in self._endpoints.values() if isinstance(endpoint, Endpoint))

    async def _refresh(self) -> None:
        async with self._lock:
            if self.stale:
                self._apply((await self._link.insist(functions.fabric_snapshot("config"))).value)

    def _apply(self, snapshot: dict[str, Any]) -> None:
        document = snapshot["document"]
        self._endpoints = {row["endpoint_id"]: _endpoint(row) for row in document["endpoints"]}
        self._gauges = _gauges(document["endpoints"], self._endpoints)
        self._at_least_once = frozenset(
            row["pool_id"] for row in document.get("pools", ()) if row.get("delivery") == "at_least_once"
        )
        self._default = document["default_endpoint"]
        self.lease_ms = document["lease_ms"]
        self.beat_s = min(document["lease_ms"], document.get("liveness_ms", document["lease_ms"])) / 3000
        self.max_payload_bytes = document["max_payload_bytes"]
        self.generation = snapshot["generation"]
        self._in_force = self.generation
        for name, endpoint in self._endpoints.items():
            if isinstance(endpoint, EndpointUnusable):
                log.warning("endpoint_unusable", endpoint=name, problem=str(endpoint))
        log.info("group_config_read", generation=self.generation, endpoints=sorted(self._endpoints))


def _endpoint(row: dict[str, Any]) -> Endpoint | EndpointUnusable:
    try:
        return Endpoint.from_config(row)
    except ConfigurationError as error:
        return EndpointUnusable("endpoint_misconfigured", str(error))


def _gauges(rows: list[dict[str, Any]], endpoints: dict[str, Endpoint | EndpointUnusable]) -> dict[str, Gauge]:
    found = dict[str, Gauge]()
    for row in rows:
        endpoint = endpoints[row["endpoint_id"]]
        try:
            gauge = Gauge.from_config(row, endpoint) if isinstance(endpoint, Endpoint) else None
        except ConfigurationError as error:
            log.warning("gate_unusable", endpoint=row["endpoint_id"], problem=str(error))
            continue
        if gauge is not None:
            found[row["endpoint_id"]] = gauge
    return found

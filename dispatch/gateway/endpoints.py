"""The group's config as this gateway needs it: endpoints to call, bounds and times, by generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import structlog

from dispatch.backend.endpoint import Endpoint
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
        self._default = ""
        self.generation = 0
        self.lease_ms = 30_000
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
        self._default = document["default_endpoint"]
        self.lease_ms = document["lease_ms"]
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

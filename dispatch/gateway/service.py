"""A started gateway: its parts, put together, and the order in which they stop."""

from __future__ import annotations

import anyio
import structlog

from dispatch.backend.client import EndpointClient
from dispatch.config import GatewaySettings
from dispatch.fabric.connection import Connection
from dispatch.fabric.observing import Observer
from dispatch.fabric.verifying import verify_library
from dispatch.gateway.claims import ClaimLoop
from dispatch.gateway.configuring import make_default_config, read_or_make_config
from dispatch.gateway.endpoints import Endpoints
from dispatch.gateway.executors import EndpointExecutor, Executor
from dispatch.gateway.heartbeat import Heart
from dispatch.gateway.holdings import Holdings
from dispatch.gateway.identity import Identity
from dispatch.gateway.link import PROBLEMS, Link
from dispatch.gateway.naming import require_free_id
from dispatch.gateway.publisher import Publisher
from dispatch.gateway.runs import Runner
from dispatch.gateway.settling import Settler
from dispatch.gateway.watcher import Watcher

log = structlog.get_logger(__name__)

# Together with the drain time these stay below the two seconds that a stop may take beyond it.
_BREAK_OFF_S = 0.5
_SETTLE_REST_S = 0.6
_CLOSE_S = 0.1


class Service:
    """One life of a gateway in its group, from the first heartbeat to the last settle."""

    def __init__(
        self, settings: GatewaySettings, connection: Connection, executor: Executor | None, observer: Observer
    ) -> None:
        self.link = Link(connection, settings.fabric_group)
        self.endpoints = Endpoints(self.link)
        self.holdings = Holdings(settings.slots)
        self._settings = settings
        self._client = EndpointClient()
        identity = Identity(settings.gateway_id, settings.fabric_group, settings.slots)
        settler = Settler(identity, self.endpoints.is_given_back, self.endpoints.address_of)
        own = EndpointExecutor(settings.fabric_group, self.endpoints, self._client)
        self._runner = Runner(self.link, self.holdings, executor or own, settler)
        self.claims = ClaimLoop(identity, self.link, self._runner, settler)
        self._runner.observer = self._runner.appender.observer = self.claims.observer = observer
        self.heart = Heart(self.link, self._runner, self.claims, self.endpoints)
        self._watcher = Watcher(identity, self.link, self.endpoints, self._client)
        self._publisher = Publisher(self.link, settings.gateway_id)
        self.claims.on_chores = self._watcher.expect
        self.link.on_found = self._found
        self._claiming = anyio.CancelScope()
        self._patience = anyio.CancelScope()

    async def prepare(self) -> None:
        """Verify the library, have a config, be sure of the name, register.

        Raises:
            ConfigurationError, LibraryProblem, FabricError: what is in the way.
        """
        await verify_library(self.link.connection, self.link.group)
        await read_or_make_config(self.endpoints, self.link, self._settings)
        self.link.on_group_unknown = self._configure
        await require_free_id(self.link, self.claims.identity, self.endpoints.beat_s)
        await self.heart.beat()

    async def serve(self) -> None:
        """Claim and run until drained or cancelled. However it ends, what is held is settled before it returns."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.heart.run)
                tasks.start_soon(self.heart.reap)
                tasks.start_soon(self._runner.appender.run)
                tasks.start_soon(self.heart.listener.run)
                tasks.start_soon(self.claims.listener.run)
                tasks.start_soon(self._watcher.run)
                tasks.start_soon(self._publisher.run)
                tasks.start_soon(self._break_off)
                with self._claiming:
                    await self.claims.run()
                tasks.cancel_scope.cancel()
        finally:
            # Tied to nothing else: not to who cancelled us, nor to whether anything above failed.
            with anyio.move_on_after(_SETTLE_REST_S, shield=True) as scope:
                await self.claims.settle_rest()
                await self._last_beat()
            if scope.cancelled_caught:
                log.warning("leases_left_behind", count=len(self.holdings), problem=self.link.problem)

    def drain(self, timeout_s: float) -> None:
        """Claim nothing more and let `serve` end: at once when nothing runs, else at most about `timeout_s` later.

        Again with less time: sooner.
        """
        ends_at = anyio.current_time() + timeout_s
        if ends_at >= self._patience.deadline:
            return
        self._patience.deadline = ends_at
        self._claiming.deadline = ends_at + _BREAK_OFF_S
        if not self.claims.draining:
            log.info("gateway_draining", in_flight=self.holdings.in_flight, timeout_s=timeout_s)
            self.claims.drain()
            self._watcher.close()

    async def aclose(self) -> None:
        """Let go of the connections to endpoints. Never waits long."""
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await self._client.aclose()

    async def _configure(self) -> None:
        self.endpoints.forget()
        await make_default_config(self.link, self._settings)

    def _found(self) -> None:
        """The server answers again; it need not be the one that went, and waits on the old connections may be dead."""
        self.endpoints.forget()
        self.claims.listener.restart()
        self.heart.listener.restart()

    async def _break_off(self) -> None:
        """When the time to drain is over, stop what still runs; the callers are told."""
        with self._patience:
            await anyio.sleep_forever()
        self._runner.stop_all()

    async def _last_beat(self) -> None:
        try:
            await self.heart.beat(last=True)
        except PROBLEMS as error:
            log.debug("last_heartbeat_failed", error=str(error))

"""The gateway as a library object: another asyncio application starts and stops it as a background service."""

from __future__ import annotations

import asyncio
import traceback
from types import TracebackType
from typing import Self

import anyio
import structlog

from dispatch.backend.endpoint import Endpoint
from dispatch.config import GatewaySettings
from dispatch.contract import CONTRACT_VERSION
from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import library_version
from dispatch.fabric.observing import NOBODY, Observer
from dispatch.fabric.timed import TimedConnection
from dispatch.fabric.verifying import require_same
from dispatch.gateway.endpoints import MAX_PAYLOAD_BYTES
from dispatch.gateway.executors import Executor
from dispatch.gateway.link import PROBLEMS
from dispatch.gateway.service import Service
from dispatch.gateway.status import GatewayStatus

log = structlog.get_logger(__name__)

_CLOSE_S = 0.1


class Gateway:
    """Claims requests of one fabric group, runs them against their endpoints and sends the replies.

        async with Gateway(GatewaySettings(valkey_url=..., endpoint_url=...)) as gateway:
            ...

    or `await gateway.start()` and `await gateway.stop()`, also from different tasks. Needs asyncio. With
    `settings.enabled` False nothing starts and nothing connects; everything else answers as of a stopped gateway.

    `connection` and `executor` replace what the settings would make (tests, benchmarks); the caller closes them.
    `observer` is told what happens (metrics).
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        connection: Connection | None = None,
        executor: Executor | None = None,
        observer: Observer = NOBODY,
    ) -> None:
        self.settings = settings
        self._observer = observer
        self._given_connection = connection
        self._given_executor = executor
        self._service: Service | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Connect, verify the library, have a config, register, and begin to claim. Returns when all that is done.

        When cancelled or failed, nothing is left behind.

        Raises:
            ConfigurationError: a setting is missing or wrong (named), or the login was refused.
            LibraryProblem: the server's library is missing or another one; names the command to run.
            FabricUnavailable: Valkey does not answer.
            RuntimeError: it is started already, or was stopped meanwhile.
        """
        if self._task is not None:
            raise RuntimeError("this gateway is started already")
        if not self.settings.enabled:
            log.info("gateway_disabled", group=self.settings.fabric_group)
            return
        if self._given_connection is None:
            self.settings.require_valkey_url()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own: a task group must be left in the task that entered it, and `stop` may run in another one.
        # `stop` awaits it.
        self._task = asyncio.create_task(self._live(ready), name=f"gateway {self.settings.gateway_id}")
        try:
            await ready
        except BaseException:
            task, self._task = self._task, None
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(task, return_exceptions=True)
            raise

    async def stop(self, *, timeout_ms: int | None = None) -> None:
        """Drain and stop: claim nothing more, let what runs finish, tell the callers of what has not.

        What runs gets `timeout_ms` (None = the settings' `drain_timeout_ms`); this returns at most about 2 s after that
        time, also when Valkey is away. Repeatable, and again with less time ends it sooner; may be called from any task
        of the same event loop. Goes on when the caller is cancelled.

        Raises:
            Exception: what ended the gateway before (a bug; see `failure`).
        """
        task = self._task
        if task is None:
            return
        if self._service is None:
            task.cancel()  # it starts still, or has ended
        else:
            self._service.drain((self.settings.drain_timeout_ms if timeout_ms is None else timeout_ms) / 1000)
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        if self._task is task:
            self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def wait_stopped(self) -> None:
        """Wait until the gateway has ended, by `stop` or by a fault. Returns at once when it is not started."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the endpoints of the group's config that this process can call; none when not running."""
        return () if self._service is None else await self._service.endpoints.usable()

    @property
    def running(self) -> bool:
        """Whether it has started and not ended."""
        return self._service is not None

    @property
    def draining(self) -> bool:
        """Whether it is stopping."""
        return self._service is not None and self._service.claims.draining

    @property
    def slots(self) -> int:
        """How many requests it runs at once."""
        return self.settings.slots

    @property
    def in_flight(self) -> int:
        """How many requests it runs now."""
        return 0 if self._service is None else self._service.holdings.in_flight

    @property
    def max_payload_bytes(self) -> int:
        """Largest body of a call in this group."""
        return MAX_PAYLOAD_BYTES if self._service is None else self._service.endpoints.max_payload_bytes

    @property
    def failure(self) -> BaseException | None:
        """What ended it, if it was a fault."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    def status(self) -> GatewayStatus:
        """Say how it stands now. Asks nobody."""
        service, settings = self._service, self.settings
        if service is None:
            return GatewayStatus(
                gateway_id=settings.gateway_id,
                fabric_group=settings.fabric_group,
                enabled=settings.enabled,
                running=False,
                slots=settings.slots,
            )
        last, link = service.heart.last_ok, service.link
        return GatewayStatus(
            gateway_id=settings.gateway_id,
            fabric_group=settings.fabric_group,
            enabled=True,
            running=True,
            draining=service.claims.draining,
            slots=settings.slots,
            in_flight=service.holdings.in_flight,
            fabric_reachable=link.reachable,
            fabric_since=link.since,
            fabric_problem=link.problem,
            heartbeat_age_s=None if last is None else asyncio.get_running_loop().time() - last,
            settled=dict(service.claims.answers),
        )

    async def check(self, within_s: float) -> str:
        """Ask now whether the fabric group can be used. Returns "" or why not; raises nothing for what is found.

        A library of the same contract but another text is no reason: old gateways go on while a new one is rolled out.
        """
        if self._service is None:
            return "the gateway does not run"
        link = self._service.link
        with anyio.move_on_after(within_s):
            try:
                found = await link.connection.run(link.group, library_version())
                if found.contract != CONTRACT_VERSION:
                    require_same(found)
            except PROBLEMS as error:
                return str(error)
            return ""
        return f"Valkey has not answered for {within_s:g} s"

    async def _live(self, ready: asyncio.Future[None]) -> None:
        try:
            await self._connected(ready)
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)  # `start` raises it
                return
            # As text: where logging is not set up, structlog would show local variables, which hold bodies.
            trace = traceback.format_exc()
            log.error("gateway_failed", gateway=self.settings.gateway_id, trace=trace)  # noqa: TRY400 - see above
            raise
        except BaseException:
            if not ready.done():
                ready.set_exception(RuntimeError("the gateway was stopped while it started"))
            raise

    async def _connected(self, ready: asyncio.Future[None]) -> None:
        settings, connection = self.settings, self._given_connection
        if connection is None:
            connection = await connect(settings.valkey_url, client=settings.valkey_client)
        try:
            timed = connection if self._observer is NOBODY else TimedConnection(connection, self._observer)
            service = Service(settings, timed, self._given_executor, self._observer)
            try:
                await service.prepare()
                self._service = service
                log.info("gateway_started", gateway=settings.gateway_id, group=settings.fabric_group)
                ready.set_result(None)
                await service.serve()
            finally:
                self._service = None
                await service.aclose()
        finally:
            if self._given_connection is None:
                with anyio.move_on_after(_CLOSE_S, shield=True):
                    await connection.aclose()
        log.info("gateway_stopped", gateway=settings.gateway_id)

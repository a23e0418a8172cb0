"""The heartbeat: register, renew leases, learn what was lost, cancelled or never heard of; and the reaper beside it.

It shares nothing with the claim loop but the holdings, so neither can hold the other up; it goes on while the gateway
drains.
"""

from __future__ import annotations

import asyncio
import random

import anyio
import structlog

from dispatch.errors import GroupUnknown
from dispatch.fabric import functions
from dispatch.fabric.library import package_version
from dispatch.fabric.records import Heartbeat, Lease
from dispatch.fabric.schema import LIMITS, key
from dispatch.gateway.claims import ClaimLoop
from dispatch.gateway.endpoints import Endpoints
from dispatch.gateway.holdings import Held, Phase, StopReason
from dispatch.gateway.identity import Identity
from dispatch.gateway.link import PROBLEMS, Link
from dispatch.gateway.runs import Runner
from dispatch.gateway.settling import Settler
from dispatch.gateway.waking import TokenListener

log = structlog.get_logger(__name__)

_RETRY_S = 0.25
_SHORTEST_PAUSE_S = 0.02  # between beats that were asked for, so that a storm of cancels shares them
_REAP_ROUNDS = 50
_REAP_S = 0.5  # a deadline that passes while a request waits is told within a second, also when nothing is claimed


class Heart:
    """Beats every third of a lease (of the producers' liveness, if that is shorter).

    And at once when a token says that one of our requests was cancelled.
    """

    def __init__(self, link: Link, runner: Runner, claims: ClaimLoop, endpoints: Endpoints) -> None:
        self._link = link
        self._runner = runner
        self._holdings = runner.holdings
        self._claims = claims
        self._endpoints = endpoints
        self._identity: Identity = claims.identity
        self._settler: Settler = claims.settler
        claims.on_generation = endpoints.expect
        self._loop = asyncio.get_running_loop()
        self._now = asyncio.Event()
        self._suspects: set[tuple[str, int]] = set()
        self.last_ok: float | None = None
        """When (event loop's clock) the newest confirmed beat was sent."""
        wake_key = key(link.group, "wake_gateway", gateway=self._identity.gateway_id)
        self.listener = TokenListener(link, wake_key, self._on_token)
        endpoints.on_stale = self._now.set  # the time of a lease may be another one

    async def run(self) -> None:
        """Beat until cancelled, whatever the server does."""
        self.listener.arm()
        while True:
            try:
                if self._endpoints.stale:
                    await self._endpoints.load()
                await self.beat()
                pause = self._endpoints.beat_s
            except PROBLEMS as error:
                log.debug("heartbeat_failed", error=str(error))
                if isinstance(error, GroupUnknown):
                    await self._group_gone(error)
                pause = min(self._endpoints.beat_s, _RETRY_S) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            with anyio.move_on_after(pause):
                await self._now.wait()
                await anyio.sleep(_SHORTEST_PAUSE_S)
            self._now.clear()

    async def reap(self) -> None:
        """End what time ends, for the whole group, until cancelled: run-out leases, passed deadlines, due timers."""
        while True:
            try:
                for _ in range(_REAP_ROUNDS):
                    if not (await self._link.once(functions.lease_reap(limit=LIMITS["reap_max"]))).value.more:
                        break
            except PROBLEMS as error:
                log.debug("reaping_failed", error=str(error))
                if isinstance(error, GroupUnknown):
                    self._now.set()
            await anyio.sleep(_REAP_S * random.uniform(0.8, 1.2))  # noqa: S311 - no secret

    async def _group_gone(self, error: GroupUnknown) -> None:
        """The server knows no such group: it has none of our leases, and nobody there knows that we sleep."""
        for held in self._holdings:
            self._stop(held, StopReason.LOST)
        await self._link.configure(error)
        self._claims.look()

    async def beat(self, *, last: bool = False) -> None:
        """Send one heartbeat and act on its answer. The last one says that there are no slots here any more.

        Raises:
            FabricError, ConfigurationError: what the connection says.
        """
        held = tuple(self._holdings)
        me = self._identity
        beat = Heartbeat(
            gateway_id=me.gateway_id,
            host=me.host,
            pid=me.pid,
            version=package_version(),
            slots=0 if last else me.slots,
            held=tuple((one.lease.request_id, one.lease.fence) for one in held),
            nonces=self._claims.outstanding,
            started_ms=me.started_ms,
            draining=self._claims.draining,
        )
        answer = await self._link.once(functions.lease_renew(beat))
        renewal, sent_at = answer.value, answer.sent_at
        first, self.last_ok = self.last_ok is None, sent_at
        self._claims.on_chores(renewal.chore_ms, renewal.server_ms, sent_at)
        self._endpoints.expect(renewal.generation)
        named = {one.lease.request_id: one for one in held}
        self._renewed(held, set(renewal.lost), sent_at)
        for request_id in renewal.lost:
            self._stop(named.get(request_id), StopReason.LOST)
        for request_id in renewal.cancelled:
            self._stop(named.get(request_id), StopReason.CANCELLED)
        self._reconcile(renewal.unknown, first=first, offset=sent_at - renewal.server_ms / 1000)

    def _renewed(self, held: tuple[Held, ...], lost: set[str], sent_at: float) -> None:
        if self._endpoints.stale:
            return  # the lease time may have become shorter than we know: what was sure stays sure
        ends_at = sent_at + self._endpoints.lease_ms / 1000
        for one in held:
            if one.lease.request_id not in lost:
                one.ends_at = ends_at

    def _stop(self, held: Held | None, reason: StopReason) -> None:
        if held is not None and held.stop is None:
            self._runner.stop(held, reason)

    def _reconcile(self, unknown: tuple[Lease, ...], *, first: bool, offset: float) -> None:
        """Deal with leases the server holds for us and we did not name.

        Before the first claim they are an earlier life's under the same gateway id: they may have run, so they are lost
        (their callers are told, or an `at_least_once` pool runs them again and the attempt counts). Later ones are of
        a claim whose answer never came, or of one that overtook this heartbeat on another connection. The latter is
        named or settled by the next beat, so only what is listed twice in a row is run.
        """
        suspects = set[tuple[str, int]]()
        for lease in unknown:
            if self._holdings.get(lease.request_id, lease.fence) is not None:
                continue
            fenced = self._holdings.abandoned(lease)
            if first or fenced is Phase.CALLING:
                self._runner.settle_unrun(lease, self._settler.lost(lease))
            elif fenced is not None:
                self._runner.settle_unrun(lease, self._settler.released(lease))
            elif (lease.request_id, lease.fence) in self._suspects:
                self._adopt(lease, offset)
            else:
                suspects.add((lease.request_id, lease.fence))
        self._suspects = suspects
        if suspects:
            self._now.set()

    def _adopt(self, lease: Lease, offset: float) -> None:
        run = self._holdings.free() > 0 and not self._claims.draining
        log.warning("unknown_lease", request_id=lease.request_id, pool=lease.pool_id, run=run)
        if run:
            self._runner.start(lease, offset)
        else:
            self._runner.settle_unrun(lease, self._settler.released(lease))

    def _on_token(self, token: bool) -> None:
        self._claims.observer.woke("own" if token else "reconnect")
        self._now.set()  # a lost connection is a reason to beat, too
        self.listener.arm()

"""One history: every operation is done on the server and on the twin, and both must answer and then look the same.

Time stands still for both: leases, liveness and timeouts are an hour, so nothing ends by the clock while a history
runs. What time would do is done on purpose instead, on both sides alike: the score of a lease or a deadline is set into
the past (where the functions look for it), a producer's marker is removed (which is how it expires), the newest
heartbeat is made an hour older (an outage). The twin is told the server's own time, from the answer where it has one.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dispatch.errors import DispatchError, PoolUnknown
from dispatch.fabric import functions as f
from dispatch.fabric import records as r
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.sync import BlockingConnection
from tests.model.records import Request
from tests.model.reference import Claimant, Reference
from tests.property.views import ServerEye, differences, twin_view
from tests.support.groups import unique_group

T = TypeVar("T")

GATEWAYS = ("g0", "g1", "g2")
PRODUCERS = ("u", "v")
LONG_MS = 3_600_000
LARGE_BYTES = 5_000
"""A body of this size does not travel inside the calls."""


class History:
    """A group on the server, its twin, and what their gateways know."""

    def __init__(self, connection: BlockingConnection, port: int) -> None:
        self.name = unique_group()
        self.connection = connection
        self.eye = ServerEye(port, self.name)
        self.twin = Reference()
        self.document: dict[str, Any] = {}
        self.known: dict[str, dict[str, r.Lease]] = {gateway: {} for gateway in GATEWAYS}
        """Leases each gateway was given, until an answer says that they are settled or lost."""
        self.stale: list[r.Lease] = []
        """Leases that were settled or lost."""
        self.called_again: set[str] = set()
        """Gateways that were told to call again at once and have not yet: work may wait for them, without a token."""
        self._last: Callable[[], None] | None = None
        self._ids = itertools.count()
        self._moments = itertools.count()
        self._looks = itertools.count(1)
        self.now = self._began = self.server_time()

    # -- what callers do --------------------------------------------------------------------------------------------

    def configure(self, document: dict[str, Any], *, behind: int = 0) -> None:
        """Apply a config; `behind` > 0 expects an older generation than is in force."""
        nonce, expected = uuid.uuid4().hex, self.twin.group.generation - behind
        call = f.group_configure(
            json.dumps(document).encode(), expected_generation=expected, actor="test", reason="", nonce=nonce
        )

        def once() -> None:
            server, _ = self._run(call)
            twin = self.twin.configure(document, expected_generation=expected, actor="test", nonce=nonce)
            assert (server.status, server.generation) == (twin.status, twin.generation), (server, twin)
            if server.status == "APPLIED":
                self.document = document

        self._do(once)

    def submit(self, *submissions: r.Submission, stored: bool = False) -> None:
        """Submit what one producer has, in one call; `stored`: the bodies are put under their keys before."""
        for submission in submissions if stored else ():
            body_key = self.eye.key("request_body", id=submission.request_id, nonce=submission.nonce)
            self.connection.put(body_key, b"x" * submission.body_bytes, ttl_ms=LONG_MS)
        call = f.submit_together([f.request_submit(submission) for submission in submissions])

        def once() -> None:
            try:
                answers, now = self._run(call)
            except DispatchError as error:  # about the whole call
                answers, now = [error] * len(submissions), self.server_time()
            server = [type(answer) if isinstance(answer, DispatchError) else answer for answer in answers]
            admitted = [answer.server_ms for answer in answers if isinstance(answer, r.Admitted)]
            now = admitted[0] if admitted else now
            twin = [self._twin(lambda s=s: self.twin.submit(s, now, stored=stored)) for s in submissions]
            assert server == twin, (server, twin)

        self._do(once)

    def cancel(self, request_id: str) -> None:
        """Cancel by id, whatever its state."""
        call = f.request_cancel(request_id, actor="test")

        def once() -> None:
            server, now = self._run(call)
            twin = self.twin.cancel(request_id, "test", now)
            assert (server.status, server.ending) == (twin.status, twin.ending), (server, twin)

        self._do(once)

    def claim(self, gateway: str, want: int) -> None:
        """Claim; a gateway that slept was woken by a token, if there is one."""
        if gateway in self.twin.group.sleepers:
            self.eye.client.lpop(self.eye.key("wake"))
        claimant = self._claimant(gateway)
        call = f.lease_claim(gateway, claimant.dispatcher, nonce=claimant.nonce, want=want)

        def once() -> None:
            first, fence = self.twin.first_by_right(self.now), self.twin.group.fence
            server, now = self._run(call)
            assert server == (twin := self.twin.claim(claimant, want, now)), (server, twin)
            self._got(gateway, want, server)
            if first and server.leases and server.leases[0].fence > fence:
                assert server.leases[0].request_id in first, (server.leases[0], first)

        self._do(once)

    def settle(self, gateway: str, items: Sequence[r.Settlement], want: int) -> None:
        """Settle leases, those of others and old ones too, and claim."""
        claimant = self._claimant(gateway)
        call = f.lease_settle(gateway, claimant.dispatcher, nonce=claimant.nonce, want=want, items=items)

        def once() -> None:
            server, now = self._run(call)
            assert server == (twin := self.twin.settle(claimant, want, items, now)), (server, twin)
            for item in items:
                self._forget(gateway, item.request_id, item.fence)
            self._got(gateway, want, server.claim)

        self._do(once)

    def pause(self, pool: str, action: str) -> None:
        """Pause, resume or drain a pool."""

        def once() -> None:
            server, _ = self._run_or_error(f.pool_pause(pool, action, actor="test"))
            twin = self.twin.pause(pool, action) if pool in self.twin.group.pools else PoolUnknown
            assert server == twin, (server, twin)

        self._do(once)

    def renew(self, gateway: str, *, forgotten: int, outstanding: bool) -> None:
        """Heartbeat. The first `forgotten` leases are not named; `outstanding` names the nonces of their claims."""
        held = [(lease.request_id, lease.fence) for lease in self.known[gateway].values()]
        omitted = [self.twin.group.requests[request_id].claim_nonce for request_id, _ in held[:forgotten]]
        beat = r.Heartbeat(
            gateway_id=gateway, host="h", pid=1, version="1", slots=8, held=tuple(held[forgotten:]),
            nonces=tuple(omitted) if outstanding else (),
        )  # fmt: skip
        call = f.lease_renew(beat)

        def once() -> None:
            server, now = self._run(call)
            twin = self.twin.renew(beat, now)
            assert _sorted(server) == _sorted(twin), (server, twin)
            for request_id in server.lost:
                self._forget(gateway, request_id)
            self.known[gateway].update((lease.request_id, lease) for lease in server.unknown)

        self._do(once)

    def reap(self, limit: int) -> None:
        """Reap."""

        def once() -> None:
            server, now = self._run(f.lease_reap(limit=limit))
            assert server == (twin := self.twin.reap(limit, now)), (server, twin)

        self._do(once)

    def acknowledge(self, producer: str, session: str, back: int) -> None:
        """Acknowledge all frames but the last `back`."""
        frames = self.twin.group.told.get(producer, [])
        upto = frames[-1 - back].sequence if len(frames) > back else 0

        def once() -> None:
            server, now = self._run(f.reply_ack(producer, session, upto=upto))
            assert server == (twin := self.twin.acknowledge(producer, session, upto, now)), (server, twin)

        self._do(once)

    def repeat_last(self) -> None:
        """Do the last call again with the same arguments, as after a lost answer. It must equal one call."""
        if self._last is not None:
            self._last()

    # -- what time and accidents do ---------------------------------------------------------------------------------

    def lease_runs_out(self, request_id: str) -> None:
        """Let a lease's time be over."""
        past = self._past()
        self.eye.client.zadd(self.eye.key("leases"), {request_id: past}, xx=True)
        self.twin.group.leases[request_id] = past

    def deadline_passes(self, request: Request, *, long_ago: bool) -> None:
        """Let a request's deadline be over; `long_ago`: by more than a lease time."""
        past = self._past() - (2 * LONG_MS if long_ago else 0)
        self.eye.change(self.eye.key("request", id=request.id), {"deadline_ms": past})
        self.eye.client.zadd(self.eye.key("deadlines"), {request.id: past}, xx=True)
        request.deadline_ms = request.due_ms = past

    def producer_dies(self, producer: str) -> None:
        """Let a producer's marker expire."""
        self.eye.client.delete(self.eye.key("alive", producer=producer))
        session, _ = self.twin.group.alive.get(producer, ("", 0))
        self.twin.group.alive[producer] = (session, 0)

    def producer_lives(self, producer: str) -> None:
        """Let a producer's heartbeat write its marker."""
        self.eye.client.set(self.eye.key("alive", producer=producer), "session", px=LONG_MS)
        self.twin.group.alive[producer] = ("session", self.server_time() + LONG_MS)

    def body_vanishes(self, request: Request) -> None:
        """Let an inline body be gone."""
        self.eye.client.hdel(self.eye.key("request", id=request.id), "body")
        request.body_lost = True

    def envelope_vanishes(self, request: Request) -> None:
        """Let a stored request be damaged."""
        self.eye.client.hdel(self.eye.key("request", id=request.id), "envelope")
        request.envelope_lost = True

    def outage(self, *, begins: bool) -> None:
        """Let all heartbeats be an hour old, or the grace after an outage be over."""
        group, past = self.twin.group, self.server_time() - LONG_MS
        if begins:
            if group.last_beat_ms == 0:
                return
            group.last_beat_ms, group.grace_until_ms = past, 0
        else:
            group.grace_until_ms = 0
        times = {"last_beat": group.last_beat_ms, "grace_until": group.grace_until_ms}
        self.eye.change(self.eye.key("group"), times)

    def wind_down(self) -> None:
        """Cancel what waits, settle what runs, and see that nothing of any request is left without an expiry."""
        self.outage(begins=False)
        for request in list(self.twin.group.requests.values()):
            if request.state == "queued":
                self.cancel(request.id)
        for request in self.twin.group.leased():
            item = r.Settlement(request_id=request.id, fence=request.fence, outcome=r.Outcome.SUCCEEDED)
            until = self.server_time() + LONG_MS  # some have run out: settled they may be only before they are reaped
            self.eye.client.zadd(self.eye.key("leases"), {request.id: until}, xx=True)
            self.twin.group.leases[request.id] = until
            self.settle(request.gateway, [item], 0)
        assert not self.twin.group.leases
        assert self.twin.group.queued == 0
        immortal = self.eye.immortal_keys()
        assert not immortal, immortal

    # -- what must hold ---------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Fail unless server and twin look the same and the server's counters are true."""
        server = self.eye.view(self.twin.group, GATEWAYS)
        found = differences(server, twin_view(self.twin.group, GATEWAYS))
        assert not found, "server and twin differ:\n" + "\n".join(found)
        if next(self._looks) % 8 == 0:
            self.audit()
        if self.twin.group.sleepers and self.eye.tokens == 0 and not self.called_again:
            eligible = self.twin.eligible(self.now)
            assert not eligible, f"{sorted(self.twin.group.sleepers)} sleep, no token, though {eligible} could launch"

    def audit(self) -> None:
        """Fail unless the server's own audit is clean."""
        for part in ("group", "pools", "endpoints"):
            for row in self.connection.run(self.name, f.fabric_audit(part))["rows"]:
                wrong = {name: (row["stored"][name], true) for name, true in row["counted"].items()}
                wrong = {name: pair for name, pair in wrong.items() if pair[0] != pair[1]}
                assert not wrong, (part, row["name"], wrong)
        leases = self.connection.run(self.name, f.fabric_audit("leases"))
        assert not leases.get("broken")
        assert leases["leases"] == len(self.twin.group.leases)
        for name, pool in self.twin.group.pools.items():
            entries = self.connection.run(self.name, f.fabric_audit("entries", subject=name))
            assert (entries["live"], entries["tombstones"]) == (len(pool.live), pool.tombstones), (name, entries)
            assert entries["bytes"] == sum(request.bytes for request in pool.live)

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    def server_time(self) -> int:
        """Return the server's time, ms."""
        seconds, micros = self.eye.client.time()
        return int(seconds) * 1_000 + int(micros) // 1_000

    def close(self) -> None:
        """Remove what the group has stored."""
        found = list(self.eye.client.scan_iter(match="{" + self.name + "}*", count=10_000))
        if found:
            self.eye.client.unlink(*found)
        self.eye.client.close()

    def _do(self, once: Callable[[], None]) -> None:
        self._last = once
        once()

    def _run(self, call: FunctionCall[T]) -> tuple[T, int]:
        """Run a call. Returns its answer and the server's time then."""
        before = self.server_time()
        answer = self.connection.run(self.name, call)
        if isinstance(answer, r.Settled):
            self.now = answer.claim.server_ms
        else:
            self.now = getattr(answer, "server_ms", before)
        return answer, self.now

    def _run_or_error(self, call: FunctionCall[T]) -> tuple[T | type[DispatchError], int]:
        try:
            return self._run(call)
        except DispatchError as error:
            return type(error), self.server_time()

    def _past(self) -> int:
        """Return a time that is over, each later than the last: the order of reaping must not hang on the clock."""
        return self._began - LONG_MS // 2 + 1_000 * next(self._moments)

    @staticmethod
    def _twin(operation: Callable[[], T]) -> T | type[DispatchError]:
        try:
            return operation()
        except DispatchError as error:
            return type(error)

    @staticmethod
    def _claimant(gateway: str) -> Claimant:
        return Claimant(gateway, f"{gateway}/group", uuid.uuid4().hex)

    def _got(self, gateway: str, want: int, claim: r.Claim) -> None:
        self.called_again = self.called_again - {gateway} | ({gateway} if claim.again else set())
        self.known[gateway].update((lease.request_id, lease) for lease in claim.leases)
        if len(claim.leases) < want and not claim.again:
            assert not self.twin.eligible(self.now), f"idle though {self.twin.eligible(self.now)} could launch"

    def _forget(self, gateway: str, request_id: str, fence: int | None = None) -> None:
        lease = self.known[gateway].get(request_id)
        if lease is not None and fence in {None, lease.fence}:
            del self.known[gateway][request_id]
            self.stale.append(lease)


def _sorted(renewal: r.Renewal) -> r.Renewal:
    """Return the renewal with its unknown leases, which come from a set, in order."""
    unknown = tuple(sorted(renewal.unknown, key=lambda lease: lease.request_id))
    return r.Renewal(renewal.server_ms, renewal.generation, renewal.lost, renewal.cancelled, unknown)

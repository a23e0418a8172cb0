"""One history: every operation is done on the server and on the twin, and both must answer and then look the same.

A call is sent together with the question for the time, so that the twin can be told the moment of the server's step.
What time does is done on purpose (`accidents.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from dispatch.errors import DispatchError, PoolUnknown
from dispatch.fabric import functions as f
from dispatch.fabric import records as r
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.frames import decode_frame
from dispatch.fabric.redis_shared import outcome
from dispatch.fabric.sync import BlockingConnection
from tests.model import timers
from tests.model.reference import Claimant
from tests.property.accidents import LONG_MS, Accidents
from tests.property.views import ServerEye, differences, twin_view
from tests.support.groups import unique_group

T = TypeVar("T")

GATEWAYS = ("g0", "g1", "g2")
PRODUCERS = ("u", "v")
LARGE_BYTES = 5_000
"""A body of this size does not travel inside the calls."""


class History(Accidents):
    """A group on the server, its twin, and what their gateways know."""

    def __init__(self, connection: BlockingConnection, port: int) -> None:
        self.name = unique_group()
        self.connection = connection
        super().__init__(ServerEye(port, self.name))
        self.document: dict[str, Any] = {}
        self.known: dict[str, dict[str, r.Lease]] = {gateway: {} for gateway in GATEWAYS}
        """Leases each gateway was given, until an answer says that they are settled or lost."""
        self.stale: list[r.Lease] = []
        """Leases that were settled or lost."""
        self.called_again: set[str] = set()
        """Gateways that were told to call again at once and have not yet: work may wait for them, without a token."""
        self.wakes: dict[str, int] = {}
        """When each gateway that sleeps looks again without a token, ms."""
        self._last: Callable[[], None] | None = None
        self.chores: list[r.Chore] = []
        """What watchers were given, the last first."""
        self._ids = itertools.count()
        self._looks = itertools.count(1)
        self.now = self._began

    # -- what callers do --------------------------------------------------------------------------------------------

    def configure(self, document: dict[str, Any], *, behind: int = 0) -> None:
        """Apply a config; `behind` > 0 expects an older generation than is in force."""
        nonce, expected = uuid.uuid4().hex, self.twin.group.generation - behind
        call = f.group_configure(
            json.dumps(document).encode(), expected_generation=expected, actor="test", reason="", nonce=nonce
        )

        def once() -> None:
            server, now = self._run(call)
            twin = self.twin.configure(document, expected_generation=expected, actor="test", nonce=nonce, now=now)
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
            answers, now = self._run_or_error(call)
            answers = answers if isinstance(answers, list) else [answers] * len(submissions)  # about the whole call
            server = [type(answer) if isinstance(answer, DispatchError) else answer for answer in answers]
            server = [comparable(answer) for answer in server]
            lapsed = now >= self.twin.group.alive.get(submissions[0].producer_id, ("", 0))[1]  # before this call
            twin = [self._twin(lambda s=s: self.twin.submit(s, now, stored=stored)) for s in submissions]
            twin = [replace(answer, lapsed=lapsed) if isinstance(answer, r.Admitted) else answer for answer in twin]
            assert server == twin, (server, twin)

        self._do(once)

    def cancel(self, request_id: str, *, only_waiting: bool = False) -> None:
        """Cancel by id, whatever its state."""
        call = f.request_cancel(request_id, actor="test", only_waiting=only_waiting)

        def once() -> None:
            server, now = self._run(call)
            twin = self.twin.cancel(request_id, "test", now, only_waiting=only_waiting)
            assert (server.status, server.ending) == (twin.status, twin.ending), (server, twin)

        self._do(once)

    def change_dead(self, action: str, request_id: str, new_id: str) -> None:
        """Retry or drop what is (or is not) in the dead list."""

        def once() -> None:
            server, now = self._run_or_error(f.dead_change(action, request_id, actor="test", new_id=new_id))
            twin = self._twin(lambda: self.twin.change_dead(action, request_id, new_id, now))
            assert (type(server) if isinstance(server, DispatchError) else server) == twin, (server, twin)

        self._do(once)

    def claim(self, gateway: str, want: int) -> None:
        """Claim; a gateway that slept was woken by a token, if there is one."""
        if gateway in self.twin.group.sleepers:
            self.eye.client.lpop(self.eye.key("wake"))
        claimant = self._claimant(gateway)
        call = f.lease_claim(gateway, claimant.dispatcher, nonce=claimant.nonce, want=want)

        def once() -> None:
            server, now = self._run(call)
            first = None if timers.overdue(self.twin.group, now) else self.twin.first_by_right(now)
            fence = self.twin.group.fence
            self._same_claim(server, self.twin.claim(claimant, want, now))
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
            twin = self.twin.settle(claimant, want, items, now)
            assert server.answers == twin.answers, (server.answers, twin.answers)
            self._same_claim(server.claim, twin.claim)
            for item in items:
                self._forget(gateway, item.request_id, item.fence)
            self._got(gateway, want, server.claim)

        self._do(once)

    def append(self, gateway: str, lease: r.Lease, number: int, count: int) -> None:
        """Send chunks of a stream."""
        item = r.Chunks(request_id=lease.request_id, fence=lease.fence, number=number, count=count, payload=b"x")

        def once() -> None:
            server, now = self._run(f.reply_append(gateway, [item]))
            assert server == (twin := self.twin.append(gateway, [item], now)), (server, twin)

        self._do(once)

    def pause(self, pool: str, action: str) -> None:
        """Pause, resume or drain a pool."""

        def once() -> None:
            server, now = self._run_or_error(f.pool_pause(pool, action, actor="test"))
            twin = self.twin.pause(pool, action, now) if pool in self.twin.group.pools else PoolUnknown
            server = type(server) if isinstance(server, DispatchError) else server
            assert server == twin, (server, twin)

        self._do(once)

    def renew(self, gateway: str, *, forgotten: int, outstanding: bool) -> None:
        """Heartbeat. The first `forgotten` leases are not named; `outstanding` names the nonces of their claims."""
        held = [(lease.request_id, lease.fence) for lease in self.known[gateway].values()]
        requests = [self.twin.group.requests.get(request_id) for request_id, _ in held[:forgotten]]
        omitted = [request.claim_nonce for request in requests if request]
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

    def report(self, gateway: str, said: r.ChoreReport | None = None) -> r.Chore:
        """Tell what a watcher's chore came to, if any, and take the next."""
        taken: list[r.Chore] = []

        def once() -> None:
            server, now = self._run(f.endpoint_report(gateway, said))
            assert server == (twin := self.twin.report(gateway, said, now)), (server, twin)
            taken.append(server)
            if server.kind != "NONE":
                self.chores.insert(0, server)

        self._do(once)
        return taken[0]

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

    # -- the end -----------------------------------------------------------------------------------------------------

    def wind_down(self) -> None:
        """Cancel what waits, settle what runs, and see that nothing of any request is left without an expiry."""
        self.outage(begins=False)
        for request in list(self.twin.group.requests.values()):
            if request.state in {"queued", "delayed"}:
                self.cancel(request.id)
        for request in self.twin.group.leased():
            item = r.Settlement(request_id=request.id, fence=request.fence, outcome=r.Outcome.SUCCEEDED)
            until = self.server_time() + LONG_MS  # some have run out: settled they may be only before they are reaped
            self.eye.client.zadd(self.eye.key("leases"), {request.id: until}, xx=True)
            self.twin.group.leases[request.id] = until
            self.settle(request.gateway, [item], 0)
        assert not self.twin.group.leases
        assert self.twin.group.queued == len(self.twin.group.delayed()) == 0
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
        self._nobody_waits_for_ever()
        sleepers = self.twin.group.sleepers
        overdue = timers.overdue(self.twin.group, self.now)  # then the sleep hint covers it
        if sleepers and self.eye.tokens == 0 and not self.called_again and not overdue:
            eligible = self.twin.eligible(self.now)
            assert not eligible, f"{sorted(sleepers)} sleep, no token, though {eligible} could launch"
            due, looks = timers.next_ms(self.twin.group), min(self.wakes[gateway] for gateway in sleepers)
            assert due is None or looks <= due, f"something comes due at {due}, the first gateway looks at {looks}"

    def _nobody_waits_for_ever(self) -> None:
        """Fail unless each pool that only time frees has a timer, and each half-open endpoint will be asked again."""
        group, now = self.twin.group, self.now
        for name, endpoint in group.endpoints.items():
            freed = timers.frees_ms(group, endpoint, now)
            if freed is not None:
                assert self.eye.timers.get(f"endpoint:{name}", freed + 1) <= freed, (
                    now,
                    freed,
                    endpoint,
                    self.eye.timers,
                )
            if endpoint.breaker != "closed" and endpoint.settings:
                assert f"probe:{name}" in group.chores, name

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
        """Run a call. Returns its answer and the time of the server's step."""
        answer, now = self._run_or_error(call)
        if isinstance(answer, DispatchError):
            raise answer
        return answer, now

    def _run_or_error(self, call: FunctionCall[T]) -> tuple[T | DispatchError, int]:
        pipe = self.eye.client.pipeline(transaction=True)  # in a transaction the clock stands still
        pipe.time()
        pipe.execute_command(*call.command(self.name))
        (seconds, micros), answer = pipe.execute(raise_on_error=False)
        self.now = int(seconds) * 1_000 + int(micros) // 1_000
        return outcome(call, answer, self.connection.address), self.now

    @staticmethod
    def _twin(operation: Callable[[], T]) -> T | type[DispatchError]:
        try:
            return operation()
        except DispatchError as error:
            return type(error)

    @staticmethod
    def _claimant(gateway: str) -> Claimant:
        return Claimant(gateway, f"{gateway}/group", uuid.uuid4().hex)

    @staticmethod
    def _same_claim(server: r.Claim, twin: r.Claim) -> None:
        """Fail unless both brought the same. A gateway may be told to look again earlier than the twin knows to."""
        assert 1 <= server.sleep_ms <= twin.sleep_ms or server.sleep_ms == twin.sleep_ms == 0, (server, twin)
        assert replace(server, sleep_ms=0) == replace(twin, sleep_ms=0), (server, twin)

    def _got(self, gateway: str, want: int, claim: r.Claim) -> None:
        self.wakes[gateway] = self.now + claim.sleep_ms
        self.called_again = self.called_again - {gateway} | ({gateway} if claim.again else set())
        self.known[gateway].update((lease.request_id, lease) for lease in claim.leases)
        if len(claim.leases) < want and not claim.again:
            assert not self.twin.eligible(self.now), f"idle though {self.twin.eligible(self.now)} could launch"

    def _forget(self, gateway: str, request_id: str, fence: int | None = None) -> None:
        lease = self.known[gateway].get(request_id)
        if lease is not None and fence in {None, lease.fence}:
            del self.known[gateway][request_id]
            self.stale.append(lease)


def comparable(answer: Any) -> Any:
    """Return the answer to a submit without what the twin does not know: a frame, how fast a pool drains."""
    if isinstance(answer, r.Replayed):
        assert decode_frame(answer.frame).reply.request_id == answer.request_id
        return dataclasses.replace(answer, frame=b"")
    if isinstance(answer, r.Refused):
        assert answer.retry_after_ms is None or 1_000 <= answer.retry_after_ms <= 30_000
        return dataclasses.replace(answer, retry_after_ms=None)
    return answer


def _sorted(renewal: r.Renewal) -> r.Renewal:
    """Return the renewal with its unknown leases, which come from a set, in order."""
    unknown = tuple(sorted(renewal.unknown, key=lambda lease: lease.request_id))
    return dataclasses.replace(renewal, unknown=unknown)

"""A pure Python twin of the scheduler and the life cycle: what the function library must do, without Valkey.

Written from DESIGN sections 5, 6 and 6b. Its operations are the functions of the library that change something, with
the same records going in and coming out; `now` is the server's clock in ms and only moves as the caller says. Nothing
is bounded or packed for speed: what can be counted is counted from requests and leases.

    records.py    what is remembered               line.py       who stands where
    settings.py   the config                       scheduler.py  one claim
    changes.py    a config comes into force        lifecycle.py  submit ... reap
    endings.py    one request ends                 settling.py   a lease is settled
    flows.py      keys and priorities in a pool    retries.py    whether and when another attempt follows
    breaker.py    what an endpoint lets through    timers.py     what has come due
    chores.py     what gateways do beside runs     watching.py   what those chores come to
    repeats.py    idempotency keys, kept replies   dead.py       the dead list
    streams.py    chunks of replies                oracle.py     ideal shares (waterfilling)

Not modelled: wake tokens (property tests ask `eligible` instead), frames' bytes, snapshots, expiry of gateways'
registry entries, damage of stored keys except a lost body and a lost envelope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatch.fabric import records as r
from tests.model import changes, chores, dead, flows, lifecycle, line, scheduler, settling, streams, timers, watching
from tests.model.endings import outage
from tests.model.records import Answer, Group, Request
from tests.model.scheduler import Claimant
from tests.model.settings import GroupSettings

__all__ = ["Claimant", "Reference"]

IDLE_SLEEP_MS = 5_000
"""How long a gateway may sleep without a token."""


class Reference:
    """One fabric group, kept in plain Python."""

    def __init__(self) -> None:
        self.group = Group()

    def configure(
        self, document: dict[str, Any], *, expected_generation: int, actor: str, nonce: str, now: int | None = None
    ) -> r.Configured:
        """Bring a whole config into force if the generation is the expected one. No `now`: that of the last call."""
        group = self.group
        group.now = group.now if now is None else now
        if group.generation and group.config_nonce == nonce:
            return r.Configured("APPLIED", group.generation, group.actor)
        if group.generation != expected_generation:
            return r.Configured("CONFLICT", group.generation, group.actor)
        settings = GroupSettings.from_document(document)
        if settings.problems() or changes.removal_problems(group, settings):
            return r.Configured("INVALID", group.generation)
        if group.generation and settings == group.settings:
            return r.Configured("UNCHANGED", group.generation, group.actor)
        changes.apply(group, settings)
        timers.looked(group)
        group.generation, group.actor, group.config_nonce = group.generation + 1, actor, nonce
        return r.Configured("APPLIED", group.generation, group.actor)

    def submit(self, submission: r.Submission, now: int, *, stored: bool = False) -> lifecycle.Submitted:
        """Queue a request. `stored`: its large body was stored before. Same id and nonce again: answered as at first.

        Raises:
            PoolUnknown: the pool is not configured.
        """
        self.group.now = now
        return lifecycle.submit(self.group, submission, now, stored=stored)

    def cancel(self, request_id: str, actor: str, now: int, *, only_waiting: bool = False) -> r.Cancellation:
        """End a waiting request, or ask for a running one to be stopped (or leave it alone)."""
        self.group.now = now
        return lifecycle.cancel(self.group, request_id, actor, now, only_waiting=only_waiting)

    def change_dead(self, action: str, request_id: str, new_id: str, now: int) -> r.DeadChange:
        """Drop a request of the dead list, or retry it as `new_id`.

        Raises:
            PoolUnknown, StateConflict: it cannot be retried (so).
        """
        self.group.now = now
        return dead.change(self.group, action, request_id, new_id)

    def claim(self, claimant: Claimant, want: int, now: int) -> r.Claim:
        """Launch up to `want` requests. A repeated call lists those of its leases that are still current.

        A claim that brought nothing is not remembered: done again it may bring something, and nothing is lost.
        """
        if earlier := self._recall(claimant, now):
            return self._recalled(earlier, now)
        self.group.now = now
        claim = self._claim(claimant, want, now)
        if claim.leases:
            self._remember(claimant, (), claim, now)
        return claim

    def settle(self, claimant: Claimant, want: int, items: Sequence[r.Settlement], now: int) -> r.Settled:
        """End leases and launch up to `want` next ones in the same step. A repeated call answers the same words."""
        if earlier := self._recall(claimant, now):
            return r.Settled(earlier.words, self._recalled(earlier, now))
        self.group.now = now
        before = len(self.group.ended)
        words = tuple(settling.settle(self.group, claimant.gateway, item, now) for item in items)
        claim = self._claim(claimant, want, now, ended_before=before)
        self._remember(claimant, words, claim, now)
        return r.Settled(words, claim)

    def append(self, gateway: str, items: Sequence[r.Chunks], now: int) -> tuple[str, ...]:
        """Send chunks of running streams."""
        self.group.now = now
        return tuple(streams.append(self.group, gateway, item) for item in items)

    def renew(self, beat: r.Heartbeat, now: int) -> r.Renewal:
        """Take a gateway's heartbeat."""
        self.group.now = now
        renewal = lifecycle.renew(self.group, beat, now)
        timers.looked(self.group)
        return renewal

    def reap(self, limit: int, now: int) -> r.Reaped:
        """Deal with leases that ran out and deadlines that passed, at most `limit` of each."""
        self.group.now = now
        reaped = lifecycle.reap(self.group, limit, now)
        timers.looked(self.group)
        return reaped

    def acknowledge(self, producer: str, session: str, upto: int, now: int) -> r.Acknowledged:
        """Trim the frames the producer has handed over."""
        owner, until = self.group.alive.get(producer, ("", 0))
        if now < until and owner != session:
            return r.Acknowledged(owner=False, trimmed=0, remaining=0)
        frames = self.group.told.get(producer, [])
        left = [frame for frame in frames if frame.sequence > upto]
        self.group.told[producer] = left
        return r.Acknowledged(owner=True, trimmed=len(frames) - len(left), remaining=len(left))

    def report(self, gateway: str, said: r.ChoreReport | None, now: int) -> r.Chore:
        """Take what a watcher's chore came to, if any, and hand out the next."""
        self.group.now = now
        if said is not None:
            watching.report(self.group, said)
        return watching.take(self.group, gateway)

    def pause(self, name: str, action: str, now: int | None = None) -> r.PoolState:
        """Pause, resume or drain a pool: nothing launches from a paused one, nothing enters a draining one."""
        self.group.now = self.group.now if now is None else now
        pool = self.group.pools[name]
        before, pool.state = pool.state, {"pause": "paused", "resume": "active", "drain": "draining"}[action]
        if action == "pause" and pool.place == "line" and before != "paused":
            line.park(self.group, pool, "paused")
        elif action != "pause" and pool.parked == "paused":
            line.come_back(self.group, pool)
        return r.PoolState(before != pool.state, pool.state, len(pool.live), self.group.pool_in_flight(name))

    def eligible(self, now: int) -> list[str]:
        """Return the pools from which a request could run now, asking no rotation: the work-conservation oracle."""
        group = self.group
        group.now = now
        if len(group.leases) >= group.settings.total_concurrent_dispatch:
            return []
        return [
            name for name, pool in group.pools.items() if not line.blocked(group, pool) and self.launchable(name, now)
        ]

    def first_by_right(self, now: int) -> set[str] | None:
        """Return the requests one of which has to be launched before any other; None when credit decides.

        Under policy fifo the oldest that may run; else heads of pools whose protected slots are unused.
        """
        heads = [head for name in self.eligible(now) if (head := self.launchable(name, now))]
        if self.group.fifo and any(self._hides_dead_head(name, now) for name in self.group.pools):
            return None
        if self.group.fifo:
            return {min(heads, key=lambda head: head.seq).id} if heads else None
        urgent = {head.id for head in heads if line.below_minimum(self.group, self.group.pools[head.pool_id])}
        return urgent or None

    def launchable(self, pool: str, now: int) -> Request | None:
        """Return the pool's first waiting request that would not be ended instead of launched."""
        for request in flows.in_order(self.group.pools[pool]):
            _, until = self.group.alive.get(request.producer, ("", 0))
            heard = now < max(until, self.group.grace_until_ms) or outage(self.group, now)
            if (heard or request.submission.detached) and not scheduler.own_fate(request, now):
                return request
        return None

    def _hides_dead_head(self, name: str, now: int) -> bool:
        """Whether a pool with keys or levels is ranked by a head that will be ended when it is met."""
        pool = self.group.pools[name]
        return flows.mixed(pool) and bool(pool.live) and flows.head(pool) is not self.launchable(name, now)

    def _claim(self, claimant: Claimant, want: int, now: int, ended_before: int | None = None) -> r.Claim:
        before = len(self.group.ended) if ended_before is None else ended_before
        timers.run(self.group)
        made, again = scheduler.claim(self.group, claimant, want, now)
        timers.looked(self.group)
        rows = lifecycle.lease_rows(self.group, made)
        ended = len(self.group.ended) - before
        return r.Claim(now, self.group.generation, self._sleep_ms(now), again, ended, rows, chores.due_in(self.group))

    def _sleep_ms(self, now: int) -> int:
        """Return how long a gateway that found nothing may sleep: something may come due before."""
        due = timers.next_ms(self.group)
        return IDLE_SLEEP_MS if due is None else min(max(1, due - now), IDLE_SLEEP_MS)

    def _remember(self, claimant: Claimant, words: tuple[str, ...], claim: r.Claim, now: int) -> None:
        made = tuple((lease.request_id, lease.fence) for lease in claim.leases)
        kept_until = now + 2 * self.group.settings.lease_ms
        self.group.answers[claimant.gateway] = Answer(claimant.nonce, words, made, kept_until)

    def _recall(self, claimant: Claimant, now: int) -> Answer | None:
        answer = self.group.answers.get(claimant.gateway)
        return answer if answer and answer.nonce == claimant.nonce and now < answer.kept_until_ms else None

    def _recalled(self, answer: Answer, now: int) -> r.Claim:
        group = self.group
        current = [
            group.requests[request_id]
            for request_id, fence in answer.made
            if request_id in group.leases and group.requests[request_id].fence == fence
        ]
        group.now = now
        rows = lifecycle.lease_rows(group, current)
        return r.Claim(now, group.generation, 0, again=True, ended=0, leases=rows, chore_ms=chores.due_in(group))

"""What this gateway holds: its leases, how far each is, and results that wait to be settled.

A lease stays here until its settle is answered, so every heartbeat names it; it takes a slot for as long. Plain data,
no waiting: the claim loop, the runs and the heartbeat all work on it between their awaits.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec

from dispatch.contract.reply import Usage
from dispatch.fabric.records import Lease, Settlement
from dispatch.fabric.schema import LIMITS

_BATCH_BYTES = 1 << 20  # bodies in one settle call: about a millisecond of the server, which serves others too
_ABANDONED_KEPT = 4096
_RETURNED_KEPT = 256  # bodies over 64 KiB are stored by themselves, so this is 16 MiB at most
_BEGUN_KEPT = 8192  # twice as many are remembered: some seconds of a gateway that does nothing else


class Phase(Enum):
    """How far a lease is. What has not reached CALLING may be given back as if never claimed."""

    NEW = "new"
    FETCHING = "fetching"
    CALLING = "calling"
    FINISHED = "finished"


class StopReason(Enum):
    """Why a run is stopped from outside."""

    LOST = "lost"  # the server says the lease is another's or over
    FENCED = "fenced"  # no renewal was confirmed up to the lease's end
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PROBE_OVER = "probe_over"  # the breaker's probe has had its time
    GONE = "gone"  # nobody reads the stream any more
    SLOW = "slow"  # too little of the stream is read
    DRAINED = "drained"


Attempt = tuple[str, str, int]

NOTHING_TO_SETTLE = frozenset({StopReason.LOST, StopReason.FENCED})


@dataclass(slots=True, eq=False)
class Held:
    """One lease as this gateway sees it. Times are of the event loop's clock, seconds.

    `told`: a part of the answer has gone to the caller, so no other run may follow this one. `usage`: tokens that a
    stream had told of when it ended or was broken off. `streams`: chunks of it go out under this very lease.
    """

    lease: Lease
    ends_at: float
    deadline_at: float
    phase: Phase = Phase.NEW
    stop: StopReason | None = None
    task: asyncio.Task[None] | None = None
    result: Settlement | None = None
    told: bool = False
    streams: bool = False
    usage: Usage | None = None


class Begun:
    """The attempts whose endpoint call this process has begun, as far back as a server that fails over may forget.

    A primary that lost its newest writes hands out again what was claimed with them: that is no new attempt.
    """

    def __init__(self) -> None:
        self._newer = set[Attempt]()
        self._older = set[Attempt]()

    def add(self, lease: Lease) -> None:
        """Remember that the call of this lease's attempt begins."""
        if len(self._newer) >= _BEGUN_KEPT:
            self._older, self._newer = self._newer, set()
        self._newer.add(attempt_of(lease))

    def __contains__(self, lease: Lease) -> bool:
        attempt = attempt_of(lease)
        return attempt in self._newer or attempt in self._older


def attempt_of(lease: Lease) -> Attempt:
    """Return what names one attempt for good: an id may be used again later, by another submit with its own nonce."""
    return lease.request_id, lease.nonce, lease.attempt


class Holdings:
    """The leases of one gateway, by request id; never two of one request."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.changed = asyncio.Event()
        """Set when a result is ready or a slot became free; cleared by the claim loop, which alone waits for it."""
        self._held: dict[str, Held] = {}
        self._finished: deque[Settlement] = deque()
        self._abandoned: OrderedDict[tuple[str, int], Phase] = OrderedDict()
        self._returned: OrderedDict[Attempt, Settlement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(tuple(self._held.values()))

    def get(self, request_id: str, fence: int) -> Held | None:
        """Return the lease if it is held under exactly this fence."""
        held = self._held.get(request_id)
        return held if held is not None and held.lease.fence == fence else None

    def other(self, lease: Lease) -> Held | None:
        """Return what is held of the same request under another fence."""
        held = self._held.get(lease.request_id)
        return held if held is not None and held.lease.fence != lease.fence else None

    def add(self, held: Held) -> None:
        """Take a lease; one of the same request is forgotten (a newer fence makes it worthless)."""
        self._held[held.lease.request_id] = held

    def finish(self, held: Held, settlement: Settlement) -> None:
        """Queue the result of a lease for the next settle; nothing happens when the lease is gone meanwhile."""
        if self._held.get(held.lease.request_id) is not held or held.phase is Phase.FINISHED:
            return
        held.phase = Phase.FINISHED
        self._offer(held, settlement)

    def carry_on(self, held: Held, lease: Lease, ends_at: float, deadline_at: float) -> None:
        """Go on under another lease of the same attempt: what runs, or the result that waits to be settled."""
        held.lease, held.ends_at, held.deadline_at = lease, ends_at, deadline_at
        if held.result is not None:
            self._offer(held, held.result)

    def _offer(self, held: Held, settlement: Settlement) -> None:
        if settlement.fence != held.lease.fence:
            settlement = msgspec.structs.replace(settlement, fence=held.lease.fence)
        held.result = settlement
        self._finished.append(settlement)
        self.changed.set()

    def drop(self, held: Held) -> None:
        """Forget a lease without settling it. A fenced one is remembered: the server may still count it as ours."""
        if self._held.get(held.lease.request_id) is not held:
            return
        del self._held[held.lease.request_id]
        if held.stop is StopReason.FENCED:
            self.abandon(held.lease, held.phase)
        self.changed.set()

    def abandon(self, lease: Lease, phase: Phase) -> None:
        """Note a lease that ended, by our clock, and how far it had come; the server may still count it as ours."""
        self._abandoned[lease.request_id, lease.fence] = phase
        if len(self._abandoned) > _ABANDONED_KEPT:
            self._abandoned.popitem(last=False)

    def abandoned(self, lease: Lease) -> Phase | None:
        """Return how far a fenced lease had come when it was dropped (and forget that), None if it is no such lease."""
        return self._abandoned.pop((lease.request_id, lease.fence), None)

    def take(self) -> list[Settlement]:
        """Take finished results for one settle call, bounded in number and bytes. They are held until `settled`."""
        finished, items, size = self._finished, list[Settlement](), 0
        while finished and len(items) < LIMITS["settle_max"] and size < _BATCH_BYTES:
            item = finished.popleft()
            size += len(item.body)
            items.append(item)
        return items

    @property
    def waiting(self) -> bool:
        """Whether results wait to be settled."""
        return bool(self._finished)

    def settled(self, item: Settlement, word: str) -> Held | None:
        """The server answered `word` for this result: the lease is over. Returns it, if it was held still.

        A result that was not taken is kept for a while: it is wanted when the same attempt is given out again.
        """
        held = self._held.get(item.request_id)
        if held is None or held.lease.fence != item.fence:
            return None
        del self._held[item.request_id]
        if word == "LEASE_LOST":
            self._returned[attempt_of(held.lease)] = item
            if len(self._returned) > _RETURNED_KEPT:
                self._returned.popitem(last=False)
        return held

    def returned(self, lease: Lease) -> Settlement | None:
        """Return the result of this lease's attempt that the server did not take (and forget it), for this lease."""
        item = self._returned.pop(attempt_of(lease), None)
        return None if item is None else msgspec.structs.replace(item, fence=lease.fence)

    def free(self, *, settling: int = 0) -> int:
        """Slots that are free once `settling` results are settled."""
        return max(0, self.slots - len(self._held) + settling)

    def named(self) -> tuple[tuple[str, int], ...]:
        """Id and fence of every lease, for a heartbeat."""
        return tuple((request_id, held.lease.fence) for request_id, held in self._held.items())

    @property
    def in_flight(self) -> int:
        """Leases whose result is not there yet."""
        return sum(held.phase is not Phase.FINISHED for held in self._held.values())

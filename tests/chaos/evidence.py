"""What a run of the harness has seen, from every side: callers, the group's records and keys, backends, processes.

Times are seconds of the wall clock (`time.time()`); everything runs on one machine, so the server's clock is the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a producer is to make. `at_s` counts from the beginning of the run; None = the pool's default.

    `tag` names it from end to end: it is in the body (the backend sees it), in the envelope's metadata (the records of
    endings have it), in the answer, and in the caller's log. It is the request id where `named`, the idempotency key
    where `keyed`; such a call is made again when its process was killed before it had an outcome.
    """

    tag: str
    at_s: float
    pool: str
    timeout_ms: int | None = None
    named: bool = False
    keyed: bool = False
    repeat: bool = False
    stream: bool = False
    fairness_key: str | None = None
    priority: int | None = None
    cost: int | None = None
    size: int = 0
    leave_after_s: float | None = None


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A caller makes its call."""

    call: str
    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended", kw_only=True):
    """A caller has its outcome.

    `how`: `reply` (the group said how it ended), `gave_up` (the client could not learn it, or made its own reply of a
    deadline long passed), `refused` (it was told that nothing is queued), `in_progress` (an earlier call under this
    name is not over), `left` (the caller went away itself), `fault` (an error that no caller should see). `right`: the
    answer, if there is one, is the one to this very call.
    """

    call: str
    at: float
    how: str
    ending: str = ""
    request_id: str = ""
    attempt: int = 0
    detail: str = ""
    right: bool = True


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """A producer's process stood still (it was stopped, or the machine had no time for it)."""

    since: float
    until: float


LogLine = Started | Ended | Stalled


@dataclass(slots=True)
class Call:
    """A call as its caller saw it. `ended` None: no outcome; `died_at`: because its process was killed then."""

    order: Order
    producer: str
    started: float
    ended: Ended | None = None
    died_at: float | None = None

    @property
    def tag(self) -> str:
        """The name of the call, from end to end."""
        return self.order.tag


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the endings stream. `tag` is "" where the envelope was lost."""

    request_id: str
    tag: str
    ending: str
    pool: str
    attempt: int
    submitted: float
    ended: float
    outcome: str = ""
    """What the gateway said, where the reply was dropped; else as `ending`."""
    gateway: str = ""
    error: str = ""
    tries: int = 0
    """How many earlier attempts the record tells of."""
    chunks: int = 0
    """How many chunks of a stream had gone to its caller."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A request that reached a backend in full. `how` is what the backend did with it."""

    tag: str
    at: float
    backend: str
    how: str


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What the harness did to whom, as it really happened. `until` includes the time a process took to be back."""

    kind: str
    target: str
    since: float
    until: float


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All of it."""

    delivery: dict[str, str]
    """Delivery mode of each pool."""
    default_timeout_s: float
    calls: list[Call] = field(default_factory=list)
    stalls: dict[str, list[Stalled]] = field(default_factory=dict)
    """By producer."""
    records: list[Record] = field(default_factory=list)
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """State and ending of every request whose hash is still there."""
    executions: list[Execution] = field(default_factory=list)
    submitted: int = 0
    """The pools' own count of what they admitted."""
    counted: Counter[str] = field(default_factory=Counter)
    """The pools' own count of endings."""
    leftovers: dict[str, Any] = field(default_factory=dict)
    audit: list[str] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

"""What the functions take and answer, as frozen records. Times are milliseconds of the server's clock.

Those of which every request makes some are structs, which take a fraction of a frozen dataclass's time to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `request_submit`. `body` is empty when it is over `inline_body_bytes` and was stored by SET before.

    `nonce` names this attempt to submit: the same id and nonce again is answered as the first time.
    `timeout_ms` None = the pool's default, `priority` None = the usual (0 first to 3), `fairness_key` "" = none.
    `images`, `pages` and `estimated_cost_units` feed the cost rule in Lua.
    """

    request_id: str
    pool_id: str
    producer_id: str
    session: str
    nonce: str
    model: str
    message_count: int | None
    images: int
    pages: int
    estimated_cost_units: int | None
    timeout_ms: int | None
    envelope: bytes
    body_bytes: int
    body: bytes = b""
    liveness_ms: int = 30_000
    fairness_key: str = ""
    priority: int | None = None


class Admitted(msgspec.Struct, frozen=True):
    """The request is queued (or, for a repeated call, was)."""

    deadline_ms: int
    server_ms: int


@dataclass(frozen=True, slots=True)
class Exists:
    """The id is in use by another submit; `state` says where that request is."""

    state: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was queued. `reason` is one of the schema's refusals; `retry_after_ms` None = unknown."""

    reason: str
    value: int
    limit: int
    retry_after_ms: int | None


class Lease(msgspec.Struct, frozen=True):
    """A claimed request. `body` is empty when it has to be read by `body_key` (large ones)."""

    request_id: str
    pool_id: str
    producer_id: str
    endpoint_id: str
    fence: int
    attempt: int
    submitted_ms: int
    claimed_ms: int
    deadline_ms: int
    lease_until_ms: int
    cost: int
    body_bytes: int
    nonce: str
    envelope: bytes
    body: bytes


class Claim(msgspec.Struct, frozen=True):
    """What a claim brought. `sleep_ms` = how long the caller may sleep without a wake token; `again` = call at once."""

    server_ms: int
    generation: int
    sleep_ms: int
    again: bool
    ended: int
    leases: tuple[Lease, ...]


class Outcome(StrEnum):
    """How a gateway ends a lease. `RELEASE` gives the request back, unexecuted, without counting the attempt."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"
    RELEASE = "release"


class Verdict(StrEnum):
    """What the endpoint's breaker may make of an attempt."""

    GOOD = "good"
    NEUTRAL = "neutral"
    FAILURE = "failure"
    BACKPRESSURE = "backpressure"


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """One item of `lease_settle`. `head` is an encoded `ReplyHead`; `body` is empty when `by_reference`.

    A reply over `inline_reply_bytes` is stored by SET under the reply body key first, then `by_reference` is set.
    """

    request_id: str
    fence: int
    outcome: Outcome
    status: int | None = None
    error_type: str = ""
    error_message: str = ""
    verdict: Verdict = Verdict.NEUTRAL
    hold_ms: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    head: bytes = b""
    body: bytes = b""
    by_reference: bool = False
    actual_cost_units: int | None = None


class Settled(msgspec.Struct, frozen=True):
    """Answer of `lease_settle`: one word per item (`OK LEASE_LOST PRODUCER_GONE REQUEUED`), and the next claim."""

    answers: tuple[str, ...]
    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Arguments of `lease_renew`: who the gateway is and what it holds; `nonces` = calls whose answer is out."""

    gateway_id: str
    host: str
    pid: int
    version: str
    slots: int
    held: tuple[tuple[str, int], ...]
    nonces: tuple[str, ...] = ()
    started_ms: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """Answer of `lease_renew`. `unknown` are leases the server holds for this gateway and the gateway did not name."""

    server_ms: int
    generation: int
    lost: tuple[str, ...]
    cancelled: tuple[str, ...]
    unknown: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Reaped:
    """Answer of `lease_reap`. `more` = call again, the bound of one call was reached."""

    server_ms: int
    lost: int
    requeued: int
    expired: int
    more: bool


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One thing wrong in a config document: where (`pools[3].quantum`), what was found, what is allowed."""

    field: str
    value: str
    message: str


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One difference between two configs in words: where (`pools[a].quantum`), what it was, what it becomes."""

    field: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Configured:
    """Answer of `group_configure`. `status` is APPLIED, UNCHANGED, CONFLICT or INVALID, or VALID for a check.

    For CONFLICT `generation`, `actor` and `changed_ms` are those of the config that is in force. `changes` are the
    first of `changed` differences to the config before (APPLIED) or in force (VALID).
    """

    status: str
    generation: int
    actor: str = ""
    changed_ms: int = 0
    problems: tuple[FieldProblem, ...] = field(default=())
    changed: int = 0
    changes: tuple[FieldChange, ...] = field(default=())


class Acknowledged(msgspec.Struct, frozen=True):
    """Answer of `reply_ack`. `owner` False = another session owns this producer; `remaining` frames are left."""

    owner: bool
    trimmed: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Answer of `request_cancel`: CANCELLED (was queued), CANCELLING (runs; owner told), RUNNING, ENDED, UNKNOWN."""

    status: str
    ending: str = ""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Answer of `pool_pause`: whether it changed anything, and how the pool stands now (active, paused, draining)."""

    changed: bool
    state: str
    waiting: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Repair:
    """One counter to set: `kind` is group, pool or endpoint.

    Or, the last three members unused: a pool to place anew (`placement`), an endpoint's turn to free (`holder`).
    """

    kind: str
    name: str
    field: str = ""
    seen: int = 0
    value: int = 0


@dataclass(frozen=True, slots=True)
class LibraryVersion:
    """What library the server runs."""

    contract: int
    digest: str
    version: str

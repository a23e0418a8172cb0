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

    `idempotency` is the hash of the caller's key ("" = none) and `fingerprint` that of all it asks for: the same two
    again are answered with the first one's reply. `detached`: nobody waits for the reply, it is kept to be fetched.
    `max_wait_ms`: longest time in the queue (None = until the deadline).
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
    idempotency: str = ""
    fingerprint: str = ""
    detached: bool = False
    max_wait_ms: int | None = None


class Admitted(msgspec.Struct, frozen=True):
    """The request is queued (or, for a repeated call, was).

    `lapsed`: the producer's liveness had run out; earlier requests of it may have ended `producer_gone`.
    """

    deadline_ms: int
    server_ms: int
    lapsed: bool = False


@dataclass(frozen=True, slots=True)
class Exists:
    """The id or idempotency key is in use by request `request_id`; `state` says where that is.

    `same`: whether it asks for the same (None = not known, the two have no fingerprint). `ending`: how it ended, "" if
    it has not.
    """

    state: str
    request_id: str
    same: bool | None = None
    ending: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The idempotency key stands for request `request_id`, which has ended; `frame` is its terminal reply frame."""

    request_id: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was queued. `reason` is one of the schema's refusals; `retry_after_ms` None = unknown."""

    reason: str
    value: int
    limit: int
    retry_after_ms: int | None


class Lease(msgspec.Struct, frozen=True):
    """A claimed request. `body` is empty when it has to be read by `body_key` (large ones).

    `probe_until_ms` > 0: it is the probe of its endpoint's breaker and must have ended by then.
    """

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
    probe_until_ms: int = 0


class Claim(msgspec.Struct, frozen=True):
    """What a claim brought. `sleep_ms` = how long the caller may sleep without a wake token; `again` = call at once.

    `chore_ms`: until a chore is due for which `endpoint_report` is to be called (None = none is known).
    """

    server_ms: int
    generation: int
    sleep_ms: int
    again: bool
    ended: int
    leases: tuple[Lease, ...]
    chore_ms: int | None = None


class Outcome(StrEnum):
    """How a gateway ends a lease.

    `RELEASE` gives the request back, unexecuted, without counting the attempt. `LOST`: the run was broken off; what
    becomes of the request is its pool's delivery mode.
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"
    PRODUCER_GONE = "producer_gone"
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
    `retryable`: the endpoint answered nothing, so another attempt does no work twice. `details`: an encoded
    `AttemptDetails`, kept in the record of the ending; nothing but this gateway knows what stands in it.
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
    retryable: bool = False
    details: bytes = b""


class Settled(msgspec.Struct, frozen=True):
    """Answer of `lease_settle`: a word per item (OK, LEASE_LOST, PRODUCER_GONE, REQUEUED, RETRY) and the next claim."""

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
    chore_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoreReport:
    """Arguments of `endpoint_report`: what the chore `token` came to.

    `probe`: `verdict`, `hold_ms`, `error_type`. `sample`: `waiting` requests in the engine's queue and `token_ms`, the
    time of an output token (None = unknown).
    """

    kind: str
    endpoint_id: str
    token: int
    verdict: Verdict = Verdict.NEUTRAL
    hold_ms: int = 0
    error_type: str = ""
    waiting: float | None = None
    token_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Chore:
    """Answer of `endpoint_report`: what to do next (`kind` PROBE, SAMPLE or NONE), to be reported before `until_ms`.

    `chore_ms`: until the next one is due (None = none is known).
    """

    kind: str
    endpoint_id: str
    token: int
    until_ms: int
    chore_ms: int | None


@dataclass(frozen=True, slots=True)
class Publication:
    """Answer of `snapshot_publish`: PUBLISHED, UNCHANGED or WAIT (for another gateway); `sequence` of the last."""

    status: str
    again_ms: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Answer of `pool_estimate`. None = unknown: nothing was launched lately, or the pool is paused.

    `per_second`: how fast the pool drains. `reason`: why it waits, or would refuse.
    """

    pending: int
    delayed: int
    in_flight: int
    per_second: float | None
    wait_ms: int | None
    reason: str


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


class Chunks(msgspec.Struct, frozen=True, kw_only=True):
    """One item of `reply_append`: `count` chunks of a stream, the first of which has this `number` (from 0)."""

    request_id: str
    fence: int
    number: int
    count: int
    payload: bytes


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
class DeadChange:
    """Answer of `dead_change`: RETRIED (as `new_id`), DROPPED, REFUSED (as a submit would be) or UNKNOWN."""

    status: str
    new_id: str = ""
    reason: str = ""
    value: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class DeadContent:
    """What a dead request says. `body` is empty when it has to be read by its key (large ones), which has `nonce`."""

    envelope: bytes
    body: bytes
    nonce: str
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Repair:
    """One counter to set: `kind` is group, pool or endpoint.

    Or, the last three members unused, something that the server judges anew; `name` says of what: a pool to place
    (`placement`), an endpoint's turn or probe to free (`holder`, `probe`), an endpoint to look at or to have asked
    (`look`, `chores`), a timer or chore to remove (`timer`, `chore`), a request that lacks its timer (`retry`), a dead
    one that is none (`dead`), or when the next timer and chore are due (`clock`).
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

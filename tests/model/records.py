"""What the twin remembers of a fabric group. Plain records; the rules stand in the modules that change them.

What can be counted is counted, not kept: depth, bytes, tombstones and every in-flight number are properties that look
at the ground truth (entries and leases), so that the twin cannot share a bookkeeping mistake with the server.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dispatch.contract import Attempt
from dispatch.fabric.records import Submission
from tests.model.settings import EndpointSettings, GroupSettings, PoolSettings

USUAL_LEVEL = 1
"""Priority of requests that name none; 0 is first."""


@dataclass(eq=False)
class Request:
    """One admitted request. `due_ms` is when its deadline is looked at (next), `kept_until_ms` when it is forgotten."""

    submission: Submission
    seq: int
    cost: int
    submitted_ms: int
    deadline_ms: int
    due_ms: int | None
    state: str = "queued"
    ending: str = ""
    attempt: int = 0
    fence: int = 0
    gateway: str = ""
    endpoint: str = ""
    claim_nonce: str = ""
    units: int = 0
    """What its last launch was charged."""
    claimed_ms: int = 0
    cancelled_by: str = ""
    kept_until_ms: int | None = None
    body_lost: bool = False
    """Its inline body has vanished (a large one is read by the gateway, which finds out itself)."""
    envelope_lost: bool = False
    probe_until_ms: int = 0
    """Until when it is to have ended, as the probe of its endpoint; 0 if it is none."""
    queue_until_ms: int | None = None
    """Until when it may wait for its first attempt, if its caller said so."""
    retry_ms: int = 0
    """When it waits again, if it is `delayed`."""
    tries: list[Attempt] = field(default_factory=list)
    chunks: int = 0
    """How many chunks of its reply were sent."""

    @property
    def id(self) -> str:
        return self.submission.request_id

    @property
    def waits_until_ms(self) -> int:
        return self.deadline_ms if self.queue_until_ms is None else self.queue_until_ms

    @property
    def pool_id(self) -> str:
        return self.submission.pool_id

    @property
    def producer(self) -> str:
        return self.submission.producer_id

    @property
    def flow(self) -> str:
        return self.submission.fairness_key or "*"

    @property
    def level(self) -> int:
        return USUAL_LEVEL if self.submission.priority is None else self.submission.priority

    @property
    def bytes(self) -> int:
        return self.submission.body_bytes


@dataclass(eq=False)
class Pool:
    """A pool: its entries by arrival (those of ended requests are tombstones), its credit, and where it stands."""

    settings: PoolSettings
    waiting: list[Request] = field(default_factory=list)
    returned: list[Request] = field(default_factory=list)
    """Entries that were given back."""
    keyed: bool = False
    """Requests with fairness keys are or were lately in it: its flows have tags."""
    tags: dict[str, int] = field(default_factory=dict)
    idle_tags: dict[str, int] = field(default_factory=dict)
    virtual_time: int = 0
    deficit: int = 0
    mark: int = 0
    """The round counter at the pool's last touch."""
    open: bool = False
    launches: int = 0
    """Launches of the open visit."""
    place: str = "idle"
    """`idle` (nothing waits), `line` (can be visited) or `parked`."""
    parked: str = ""
    """The skip reason it is parked for."""
    turn: int | None = None
    arrival: int | None = None
    """Sequence of its head, as the line last saw it: its rank under policy fifo."""
    state: str = "active"
    """`active`, `paused` (nothing launches) or `draining` (nothing enters)."""
    reason: str = ""
    submitted: int = 0
    launched: int = 0
    cost_served: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return self.settings.pool_id

    @property
    def entries(self) -> list[Request]:
        return [*self.returned, *self.waiting]

    @property
    def live(self) -> list[Request]:
        return [request for request in self.entries if request.state == "queued"]

    @property
    def tombstones(self) -> int:
        return len(self.entries) - len(self.live)

    @property
    def on_endpoint(self) -> bool:
        """Whether it is parked for a reason of its endpoint."""
        return self.parked.startswith("endpoint_")


@dataclass(frozen=True)
class Probe:
    """Who asks a half-open endpoint whether it works again: a lease or, `request_id` being "", a gateway's watcher."""

    request_id: str
    token: int
    """The lease's fence, or what the watcher was given."""
    gateway: str
    until_ms: int


@dataclass(eq=False)
class Sample:
    """What an endpoint's engine said of itself. None is what it did not say."""

    waiting: float | None
    token_ms: float | None
    at_ms: int
    launched: int = 0
    """Launches since then."""


@dataclass(eq=False)
class Endpoint:
    """An endpoint. One without settings is not configured (any more): it counts and limits nothing."""

    name: str
    settings: EndpointSettings | None = None
    holder: str = ""
    """The pool that came back from waiting and whose turn here is not over."""
    attempts: int = 0
    failures: int = 0
    last_error: str = ""
    breaker: str = "closed"
    """`closed`, `open` (until `open_until_ms`, then it is half open) or `half_open` (a probe has begun)."""
    in_a_row: int = 0
    open_until_ms: int = 0
    good: int = 0
    """Good probes since it opened."""
    probe: Probe | None = None
    hold_until_ms: int = 0
    sample: Sample | None = None
    sampling: int | None = None
    """Token of the watcher that is to bring the next sample."""
    was_blocked: bool = False
    """After the last call that looked at the clock: time alone may have changed it since."""


@dataclass(frozen=True)
class Told:
    """A frame a producer can read: a terminal one, or `chunks` of a stream (`attempt`: the number of the first)."""

    sequence: int
    request_id: str
    ending: str
    attempt: int
    tries: tuple[Attempt, ...] = ()


@dataclass
class Key:
    """Which request an idempotency key stands for, and until when."""

    request_id: str
    fingerprint: str
    until_ms: int


@dataclass(frozen=True)
class Ended:
    """One record of the endings stream."""

    request_id: str
    ending: str
    outcome: str
    pool: str
    gateway: str
    attempt: int
    tries: tuple[Attempt, ...] = ()


@dataclass(frozen=True)
class Move:
    """One event: an endpoint's breaker went from `closed`, `open` or `half_open` to another, or it is `held`."""

    endpoint: str
    before: str
    after: str


@dataclass(frozen=True)
class Answer:
    """A gateway's last claim or settle: words of the settled items, and the leases made (id and fence)."""

    nonce: str
    words: tuple[str, ...]
    made: tuple[tuple[str, int], ...]
    kept_until_ms: int


@dataclass(eq=False)
class Group:
    """A whole fabric group."""

    settings: GroupSettings = field(default_factory=GroupSettings)
    now: int = 0
    """The server's time in the call that is under way."""
    generation: int = 0
    actor: str = ""
    config_nonce: str = ""
    pools: dict[str, Pool] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    """End of each lease, ms, by request id."""
    kept: list[str] = field(default_factory=list)
    """Pools that were launchable below their minimum; an entry is checked when it is reached."""
    seq: int = 0
    turn: int = 0
    round: int = 0
    fence: int = 0
    pass_limit: int | None = None
    """A pass in which nothing was launched is under way until a turn number of at least this is reached."""
    pass_visits: int | None = None
    """Fewest visits a launchable pool of this pass needs."""
    pass_held: set[str] = field(default_factory=set)
    """Endpoints that were blocked when this pass came to a pool of theirs, so that it was not asked what it needs."""
    alive: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Session of each producer, and until when it counts as alive."""
    last_beat_ms: int = 0
    grace_until_ms: int = 0
    sleepers: set[str] = field(default_factory=set)
    told: dict[str, list[Told]] = field(default_factory=dict)
    frame: int = 0
    ended: list[Ended] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """When first attempts were launched, and when retries were allowed, ms."""
    retries: list[int] = field(default_factory=list)
    window_ms: int = 0
    """When the budget's window began."""
    chores: dict[str, int] = field(default_factory=dict)
    """What a gateway's watcher is to do, `probe:<endpoint>` and `sample:<endpoint>`, by when it is due, ms."""
    keys: dict[str, Key] = field(default_factory=dict)
    """Idempotency keys, by hash."""
    results: dict[str, Told] = field(default_factory=dict)
    """Terminal frames that are kept, by request id."""
    dead: dict[str, int] = field(default_factory=dict)
    """Requests that are kept for inspection, by when they died, ms."""
    answers: dict[str, Answer] = field(default_factory=dict)

    def find(self, request_id: str, now: int) -> Request | None:
        """Return the request if it is still remembered."""
        request = self.requests.get(request_id)
        forgotten = request is not None and request.kept_until_ms is not None and now >= request.kept_until_ms
        return None if forgotten else request

    def leased(self) -> list[Request]:
        return [self.requests[request_id] for request_id in self.leases]

    def pool_in_flight(self, name: str) -> int:
        return sum(request.pool_id == name for request in self.leased())

    def endpoint_in_flight(self, name: str) -> int:
        return sum(request.endpoint == name for request in self.leased())

    def endpoint(self, name: str) -> Endpoint:
        """Return the endpoint `name`, which comes into being when it is first named."""
        return self.endpoints.setdefault(name, Endpoint(name))

    @property
    def queued(self) -> int:
        return sum(len(pool.live) for pool in self.pools.values())

    def delayed(self, pool: str | None = None) -> list[Request]:
        """Return the requests (of one pool) that wait for their retry to come due."""
        found = [request for request in self.requests.values() if request.state == "delayed"]
        return [request for request in found if pool in {None, request.pool_id}]

    @property
    def fifo(self) -> bool:
        return self.settings.policy == "fifo"

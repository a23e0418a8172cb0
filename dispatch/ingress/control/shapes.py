"""What the control API answers with. What does not apply is left out; what should be known and is not is null, never 0.

Times are milliseconds of the server's clock. Rows carry names, sizes and times: no content, no secrets.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

CURSOR_TEXT = 'where to go on; "" = this is the end'


class Shape(BaseModel):
    """Base of all answers: only what is named here goes out."""

    model_config = ConfigDict(extra="ignore")


class ErrorFacts(Shape):
    """What went wrong."""

    message: str = Field(description="a sentence")
    type: str = Field(description="invalid_request_error, rate_limit_error or server_error")
    param: str | None = Field(description="the member, parameter or header at fault")
    code: str | None = Field(description="a word for programs")


class ErrorBody(Shape):
    """The OpenAI error body."""

    error: ErrorFacts


class Page(Shape):
    """A part of a list."""

    server_ms: int
    cursor: str = Field(description=CURSOR_TEXT)
    truncated: bool = Field(description="whether there is more")


class Note(Shape):
    """Who did something, when and why."""

    by: str
    at_ms: int
    reason: str


class PoolRow(Shape):
    """One pool: its config, what waits and runs, and what holds it up."""

    pool_id: str
    display_name: str | None = None
    quantum: int = Field(description="weight")
    enabled: bool | None = None
    min_concurrent: int | None = None
    max_concurrent: int | None = None
    max_burst_per_visit: int | None = None
    endpoint_id: str | None = None
    delivery: str | None = None
    max_attempts: int | None = None
    retry_on: str | None = None
    on_open: str | None = None
    priority_ageing_ms: int | None = None
    max_queue_depth: int | None = None
    max_queue_bytes: int | None = None
    pending: int
    pending_bytes: int
    delayed: int
    in_flight: int
    deficit: int
    place: str | None = None
    turn: int | None = None
    submitted: int
    launched: int
    cost_served: int
    head_cost: int | None = None
    head_submitted_ms: int | None = None
    block_reason: str | None = None
    block_since_ms: int | None = None
    paused: Note | None = None
    draining: Note | None = None
    endings: dict[str, int] | None = None
    rejected: dict[str, int] | None = None
    skips: dict[str, int] | None = None


class PoolsPage(Page):
    """Pools in the order of the config."""

    rows: list[PoolRow]


class Probe(Shape):
    """The probe of an endpoint that is under way."""

    request_id: str | None = None
    gateway_id: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class Gate(Shape):
    """What an endpoint's gate goes by, and its last sample."""

    engine: str
    target: int
    token_limit_ms: int
    fail: str
    stale_after_ms: int
    waiting: float | None
    token_ms: float | None
    sampled_ms: int | None
    age_ms: int | None
    launched_since: int | None
    gateway_id: str | None
    stale: bool


class EndpointRow(Shape):
    """One endpoint with its breaker and its gate."""

    endpoint_id: str
    url: str
    max_concurrent: int | None = None
    in_flight: int
    waiting_pools: int | None = None
    turn_of: str | None = None
    attempts: int | None = None
    failures: int | None = None
    last_error_type: str | None = None
    last_error_ms: int | None = None
    hold_until_ms: int | None = None
    block_reason: str | None = None
    blocked_until_ms: int | None = None
    breaker: str | None = None
    breaker_failures: int | None = None
    failures_in_a_row: int | None = None
    close_after: int | None = None
    breaker_since_ms: int | None = None
    open_until_ms: int | None = None
    next_probe_ms: int | None = Field(None, description="when a gateway asks it, if no request does before")
    good_probes: int | None = None
    probe: Probe | None = None
    gate: Gate | None = None


class EndpointsPage(Page):
    """Endpoints in the order of the config."""

    rows: list[EndpointRow]


class GatewayRow(Shape):
    """One gateway that is registered."""

    gateway_id: str
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    slots: int | None = None
    started_ms: int | None = None
    beat_ms: int | None = None
    draining: bool
    in_flight: int


class GatewaysPage(Page):
    """Gateways, in no order that means something."""

    rows: list[GatewayRow]


class Try(Shape):
    """An attempt that is over. `status` is the endpoint's, null if it gave none."""

    attempt: int
    claimed_ms: int
    ended_ms: int
    status: int | None
    error_type: str
    gateway_id: str
    endpoint_id: str


class RequestRow(Shape):
    """One request."""

    request_id: str
    state: str = Field(description="queued, leased (it runs), delayed (it waits for its next attempt) or ended")
    ending: str | None = None
    pool_id: str
    producer_id: str | None = None
    model: str | None = None
    message_count: int | None = None
    cost: int | None = None
    priority: int | None = None
    fairness_key: str | None = None
    detached: bool | None = None
    attempt: int
    body_bytes: int | None = None
    submitted_ms: int | None = None
    deadline_ms: int | None = None
    claimed_ms: int | None = None
    lease_until_ms: int | None = None
    due_ms: int | None = None
    gateway_id: str | None = None
    dispatcher_id: str | None = None
    endpoint_id: str | None = None
    cancel_asked_by: str | None = None
    probe_until_ms: int | None = None
    chunks: int | None = None
    first_chunk_ms: int | None = None
    tries: list[Try] | None = None
    died_ms: int | None = None
    last_error_type: str | None = None


class RequestsPage(Page):
    """Requests. A page may have fewer rows than asked for, also none, and not be the last."""

    rows: list[RequestRow]


class EndingRow(Shape):
    """How a request ended."""

    record_id: str
    request_id: str | None = None
    ending: str
    outcome: str | None = None
    pool: str | None = None
    producer: str | None = None
    gateway: str | None = None
    endpoint: str | None = None
    error_type: str | None = None
    attempt: int | None = None
    cost: int | None = None
    submitted_ms: int | None = None
    claimed_ms: int | None = None
    ended_ms: int | None = None
    status: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    chunks: int | None = None
    first_chunk_ms: int | None = None


class EndingsPage(Page):
    """What ended, the newest first."""

    rows: list[EndingRow]


class EventRow(Shape):
    """Something that somebody or something changed; its own facts stand beside these, as words."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str]

    event_id: str
    kind: str
    at_ms: int


class EventsPage(Page):
    """What was changed, the newest first."""

    rows: list[EventRow]


class RetryBudget(Shape):
    """Attempts of the last ten seconds, and how many retries they allow."""

    first_attempts_10s: float
    retries_10s: float
    allowed_10s: float


class Reader(Shape):
    """Who takes the endings to a history, and how far it is."""

    name: str
    consumers: int
    lag: int | None = Field(None, description="endings it has not been handed; null = the server cannot tell")
    last_ms: int | None = Field(None, description="when the last it was handed ended")
    taken: int = Field(description="endings it was handed and has not confirmed")
    oldest_taken_ms: int | None = None


class GroupFacts(Shape):
    """The group as a whole."""

    fabric_group: str
    generation: int
    policy: str
    total_concurrent_dispatch: int
    max_queued: int | None = None
    cost_min: int | None = None
    cost_max: int | None = None
    lease_ms: int | None = None
    liveness_ms: int | None = None
    pools: int
    pending: int
    in_flight: int
    delayed: int
    dead: int
    retry_budget: RetryBudget
    next_due_ms: int | None = None
    next_chore_ms: int | None = None
    last_beat_ms: int | None = None
    grace_until_ms: int | None = None
    sleeping_gateways: int
    sequence: int | None = None
    round: int | None = None
    readers: list[Reader] | None = None


class EstimateFacts(Shape):
    """How long a request that is submitted to the pool now would wait. null = unknown, or nothing holds it up."""

    pool_id: str
    pending: int
    delayed: int
    in_flight: int
    per_second: float | None = Field(description="how fast the pool drains")
    wait_ms: int | None
    reason: str | None = Field(description="why the pool waits now, or would refuse")

"""Every metric: name, kind, unit, labels and what it says. No other file spells one (nor a label of one).

Names are OpenTelemetry's; Prometheus shows them with `_` for `.`, the unit's name and, of counters, `_total` last.
Those that begin with `llm_dispatch.pool`, `.group` and `.endpoint` are the group's: every gateway exports the same
values, so queries take `max by (...)` of them. All others are this process's own, to be summed over gateways.

Labels are bounded: pools and endpoints are configured, words come from closed lists, models are capped.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from dispatch.telemetry import names

Kind = Literal["gauge", "counter", "histogram"]

SECONDS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
)  # fmt: skip
"""Bounds for what an LLM call takes, waiting included: 10 ms to an hour."""
QUICK_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
"""Bounds for a call to Valkey."""


_SUFFIXES = {"s": "_seconds", "By": "_bytes"}


class Family(NamedTuple):
    """One metric. `bounds` are those of a histogram's buckets."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    says: str
    bounds: tuple[float, ...] = SECONDS

    def shown(self) -> tuple[str, ...]:
        """Return the names of its samples, as Prometheus shows them."""
        name = self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "")
        if self.kind == "histogram":
            return f"{name}_bucket", f"{name}_count", f"{name}_sum"
        return (f"{name}_total" if self.kind == "counter" else name,)


CATALOGUE: Final[dict[str, Family]] = {}


def _family(name: str, kind: Kind, unit: str, labels: str, says: str) -> Family:
    found = Family(name, kind, unit, tuple(labels.split()), says)
    CATALOGUE[name] = found
    return found


_ALIKE = " Of the whole group: every gateway exports the same."


def _pool(name: str, kind: Kind, unit: str, says: str, labels: str = "") -> Family:
    return _family(f"llm_dispatch.pool.{name}", kind, unit, f"pool {labels}", says + _ALIKE)


def _group(name: str, unit: str, says: str, labels: str = "") -> Family:
    return _family(f"llm_dispatch.group.{name}", "gauge", unit, labels, says + _ALIKE)


def _endpoint(name: str, kind: Kind, unit: str, says: str, labels: str = "") -> Family:
    return _family(f"llm_dispatch.endpoint.{name}", kind, unit, f"endpoint {labels}", says + _ALIKE)


# What is known of reading the group. Each gateway's own.
GROUP_UP = _family(
    "llm_dispatch.snapshot.up", "gauge", "", "section",
    "Whether that section of the group's state could be read for this scrape; where not, its values are missing.",
)  # fmt: skip
GROUP_AGE = _family(
    "llm_dispatch.snapshot.age",
    "gauge",
    "s",
    "",
    "How long ago the group's state was read (it is kept for 1 s).",
)
GROUP_TRUNCATED = _family(
    "llm_dispatch.snapshot.truncated",
    "gauge",
    "",
    "section",
    "Whether rows beyond a read's bound are missing.",
)

# The group.
GROUP_PENDING = _group("pending", "{request}", "Requests that wait in queues.")
GROUP_IN_FLIGHT = _group("in_flight", "{request}", "Requests that run.")
GROUP_LIMIT = _group("limit", "{request}", "Requests that may run at once (total_concurrent_dispatch).")
GROUP_QUEUE_LIMIT = _group("queue_limit", "{request}", "Requests that may wait at once (max_queued).")
GROUP_DELAYED = _group("delayed", "{request}", "Requests that wait for their next attempt.")
GROUP_DEAD = _group("dead", "{request}", "Requests that ended dead and are kept.")
GROUP_GENERATION = _group("generation", "", "Generation of the config in force.")
GROUP_SLEEPING = _group("sleeping_gateways", "{gateway}", "Gateways that have free slots and found nothing to run.")
GROUP_GATEWAYS = _group("gateways", "{gateway}", "Gateways that are registered, by state (active, draining).", "state")
GROUP_SLOTS = _group("slots", "{request}", "Slots of all gateways that are registered.")
GROUP_RETRIES = _group(
    "retry_budget", "{request}", "Last 10 s: first attempts, retries, and retries that were allowed.", "kind"
)

# Pools.
PENDING = _pool("pending", "gauge", "{request}", "Requests that wait in the pool.")
PENDING_BYTES = _pool("pending_size", "gauge", "By", "Bytes of bodies that wait in the pool.")
IN_FLIGHT = _pool("in_flight", "gauge", "{request}", "Requests of the pool that run.")
DELAYED = _pool("delayed", "gauge", "{request}", "Requests of the pool that wait for their next attempt.")
OLDEST_AGE = _pool(
    "oldest_age", "gauge", "s",
    "How long the request that is next in the pool has waited; 0 where nothing waits. With fairness keys or "
    "priorities an older one may stand behind it.",
)  # fmt: skip
DEFICIT = _pool("deficit", "gauge", "{unit}", "Credit of the pool, in cost units.")
HEAD_COST = _pool("head_cost", "gauge", "{unit}", "Cost of the request that is next; missing where nothing waits.")
QUANTUM = _pool("quantum", "gauge", "{unit}", "Weight: credit a round.")
MAX_CONCURRENT = _pool("max_concurrent", "gauge", "{request}", "Cap of running requests; missing where there is none.")
MIN_CONCURRENT = _pool("min_concurrent", "gauge", "{request}", "Protected slots.")
QUEUE_LIMIT = _pool("queue_limit", "gauge", "{request}", "Requests that may wait at once (max_queue_depth).")
POOL_STATE = _pool("state", "gauge", "", "1 for the state it is in: enabled, paused, draining or disabled.", "state")
BLOCKED = _pool("blocked", "gauge", "s", "For how long what waits has been passed over, and why.", "reason")
ADMITTED = _pool("admitted", "counter", "{request}", "Requests that were admitted.")
REFUSED = _pool("refused", "counter", "{request}", "Submits that were refused, by reason.", "reason")
LAUNCHED = _pool("launched", "counter", "{request}", "Attempts that were given to gateways.")
COST_SERVED = _pool("cost_served", "counter", "{unit}", "Cost units of what was launched.")
SKIPS = _pool("skips", "counter", "", "How often the pool had work and launched none, by reason.", "reason")
ENDINGS = _pool("endings", "counter", "{request}", "Requests that ended, by ending.", "ending")
DROPS = _pool(
    "drops", "counter", "{request}",
    "Of the endings those whose caller got no answer of an endpoint: expired, lost, dead, malformed, producer_gone and "
    "reply_dropped.", "reason",
)  # fmt: skip

# Endpoints.
ENDPOINT_IN_FLIGHT = _endpoint("in_flight", "gauge", "{request}", "Requests that run there.")
ENDPOINT_LIMIT = _endpoint("max_concurrent", "gauge", "{request}", "Cap of them; missing where there is none.")
ENDPOINT_WAITING = _endpoint("waiting_pools", "gauge", "{pool}", "Pools whose work waits for it.")
ATTEMPTS = _endpoint("attempts", "counter", "{request}", "Attempts that were launched there.")
FAILURES = _endpoint("failures", "counter", "{request}", "Attempts that counted against its breaker.")
IN_A_ROW = _endpoint("failures_in_a_row", "gauge", "{request}", "Failures since the last good answer.")
BREAKER = _endpoint("breaker_state", "gauge", "", "1 for the state it is in: closed, open or half_open.", "state")
HELD = _endpoint("hold", "gauge", "s", "For how long it still asks not to be called; 0 = it does not.")
GATE = _endpoint(
    "gate_state",
    "gauge",
    "",
    "1 for the state it is in: open (launches), closed (engine full) or stale.",
    "state",
)
GATE_VALUE = _endpoint("gate_value", "gauge", "{request}", "The engine's queue in the last sample.")
GATE_TARGET = _endpoint("gate_target", "gauge", "{request}", "The queue from which on nothing is launched.")
GATE_TOKEN = _endpoint("gate_token", "gauge", "s", "Time of an output token in the last sample.")
GATE_AGE = _endpoint("gate_sample_age", "gauge", "s", "How old the last sample is.")

# This gateway.
BUILD = _family(
    "llm_dispatch.build_info", "gauge", "", "version contract library python", "1, with what this process is made of."
)
SLOTS = _family("llm_dispatch.gateway.slots", "gauge", "{request}", "", "Requests this gateway may run at once.")
SLOTS_USED = _family("llm_dispatch.gateway.slots_used", "gauge", "{request}", "", "Requests this gateway runs.")
DRAINING = _family("llm_dispatch.gateway.draining", "gauge", "", "", "Whether it stops.")
FABRIC_UP = _family("llm_dispatch.gateway.fabric_up", "gauge", "", "", "Whether its calls to Valkey get through.")
BEAT_AGE = _family(
    "llm_dispatch.gateway.heartbeat_age", "gauge", "s", "", "Since the last heartbeat that Valkey has confirmed."
)
QUEUE_WAIT = _family(
    "llm_dispatch.queue_wait", "histogram", "s", "pool",
    "From a request's submit to the claim of its last attempt, for requests that ended here.",
)  # fmt: skip
EXECUTION = _family(
    "llm_dispatch.execution", "histogram", "s", "pool", "From the claim of the last attempt to the ending."
)
TOTAL = _family("llm_dispatch.request_duration", "histogram", "s", "pool", "From the submit to the ending.")
DELIVERY = _family(
    "llm_dispatch.delivery", "histogram", "s", "pool",
    "From the ending to the producer's acknowledgement, for those that this gateway's recorder read.",
)  # fmt: skip
SETTLED = _family(
    "llm_dispatch.attempts", "counter", "{request}", "pool outcome", "Attempts this gateway has settled, by outcome."
)
FAILED = _family(
    "llm_dispatch.attempt_failures", "counter", "{request}", "pool error_type",
    "Attempts this gateway has settled with an error, by its word.",
)  # fmt: skip
AGAIN = _family(
    "llm_dispatch.retries", "counter", "{request}", "pool kind",
    "Attempts that are followed by another: retry (after a pause), requeued (at_least_once, or given back).",
)  # fmt: skip
LEASES_LOST = _family(
    "llm_dispatch.lease_losses", "counter", "{request}", "pool reason",
    "Leases this gateway lost: lost (the server says so), fenced (not renewed in time), unsettled (result not taken).",
)  # fmt: skip
FUNCTION = _family(
    "llm_dispatch.function_duration", "histogram", "s", "function",
    "Round trip of a library function as its caller waits for it; those that share a round trip share its time.",
)._replace(bounds=QUICK_SECONDS)  # fmt: skip
CATALOGUE[FUNCTION.name] = FUNCTION
FUNCTION_ERRORS = _family(
    "llm_dispatch.function_errors", "counter", "", "function error", "Calls that raised, by kind of error."
)
WAKES = _family("llm_dispatch.wakeups", "counter", "", "source", "Wake tokens and broken waits: work, own, reconnect.")
CLAIMS = _family("llm_dispatch.claims", "counter", "", "result", "Claims, by what they brought: full, some, none.")
CLAIMED = _family("llm_dispatch.claimed", "counter", "{request}", "", "Requests that claims brought.")
CHUNKS = _family("llm_dispatch.stream.chunks", "counter", "{chunk}", "", "Chunks of streams that were passed on.")
CHUNK_BYTES = _family("llm_dispatch.stream.size", "counter", "By", "", "Bytes of these chunks.")
HTTP = _family(
    "llm_dispatch.http.answers", "counter", "{request}", "operation status", "Answers to calls over HTTP, by status."
)
HTTP_REFUSED = _family(
    "llm_dispatch.http.refusals", "counter", "{request}", "reason",
    "Calls over HTTP that were refused or had no answer of an endpoint, by the word of x-dispatch-reason.",
)  # fmt: skip
_SINK = " By sink (history, otlp)."
SINK_UP = _family("llm_dispatch.history.up", "gauge", "", "sink", "Whether the sink took the last batch." + _SINK)
RECORDED = _family(
    "llm_dispatch.history.records", "counter", "{record}", "sink", "Records this gateway has handed on." + _SINK
)
SPANS_DROPPED = _family(
    "llm_dispatch.history.drops", "counter", "{span}", "sink", "Spans that the sink will never get." + _SINK
)
RECORDS_LOST = _family(
    "llm_dispatch.history.lost", "counter", "{record}", "sink",
    "Records that were trimmed before anybody had recorded them, as this gateway saw it." + _SINK,
)  # fmt: skip
RECORDS_LAG = _family(
    "llm_dispatch.history.lag", "gauge", "{record}", "sink", "Records of the group that nobody has read yet." + _SINK
)
RECORDS_PENDING = _family(
    "llm_dispatch.history.pending",
    "gauge",
    "{record}",
    "sink",
    "Records of the group that are not acknowledged." + _SINK,
)

_MODEL = f"{names.GEN_AI_OPERATION_NAME} {names.GEN_AI_PROVIDER_NAME} {names.GEN_AI_REQUEST_MODEL}"
_GEN_AI = f"{_MODEL} {names.SERVER_ADDRESS} {names.SERVER_PORT}"
GEN_AI_DURATION = _family(
    names.GEN_AI_CLIENT_DURATION, "histogram", "s", f"{_GEN_AI} {names.ERROR_TYPE}",
    "Attempts at endpoints, by the GenAI conventions (error.type is empty where it succeeded).",
)  # fmt: skip
GEN_AI_FIRST_CHUNK = _family(
    names.GEN_AI_CLIENT_TIME_TO_FIRST_CHUNK, "histogram", "s", _GEN_AI, "From the call to the first chunk of a stream."
)
GEN_AI_INPUT = _family(
    names.GEN_AI_CLIENT_INPUT_TOKENS, "counter", "{token}", _GEN_AI, "Input tokens, where endpoints tell."
)
GEN_AI_OUTPUT = _family(
    names.GEN_AI_CLIENT_OUTPUT_TOKENS, "counter", "{token}", _GEN_AI, "Output tokens, where endpoints tell."
)
MODELS_FOLDED = _family(
    "llm_dispatch.models_folded", "counter", "{request}", "",
    "Attempts whose model is counted as 'other' because this process has seen 1000 others.",
)  # fmt: skip

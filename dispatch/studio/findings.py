"""What a verdict is made of: findings, the facts they may rest on, and the signals of the seed's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from dispatch.fabric.view import FabricView
from dispatch.studio.trend import Trend

Kind = Literal["broken", "held", "capped", "person", "unknown", "note"]
"""`broken`: something does not work. `held`: the endpoint or a lease holds it. `capped`: a bound is reached. `person`:
somebody did it. `unknown`: it could not be read. `note`: nothing is wrong, and it is not what one may expect."""

ORDER: Final[tuple[Kind, ...]] = ("broken", "held", "capped", "person", "unknown", "note")

Slug = Literal[
    "pending-grows", "in-flight-sticks", "requests-vanish", "backend-errors", "fallback-missing", "history-missing"
]


class Act(msgspec.Struct, frozen=True):
    """What to press: the label, where it leads (a page, or an act of the page), and of which thing."""

    label: str
    target: Literal[
        "endpoint", "gateways", "pool", "group", "change_cap", "resume", "in_flight", "history", "audit", "system"
    ]
    name: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that wants attention.

    `rule` names what found it, `subject` is `pool:a`, `endpoint:e`, `gateway:g` or `group`, and with the rule it tells
    one finding from another. `since_ms`: the server's time since when it is so, None = not known. `look_first`: where
    to look. `signals`: the symptoms of which it may be the cause, the likeliest first. `covers`: further subjects that
    it speaks for (the pools behind an endpoint), so that nothing else is said of them.
    """

    rule: str
    kind: Kind
    subject: str
    sentence: str
    since_ms: int | None = None
    act: Act | None = None
    look_first: str = ""
    signals: tuple[Slug, ...] = ()
    covers: tuple[str, ...] = ()


class HistoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the history says. `configured` False = history is off; `problem` "" = it answers.

    `run_p95_ms` by pool, of what succeeded lately; `last_row_ms` = when the newest row was written, `writers` by
    gateway likewise; `missing` = endings of the stream that have no row although they should (None = not compared).
    """

    configured: bool = True
    problem: str = ""
    run_p95_ms: Mapping[str, float] = msgspec.field(default_factory=dict)
    last_row_ms: int | None = None
    writers: Mapping[str, int] = msgspec.field(default_factory=dict)
    missing: int | None = None


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """From when on something counts."""

    recent_ms: int = 300_000
    long_run_ms: int = 600_000
    long_run_floor_ms: int = 5_000
    """Whatever its pool's runs usually take, a run that is younger is not unusual."""
    long_run_samples: int = 20
    queue_percent: int = 80
    clock_ms: int = 1_000
    reader_lag_ms: int = 10_000


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that rules look at. What is None is not known, and no rule concludes anything from it.

    `differences`: what an audit found. Clocks are compared only with `compare_clocks`: over a gateway's API the moment
    of an answer says little.
    """

    view: FabricView
    trend: Trend | None = None
    history: HistoryFacts | None = None
    differences: int | None = None
    compare_clocks: bool = True
    limits: Thresholds = Thresholds()


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """One symptom of the seed's table: where to look first when nothing is found, and the hint that the page shows."""

    slug: Slug
    symptom: str
    look_first: str
    hint: str


SIGNALS: Final[tuple[Signal, ...]] = (
    Signal(
        slug="pending-grows",
        symptom="Pending count grows",
        look_first="pool weights, capacity limits, Valkey depth, backend saturation",
        hint="Arrives faster than it leaves. Raise the cap where the endpoint has room, or the weight, or add backend.",
    ),
    Signal(
        slug="in-flight-sticks",
        symptom="In-flight count sticks",
        look_first="gateway heartbeats, then the endpoint's latency",
        hint="With fresh heartbeats the gateway lives and the backend is slow. Without, the leases end and the "
        "requests are lost or run again, as their pool's delivery says.",
    ),
    Signal(
        slug="requests-vanish",
        symptom="Requests disappear without completion",
        look_first="producer liveness drops, and gateways that died with requests in hand",
        hint="The caller stopped refreshing its liveness key, or a gateway died holding the request and the pool is "
        "at_most_once.",
    ),
    Signal(
        slug="backend-errors",
        symptom="Backend connection errors",
        look_first="the endpoint's address, and the gateway's log",
        hint="Check the address and that something listens there; the gateway's log has the full error.",
    ),
    Signal(
        slug="fallback-missing",
        symptom="Provider fallback did not happen",
        look_first="the configuration of the endpoint (LiteLLM, OpenRouter, vLLM or the provider's gateway)",
        hint="Fallback, provider limits and budgets belong to the endpoint, not to dispatch.",
    ),
    Signal(
        slug="history-missing",
        symptom="Completed item missing from history",
        look_first="the exporter, ClickHouse, and that gateway and history speak of the same group",
        hint="Check the exporter, ClickHouse, and that the gateway runs in this group.",
    ),
)
"""The seed's table "Reading The Signals", in its order."""

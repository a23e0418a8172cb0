"""The plan of a run, all of it made from the seed: what the producers call, and what is done to whom and when.

Faults come in storms with calm between them, so that a run also shows what holds where nothing is done. Within a storm
they come about every 0.4 s, each for a while of its own, on several targets at once; one target suffers one at a time.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from tests.chaos.evidence import Order

GATEWAYS = ("g0", "g1", "g2")
PRODUCERS = ("p0", "p1", "p2")
BACKENDS = ("b0", "b1")
MODES = ("at_most_once", "at_least_once", "both")

LEASE_MS = 1500
LIVENESS_MS = 2000
DEFAULT_TIMEOUT_MS = 10_000
RATE = 32.0
"""Calls per second of all producers together."""

_STORM_S, _CALM_S = 11.0, 8.5
_MEAN_GAP_S = 0.4
_BETWEEN_S = 0.5
_PRELUDE_S = 2.5
_TRIES = 8
_DELIVERY = {"wide": "at_most_once", "capped": "at_least_once", "kept": "at_most_once", "side": "at_least_once"}
_WEIGHTS = {"wide": 4, "capped": 3, "kept": 2, "side": 3}

_Kind = tuple[str, str, float, float, float]
"""Kind of fault, kind of target, weight, least and most seconds."""

_KINDS: tuple[_Kind, ...] = (
    ("kill", "gateway", 3.0, 0.2, 2.5),
    ("stop", "gateway", 4.0, 0.1, 5.0),
    ("drain", "gateway", 1.0, 0.2, 1.5),
    ("cut", "gateway", 2.0, 0.0, 0.0),
    ("freeze", "gateway", 2.0, 0.2, 5.0),
    ("refuse", "gateway", 1.0, 0.2, 3.0),
    ("kill", "producer", 1.0, 0.2, 2.0),
    ("stop", "producer", 2.0, 0.1, 4.0),
    ("cut", "producer", 2.0, 0.0, 0.0),
    ("freeze", "producer", 1.5, 0.2, 3.5),
    ("refuse", "producer", 0.7, 0.2, 3.0),
    ("kill", "valkey", 0.8, 0.1, 1.5),
    ("restart", "valkey", 0.6, 0.1, 1.0),
    ("stop", "valkey", 1.5, 0.1, 7.0),
    ("slow", "valkey", 1.5, 1.0, 4.0),
    ("flush", "valkey", 0.4, 0.1, 0.8),
    ("cut", "valkey", 0.7, 0.0, 0.0),
    ("cancel", "operator", 1.0, 0.0, 0.0),
    ("pause", "operator", 0.6, 0.2, 2.0),
    ("slow", "backend", 1.5, 1.0, 3.0),
    ("fail", "backend", 4.0, 0.5, 2.5),
    ("cut", "backend", 1.0, 0.0, 0.0),
    ("refuse", "backend", 1.0, 0.3, 2.0),
)
KINDS = tuple(f"{kind[1]} {kind[0]}" for kind in _KINDS)
"""All faults, as `--only` takes them."""

CUTS = frozenset({"cut", "freeze", "refuse"})
"""Faults of connections."""

FAILURES = ("500", "502", "503", "504", "503-later", "429", "reset", "short", "garbage", "silent", "400")
"""What a failing backend does."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing done to one target. `detail`: what a failing backend does, how slow what is slow is (s), which pool.

    The target `operator` is one who cancels requests and pauses pools.
    """

    at_s: float
    kind: str
    target: str
    for_s: float
    detail: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run does."""

    seed: int
    mode: str
    duration_s: float
    orders: dict[str, list[Order]]
    """By producer, in order of time."""
    faults: list[Fault]
    document: dict[str, Any]
    """The group's config, without the endpoints' addresses."""


def make_plan(seed: int, requests: int, mode: str, rate: float = RATE, only: Collection[str] = ()) -> Plan:
    """Make the plan of `seed`. The same arguments make the same plan. `only`: faults like "valkey stop"; () = all."""
    duration = requests / rate
    orders: dict[str, list[Order]] = {producer: [] for producer in PRODUCERS}
    chance = random.Random(f"orders {seed}")
    for number in range(requests):
        producer = chance.choice(PRODUCERS)
        orders[producer].append(_order(chance, f"c{seed}-{number:06}", (number + chance.random()) / rate))
    for several in orders.values():
        several.sort(key=lambda order: order.at_s)
    kinds = [kind for kind in _KINDS if not only or f"{kind[1]} {kind[0]}" in only]
    faults = _faults(random.Random(f"faults {seed}"), duration, kinds)
    return Plan(seed=seed, mode=mode, duration_s=duration, orders=orders, faults=faults, document=_document(mode))


def delivery_of(mode: str) -> dict[str, str]:
    """Return the delivery mode of each pool."""
    return {pool: usual if mode == "both" else mode for pool, usual in _DELIVERY.items()} | {"default": "at_most_once"}


def _order(chance: random.Random, tag: str, at_s: float) -> Order:
    sizes = (chance.randint(20, 2000), chance.randint(5_000, 20_000), chance.randint(80_000, 200_000))
    kind = chance.choices(("plain", "stream", "named", "keyed"), (30, 25, 20, 25))[0]
    return Order(
        tag=tag,
        at_s=round(at_s, 3),
        pool=chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0],
        timeout_ms=chance.choice((None, 1500, 3000, 5000, 8000, 12_000, 12_000)),
        named=kind == "named",
        keyed=kind == "keyed",
        stream=kind == "stream",
        fairness_key=chance.choice((None, None, "k0", "k1", "k2")),
        priority=chance.choice((None, None, 0, 1, 2, 3)),
        cost=chance.choice((None, 1, 2, 8)),
        size=chance.choices(sizes, (95, 4, 1))[0],
        leave_after_s=round(chance.uniform(0.02, 2.0), 3) if chance.random() < 0.04 else None,
    )


def _faults(chance: random.Random, duration_s: float, kinds: Sequence[_Kind]) -> list[Fault]:
    """Make the storms: none in the first seconds, none so late that it would outlast the calls by much."""
    faults: list[Fault] = []
    free_at: dict[str, float] = {}
    at = _PRELUDE_S
    while at < duration_s - 1.0:
        if at % (_STORM_S + _CALM_S) > _STORM_S:
            at += _CALM_S
            continue
        tries = (_fault(chance, round(at, 3), kinds) for _ in range(_TRIES))
        fault = next((one for one in tries if free_at.get(one.target, 0.0) <= at), None)
        if fault is not None:
            faults.append(fault)
            free_at[fault.target] = at + fault.for_s + _BETWEEN_S
        at += chance.expovariate(1 / _MEAN_GAP_S)
    return faults


def _fault(chance: random.Random, at_s: float, kinds: Sequence[_Kind]) -> Fault:
    kind, family, _, least, most = chance.choices(kinds, [each[2] for each in kinds])[0]
    targets = {"gateway": GATEWAYS, "producer": PRODUCERS, "backend": BACKENDS}.get(family, (family,))
    # Short ones are more frequent than long ones.
    for_s = least + (most - least) * min(chance.random(), chance.random())
    detail = ""
    if kind == "fail":
        detail = chance.choice(FAILURES)
    elif kind == "pause":
        detail = chance.choice(list(_WEIGHTS))
    elif kind == "slow":
        detail = f"{chance.uniform(0.01, 0.12):.3f}" if family == "valkey" else f"{chance.uniform(0.3, 2.5):.2f}"
    return Fault(at_s=at_s, kind=kind, target=chance.choice(targets), for_s=round(for_s, 3), detail=detail)


def _document(mode: str) -> dict[str, Any]:
    delivery = delivery_of(mode)
    retries = {
        "retry_on": ["unreachable", "disconnected", "overloaded", "502", "504"],
        "retry_base_ms": 100,
        "retry_cap_ms": 1000,
    }
    breaker = {"breaker_failures": 6, "open_ms": 800, "close_after": 2, "probe_timeout_ms": 1500}
    times = {"connect_timeout_ms": 1000, "first_byte_timeout_ms": 6000}
    shapes: dict[str, dict[str, Any]] = {
        "wide": {"quantum": 4},
        "capped": {"quantum": 2, "max_concurrent": 3} | retries,
        "kept": {"quantum": 1, "min_concurrent": 2, "max_attempts": 3} | retries,
        "side": {"quantum": 2, "endpoint": "b1", "max_queue_depth": 60},
        "default": {},
    }
    timeouts = {"default_timeout_ms": DEFAULT_TIMEOUT_MS, "max_timeout_ms": 20_000}
    attempts = {"at_least_once": {"max_attempts": 5}, "at_most_once": {}}
    pools = [
        {"pool_id": name, "delivery": delivery[name]} | timeouts | shape | attempts[delivery[name]]
        for name, shape in shapes.items()
    ]
    return {
        "total_concurrent_dispatch": 20,
        "lease_ms": LEASE_MS,
        "liveness_ms": LIVENESS_MS,
        "retention_ms": 3_600_000,
        "retry_budget_min_per_s": 10,
        "dead_kept": 100_000,
        "pools": pools,
        "default_endpoint": "b0",
        "endpoints": [
            {"endpoint_id": "b0"} | times | breaker,
            {"endpoint_id": "b1", "max_concurrent": 5} | times | breaker,
        ],
    }

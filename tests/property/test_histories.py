"""Random histories through the server and its twin, which must agree after every step.

A failing history is shrunk and printed as a program of rule calls. The next run of the test begins with it (it stands
in `.hypothesis`), and behind `state = HistoryMachine(connection, port, Counter())` the program is a test by itself; one
worth keeping goes into `test_pinned_histories.py`, in words.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from dispatch.fabric import records as r
from dispatch.fabric.sync import BlockingConnection
from tests.model.bench import submission
from tests.property.history import GATEWAYS, LARGE_BYTES, LONG_MS, PRODUCERS, History
from tests.support.valkey import ValkeyProcess

POOLS = ("a", "b", "c", "d")
CROWD = tuple(f"p{number}" for number in range(9))
"""More pools, in some histories: with them a pass of barren visits is longer than one call."""
URL = "http://127.0.0.1:9/v1"

pool_fields = {
    "quantum": st.sampled_from((1, 2, 4, 8, 50)),
    "min_concurrent": st.sampled_from((0, 0, 1, 2)),
    "max_concurrent": st.sampled_from((None, None, 1, 2, 3)),
    "max_burst_per_visit": st.sampled_from((None, None, 1, 2)),
    "endpoint": st.sampled_from(("e", "f")),
    "delivery": st.sampled_from(("at_most_once", "at_least_once")),
    "max_attempts": st.sampled_from((None, 1, 2)),
    "max_queue_depth": st.sampled_from((10_000, 10_000, 10_000, 3)),
    "max_queue_bytes": st.sampled_from((1_000_000, 1_000_000, 10_000)),
    "enabled": st.sampled_from((True, True, True, False)),
    "display_name": st.sampled_from(("", "x")),
    "priority_ageing_ms": st.sampled_from((0, LONG_MS)),
}
endpoint_caps = st.sampled_from((None, 1, 2))
group_fields = {
    "policy": st.sampled_from(("drr", "fifo")),
    "total_concurrent_dispatch": st.integers(1, 6),
    "cost_max": st.sampled_from((4, 16)),
    "cost_min": st.sampled_from((1, 2)),
    "max_queued": st.sampled_from((100_000, 100_000, 12)),
}
keys = st.sampled_from(("", "k", "l", "m"))
levels = st.sampled_from((None, None, 0, 2, 3))
any_pool = st.sampled_from((*POOLS, *POOLS, "default"))
costs = st.one_of(st.just(1), st.integers(0, 20))
small = st.integers(0, 40)
"""Picks one of what is there."""
picks = st.lists(small, max_size=4)
outcomes = st.sampled_from(list(r.Outcome))


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, Any]:
    """One change of a config: of the group, of an endpoint's cap, of a pool's field, or a pool that comes or goes."""
    kind = draw(st.sampled_from(("pool", "pool", "pool", "group", "endpoint", "drop")))
    if kind == "group":
        name = draw(st.sampled_from(sorted(group_fields)))
        return kind, name, draw(group_fields[name])
    if kind == "endpoint":
        return kind, draw(st.sampled_from(("e", "f"))), draw(endpoint_caps)
    pool = draw(st.sampled_from(POOLS))
    if kind == "drop":
        return kind, pool, None
    name = draw(st.sampled_from(sorted(pool_fields)))
    return kind, pool, {name: draw(pool_fields[name])}


def changed(document: dict[str, Any], change: tuple[str, str, Any]) -> dict[str, Any]:
    """Return the document with a change of `changes` made. A pool that is not there comes back, as a plain one."""
    kind, name, value = change
    pools, endpoints = document["pools"], document["endpoints"]
    if kind == "group":
        return {**document, name: value}
    if kind == "endpoint":
        capped = [e | {"max_concurrent": value} if e["endpoint_id"] == name else e for e in endpoints]
        return {**document, "endpoints": capped}
    others = [pool for pool in pools if pool["pool_id"] != name]
    if kind == "drop":
        return {**document, "pools": others}
    pool = next((pool for pool in pools if pool["pool_id"] == name), plain_pool(name))
    return {**document, "pools": [*others, pool | value]}


def plain_pool(name: str) -> dict[str, Any]:
    return {
        "pool_id": name,
        "endpoint": "e",
        "default_timeout_ms": LONG_MS,
        "max_timeout_ms": 2 * LONG_MS,
        "priority_ageing_ms": LONG_MS,
    }


class HistoryMachine(RuleBasedStateMachine):
    """Drives one history, and counts in `met` what was met after how many steps."""

    def __init__(self, connection: BlockingConnection, port: int, met: Counter[str]) -> None:
        super().__init__()
        self.met = met
        self.history = History(connection, port)

    @initialize(
        policy=group_fields["policy"],
        total=group_fields["total_concurrent_dispatch"],
        caps=st.tuples(endpoint_caps, endpoint_caps),
        fields=st.tuples(*[st.fixed_dictionaries({}, optional=pool_fields)] * len(POOLS)),
        crowd=st.booleans(),
    )
    def configure_first(
        self,
        policy: str,
        total: int,
        caps: tuple[int | None, int | None],
        fields: tuple[dict[str, Any], ...],
        *,
        crowd: bool,
    ) -> None:
        document: dict[str, Any] = {
            "policy": policy,
            "total_concurrent_dispatch": total,
            "lease_ms": LONG_MS,
            "liveness_ms": LONG_MS,
            "retention_ms": LONG_MS,
            "pools": [plain_pool(name) for name in (POOLS + CROWD if crowd else POOLS)],
            "endpoints": [
                {"endpoint_id": name, "url": URL, "max_concurrent": cap} for name, cap in zip("ef", caps, strict=True)
            ],
        }
        self.history.configure(document)
        for name, drawn in zip(POOLS, fields, strict=True):  # one by one: what does not fit is refused alone
            self.history.configure(changed(self.history.document, ("pool", name, drawn)))

    @rule(pool=any_pool, producer=st.sampled_from(PRODUCERS), costs=st.lists(costs, min_size=1, max_size=6))
    def submit(self, pool: str, producer: str, costs: list[int]) -> None:
        self.history.submit(*[self.submission(pool, producer, cost) for cost in costs])

    @rule(producer=st.sampled_from(PRODUCERS), cost=costs)
    def submit_everywhere(self, producer: str, cost: int) -> None:
        self.history.submit(*[self.submission(pool, producer, cost) for pool in self.history.twin.group.pools])

    @rule(
        kind=st.sampled_from(
            ("content", "large", "large and stored", "same id", "same id and nonce", "unknown pool", "another session")
        ),
        pool=st.sampled_from(POOLS),
        images=st.integers(0, 3),
        pages=st.integers(0, 40),
        at=small,
    )
    def submit_otherwise(self, kind: str, pool: str, images: int, pages: int, at: int) -> None:
        submission = self.submission("nowhere" if kind == "unknown pool" else pool, "u", 2)
        earlier = [request.submission for request in self.requests() if request.submission.body]
        if kind == "content":
            timeout = 3 * LONG_MS if images else None
            submission = replace(
                submission,
                estimated_cost_units=None,
                images=images,
                pages=pages,
                timeout_ms=timeout,
                message_count=None,
            )
        elif kind == "another session":
            submission = replace(submission, session="another")
        elif kind.startswith("large"):
            submission = replace(submission, body=b"", body_bytes=LARGE_BYTES)
        elif kind.startswith("same") and earlier:
            first = self.pick(earlier, at)
            submission = first if kind == "same id and nonce" else replace(first, nonce="another")
        self.history.submit(submission, stored=kind == "large and stored")

    @rule(
        pool=any_pool,
        producer=st.sampled_from(PRODUCERS),
        each=st.lists(st.tuples(keys, levels, costs), min_size=1, max_size=6),
    )
    def submit_with_keys(self, pool: str, producer: str, each: list[tuple[str, int | None, int]]) -> None:
        self.history.submit(
            *[
                replace(self.submission(pool, producer, cost), fairness_key=key, priority=level)
                for key, level, cost in each
            ]
        )

    @rule(pool=any_pool, action=st.sampled_from(("pause", "resume", "resume", "drain")))
    def pause(self, pool: str, action: str) -> None:
        self.history.pause(pool, action)

    @rule(gateway=st.sampled_from(GATEWAYS), want=st.integers(1, 8), follow=st.booleans())
    def claim(self, gateway: str, want: int, *, follow: bool) -> None:
        """Claim; `follow`: and do so again as long as the answer asks for it."""
        self.history.claim(gateway, want)
        while follow and gateway in self.history.called_again:
            self.history.claim(gateway, want)

    @rule(gateways=st.permutations(GATEWAYS), want=st.integers(1, 3), rounds=st.integers(1, 3))
    def claim_in_turn(self, gateways: list[str], want: int, rounds: int) -> None:
        for gateway in gateways * rounds:
            self.history.claim(gateway, want)

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        picks=st.lists(st.tuples(small, outcomes), min_size=1, max_size=6),
        want=st.sampled_from((0, 1, 2, 5)),
        verdict=st.sampled_from(list(r.Verdict)),
        actual=st.one_of(st.none(), st.integers(0, 20)),
    )
    def settle(
        self, gateway: str, picks: list[tuple[int, r.Outcome]], want: int, verdict: r.Verdict, actual: int | None
    ) -> None:
        held = list(self.history.known[gateway].values())
        items = [self.item(self.pick(held, at), outcome, verdict) for at, outcome in picks if held]
        items = [replace(item, actual_cost_units=actual) for item in items]
        self.history.settle(gateway, items, want)

    @rule(
        outcome=st.sampled_from((r.Outcome.SUCCEEDED, r.Outcome.SUCCEEDED, r.Outcome.RELEASE)), want=st.integers(0, 6)
    )
    def settle_everything(self, outcome: r.Outcome, want: int) -> None:
        for gateway in GATEWAYS:
            held = list(self.history.known[gateway].values())
            self.history.settle(gateway, [self.item(lease, outcome) for lease in held], want)

    @precondition(lambda self: self.history.stale or any(self.history.known.values()))
    @rule(gateway=st.sampled_from(GATEWAYS), at=small, outcome=outcomes)
    def settle_what_is_not_its_own(self, gateway: str, at: int, outcome: r.Outcome) -> None:
        others = [lease for leases in self.history.known.values() for lease in leases.values()]
        self.history.settle(gateway, [self.item(self.pick([*self.history.stale, *others], at), outcome)], 0)

    @rule(gateway=st.sampled_from(GATEWAYS), forgotten=st.sampled_from((0, 0, 1, 2)), outstanding=st.booleans())
    def renew(self, gateway: str, forgotten: int, *, outstanding: bool) -> None:
        self.history.renew(gateway, forgotten=forgotten, outstanding=outstanding)

    @rule(leases=picks, deadlines=picks, long_ago=st.booleans(), limit=st.sampled_from((0, 1, 50)))
    def time_passes(self, leases: list[int], deadlines: list[int], *, long_ago: bool, limit: int) -> None:
        """Let leases run out and deadlines pass, and reap (limit 0: leave it to later calls)."""
        for at in leases if self.history.twin.group.leases else ():
            self.history.lease_runs_out(self.pick(list(self.history.twin.group.leases), at))
        for at in deadlines if self.requests("queued", "leased") else ():
            self.history.deadline_passes(self.pick(self.requests("queued", "leased"), at), long_ago=long_ago)
        if limit:
            self.history.reap(limit)

    @rule(
        kind=st.sampled_from(("dies", "lives", "lives", "outage", "outage over", "body", "envelope")),
        producer=st.sampled_from(PRODUCERS),
        at=small,
    )
    def accident(self, kind: str, producer: str, at: int) -> None:
        queued = [request for request in self.requests("queued") if request.submission.body]
        if kind == "dies":
            self.history.producer_dies(producer)
        elif kind == "lives":
            self.history.producer_lives(producer)
        elif kind.startswith("outage"):
            self.history.outage(begins=kind == "outage")
        elif queued and kind == "body":
            self.history.body_vanishes(self.pick(queued, at))
        elif queued:
            self.history.envelope_vanishes(self.pick(queued, at))

    @precondition(lambda self: self.requests())
    @rule(at=small, waiting=st.booleans())
    def cancel(self, at: int, *, waiting: bool) -> None:
        found = self.requests("queued") if waiting else self.requests()
        self.history.cancel(self.pick(found, at).id if found else "nobody")

    @rule(producer=st.sampled_from(PRODUCERS), owner=st.booleans(), back=st.integers(0, 2))
    def acknowledge(self, producer: str, *, owner: bool, back: int) -> None:
        self.history.acknowledge(producer, "session" if owner else "another", back)

    @rule(change=changes(), behind=st.sampled_from((0, 0, 0, 1)))
    def reconfigure(self, change: tuple[str, str, Any], behind: int) -> None:
        self.history.configure(changed(self.history.document, change), behind=behind)

    @precondition(lambda self: len(self.history.twin.group.requests) > 40)
    @rule()
    def wind_down(self) -> None:
        self.history.wind_down()

    @rule()
    def repeat_last_call(self) -> None:
        self.history.repeat_last()

    @invariant()
    def agree(self) -> None:
        if self.history.twin.group.generation:
            self.history.agree()
            self.note_what_was_met()

    def note_what_was_met(self) -> None:
        """Count the situations that histories met: agreement about what never happened shows nothing."""
        group = self.history.twin.group
        met = {
            "virtual rounds": group.round,
            "a pass over several calls": group.pass_limit is not None,
            "kept pools": group.kept,
            "a holder": any(endpoint.holder for endpoint in group.endpoints.values()),
            "several pools wait for an endpoint": sum(pool.on_endpoint for pool in group.pools.values()) > 1,
            "a capped pool": any(pool.parked == "lane_capacity" for pool in group.pools.values()),
            "debt": any(pool.deficit < 0 for pool in group.pools.values()),
            "keys": any(len(pool.tags) > 1 for pool in group.pools.values()),
            "tags of idle keys": any(pool.idle_tags for pool in group.pools.values()),
            "a paused pool": any(pool.parked == "paused" for pool in group.pools.values()),
            "tombstones": any(pool.tombstones for pool in group.pools.values()),
            "grace": group.grace_until_ms > self.history.now,
            "a second attempt": any(request.attempt > 1 for request in group.requests.values()),
            **{f"ending {ended.ending}": True for ended in group.ended},
        }
        self.met.update(name for name, seen in met.items() if seen)

    def teardown(self) -> None:
        self.history.close()

    def requests(self, *states: str) -> list[Any]:
        found = self.history.twin.group.requests.values()
        return [request for request in found if not states or request.state in states]

    @staticmethod
    def pick(found: list[Any], at: int) -> Any:
        return found[at % len(found)]

    @staticmethod
    def item(lease: r.Lease, outcome: r.Outcome, verdict: r.Verdict = r.Verdict.GOOD) -> r.Settlement:
        return r.Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=outcome, verdict=verdict, error_type="test"
        )

    def submission(self, pool: str, producer: str, cost: int) -> r.Submission:
        return submission(self.history.new_id(), pool, cost, producer)


def run(valkey: ValkeyProcess, *, examples: int, steps: int) -> Counter[str]:
    """Run random histories. A failing one is shrunk, and printed as a program of rule calls and a blob to replay it."""
    met: Counter[str] = Counter()
    with BlockingConnection(valkey.url) as connection:
        run_state_machine_as_test(
            lambda: HistoryMachine(connection, valkey.port, met),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                print_blob=True,
                phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    return met


ALWAYS = {"ending succeeded", "ending cancelled", "ending expired", "keys", "tombstones"}
"""Met by any two hundred histories. Which of the others a short run meets is chance; a long one meets all."""

COMMON = {
    "a capped pool", "a holder", "a paused pool", "a second attempt", "debt", "grace", "kept pools", "keys",
    "several pools wait for an endpoint", "tags of idle keys", "tombstones", "virtual rounds", "ending succeeded",
    "ending cancelled", "ending expired", "ending failed", "ending lost", "ending malformed", "ending producer_gone",
}  # fmt: skip
RARE = {"a pass over several calls", "ending dead", "ending reply_dropped"}


@pytest.mark.timeout(300)
def test_server_and_twin_agree_on_short_histories(valkey: ValkeyProcess) -> None:
    met = run(valkey, examples=250, steps=50)
    assert set(met) >= ALWAYS


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_server_and_twin_agree_on_long_histories(valkey: ValkeyProcess) -> None:
    met = run(valkey, examples=400, steps=250)
    assert set(met) >= COMMON | RARE

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
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from dispatch.fabric import records as r
from dispatch.fabric.sync import BlockingConnection
from tests.model.bench import submission
from tests.property.draws import (
    CROWD,
    POOLS,
    any_pool,
    changed,
    changes,
    costs,
    endpoint_fields,
    failures,
    group_fields,
    keys,
    levels,
    other_submits,
    outcomes,
    pick,
    picks,
    plain_endpoint,
    plain_pool,
    pool_fields,
    report_of,
    samples,
    settlement,
    small,
)
from tests.property.history import GATEWAYS, LARGE_BYTES, LONG_MS, PRODUCERS, History
from tests.property.met import ALWAYS, COMMON, RARE, situations
from tests.support.valkey import ValkeyProcess


class HistoryMachine(RuleBasedStateMachine):
    """Drives one history, and counts in `met` what was met after how many steps.

    No rule has a precondition: some times pass really, so what is there may differ when a history is run again.
    """

    def __init__(self, connection: BlockingConnection, port: int, met: Counter[str]) -> None:
        super().__init__()
        self.met = met
        self.history = History(connection, port)

    @initialize(
        policy=group_fields["policy"],
        total=group_fields["total_concurrent_dispatch"],
        endpoints=st.tuples(*[st.fixed_dictionaries({}, optional=endpoint_fields)] * 2),
        fields=st.tuples(*[st.fixed_dictionaries({}, optional=pool_fields)] * len(POOLS)),
        crowd=st.booleans(),
    )
    def configure_first(
        self,
        policy: str,
        total: int,
        endpoints: tuple[dict[str, Any], ...],
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
            "hold_max_ms": LONG_MS,
            "endpoints": [plain_endpoint(name, drawn) for name, drawn in zip("ef", endpoints, strict=True)],
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
        kind=other_submits,
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
        elif kind.startswith("key"):
            idempotency = f"h{at % 3}"
            submission = replace(
                submission, idempotency=idempotency, fingerprint=f"f{images % 2}", detached=kind == "key, detached"
            )
        elif kind == "short wait":
            submission = replace(submission, max_wait_ms=LONG_MS // 2)
        elif kind == "detached":
            submission = replace(submission, detached=True)
        elif kind == "another session":
            submission = replace(submission, session="another")
        elif kind.startswith("large"):
            submission = replace(submission, body=b"", body_bytes=LARGE_BYTES)
        elif kind.startswith("same") and earlier:
            first = pick(earlier, at)
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
        went=failures,
        actual=st.one_of(st.none(), st.integers(0, 20)),
    )
    def settle(
        self, gateway: str, picks: list[tuple[int, r.Outcome]], want: int, went: dict[str, Any], actual: int | None
    ) -> None:
        held = list(self.history.known[gateway].values())
        items = [settlement(pick(held, at), outcome, **went) for at, outcome in picks if held]
        items = [replace(item, actual_cost_units=actual) for item in items]
        self.history.settle(gateway, items, want)

    @rule(at=small, own=st.sampled_from((True, True, True, False)), ahead=st.sampled_from((0, 0, 0, 1, -1)))
    def stream(self, at: int, ahead: int, *, own: bool) -> None:
        """Send chunks of a stream: the next ones, some that were sent, some too early; or those of another's."""
        held = [(gateway, lease) for gateway in GATEWAYS for lease in self.history.known[gateway].values()]
        if held:
            gateway, lease = pick(held, at)
            request = self.history.twin.group.requests.get(lease.request_id)
            sent = request.chunks if request else 0
            self.history.append(gateway if own else "another", lease, max(0, sent + ahead), 1 + at % 3)

    @rule(want=st.sampled_from((0, 2)), each=st.lists(failures, min_size=1, max_size=4))
    def fail(self, want: int, each: list[dict[str, Any]]) -> None:
        """Let the leases that began first fail, each in its way."""
        for gateway in GATEWAYS:
            held = list(self.history.known[gateway].values())
            items = [settlement(lease, r.Outcome.FAILED, **went) for lease, went in zip(held, each, strict=False)]
            self.history.settle(gateway, items, want)

    @rule(
        outcome=st.sampled_from((r.Outcome.SUCCEEDED, r.Outcome.SUCCEEDED, r.Outcome.RELEASE)), want=st.integers(0, 6)
    )
    def settle_everything(self, outcome: r.Outcome, want: int) -> None:
        for gateway in GATEWAYS:
            held = list(self.history.known[gateway].values())
            self.history.settle(gateway, [settlement(lease, outcome) for lease in held], want)

    @rule(gateway=st.sampled_from(GATEWAYS), at=small, outcome=outcomes)
    def settle_what_is_not_its_own(self, gateway: str, at: int, outcome: r.Outcome) -> None:
        others = [lease for leases in self.history.known.values() for lease in leases.values()]
        if found := [*self.history.stale, *others]:
            self.history.settle(gateway, [settlement(pick(found, at), outcome)], 0)

    @rule(gateway=st.sampled_from(GATEWAYS), forgotten=st.sampled_from((0, 0, 1, 2)), outstanding=st.booleans())
    def renew(self, gateway: str, forgotten: int, *, outstanding: bool) -> None:
        self.history.renew(gateway, forgotten=forgotten, outstanding=outstanding)

    @rule(leases=picks, deadlines=picks, long_ago=st.booleans(), limit=st.sampled_from((0, 1, 50)))
    def time_passes(self, leases: list[int], deadlines: list[int], *, long_ago: bool, limit: int) -> None:
        """Let leases run out and deadlines pass, and reap (limit 0: leave it to later calls)."""
        for at in leases if self.history.twin.group.leases else ():
            self.history.lease_runs_out(pick(list(self.history.twin.group.leases), at))
        for at in deadlines if self.requests("queued", "leased") else ():
            self.history.deadline_passes(pick(self.requests("queued", "leased"), at), long_ago=long_ago)
        if limit:
            self.history.reap(limit)

    @rule(
        retries=picks,
        endpoint=st.sampled_from("ef"),
        passed=st.lists(st.sampled_from(("open", "hold", "probe", "sample")), max_size=2),
        windows=st.sampled_from((0, 0, 1, 3)),
    )
    def more_time_passes(self, retries: list[int], endpoint: str, passed: list[str], windows: int) -> None:
        """Let retries come due, what blocks an endpoint be over, windows of the retry budget go by."""
        for at in retries if self.requests("delayed") else ():
            self.history.retry_comes_due(pick(self.requests("delayed"), at))
        for what in passed:
            self.history.endpoint_time_passes(self.history.twin.group.endpoint(endpoint), what)
        if windows:
            self.history.budget_window_passes(windows)

    @rule(endpoint=st.sampled_from("ef"), retryable=st.booleans())
    def endpoint_falls_ill(self, endpoint: str, *, retryable: bool) -> None:
        """Let everything that runs on an endpoint fail there."""
        self.history.claim(GATEWAYS[0], 3)
        went = {"verdict": r.Verdict.FAILURE, "error_type": "endpoint_unreachable", "retryable": retryable}
        for gateway in GATEWAYS:
            held = [lease for lease in self.history.known[gateway].values() if lease.endpoint_id == endpoint]
            self.history.settle(gateway, [settlement(lease, r.Outcome.FAILED, **went) for lease in held], 0)

    @rule(endpoint=st.sampled_from("ef"), probes=st.lists(st.booleans(), min_size=1, max_size=3))
    def endpoint_recovers(self, endpoint: str, probes: list[bool]) -> None:
        """Let an open breaker's time be over; what is launched then goes well, or (False) has never an end."""
        for what in ("hold", "open"):
            self.history.endpoint_time_passes(self.history.twin.group.endpoint(endpoint), what)
        for well in probes:
            self.history.claim(GATEWAYS[0], 1)
            if well:
                self.settle_everything(r.Outcome.SUCCEEDED, 0)
            else:
                self.history.endpoint_time_passes(self.history.twin.group.endpoint(endpoint), "probe")

    @rule(endpoint=st.sampled_from("ef"), said=failures)
    def endpoint_is_asked(self, endpoint: str, said: dict[str, Any]) -> None:
        """Let a watcher do what there is to do, with an endpoint that may be asked: it says this."""
        for what in ("open", "hold"):
            self.history.endpoint_time_passes(self.history.twin.group.endpoint(endpoint), what)
        self.history.chores_come_due()
        for _ in range(3):
            chore = self.history.report(GATEWAYS[0])
            if chore.kind == "PROBE":
                self.history.report(GATEWAYS[0], report_of(chore, said, {}))

    @rule(
        gateway=st.sampled_from(GATEWAYS),
        due=st.booleans(),
        which=st.sampled_from((0, 0, 1, 3)),
        said=failures,
        sample=samples,
    )
    def report(self, gateway: str, which: int, said: dict[str, Any], sample: dict[str, Any], *, due: bool) -> None:
        """Tell what a chore came to (an old one, too), and take the next."""
        if due:
            self.history.chores_come_due()
        given = self.history.chores[which : which + 1]
        self.history.report(gateway, report_of(given[0], said, sample) if given else None)

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
            self.history.body_vanishes(pick(queued, at))
        elif queued:
            self.history.envelope_vanishes(pick(queued, at))

    @rule(at=small, waiting=st.booleans(), only_waiting=st.booleans())
    def cancel(self, at: int, *, waiting: bool, only_waiting: bool) -> None:
        found = self.requests("queued", "delayed") if waiting else self.requests()
        self.history.cancel(pick(found, at).id if found else "nobody", only_waiting=only_waiting)

    @rule(at=small, action=st.sampled_from(("retry", "retry", "drop")), used_id=st.booleans())
    def change_dead(self, at: int, action: str, *, used_id: bool) -> None:
        request_id = pick(sorted(self.history.twin.group.dead) or ["nobody"], at)
        self.history.change_dead(action, request_id, request_id if used_id and at % 2 else self.history.new_id())

    @rule(leases=picks)
    def gateways_die_again_and_again(self, leases: list[int]) -> None:
        """Let the same requests lose their gateways until none of their attempts is left."""
        for at in [*leases, *leases]:
            self.history.claim(GATEWAYS[1], 3)
            if self.history.twin.group.leases:
                self.history.lease_runs_out(pick(sorted(self.history.twin.group.leases), at))
                self.history.reap(50)

    @rule(producer=st.sampled_from(PRODUCERS), owner=st.booleans(), back=st.integers(0, 2))
    def acknowledge(self, producer: str, *, owner: bool, back: int) -> None:
        self.history.acknowledge(producer, "session" if owner else "another", back)

    @rule(change=changes(), behind=st.sampled_from((0, 0, 0, 1)))
    def reconfigure(self, change: tuple[str, str, Any], behind: int) -> None:
        self.history.configure(changed(self.history.document, change), behind=behind)

    @rule()
    def wind_down(self) -> None:
        if len(self.requests()) > 40:
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
        met = situations(self.history.twin.group, self.history.now)
        self.met.update(name for name, seen in met.items() if seen)

    def teardown(self) -> None:
        self.history.close()

    def requests(self, *states: str) -> list[Any]:
        found = self.history.twin.group.requests.values()
        return [request for request in found if not states or request.state in states]

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


@pytest.mark.timeout(900)
def test_server_and_twin_agree_on_short_histories(valkey: ValkeyProcess) -> None:
    met = run(valkey, examples=250, steps=50)
    assert set(met) >= ALWAYS


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_server_and_twin_agree_on_long_histories(valkey: ValkeyProcess) -> None:
    met = run(valkey, examples=400, steps=250)
    assert set(met) >= COMMON | RARE

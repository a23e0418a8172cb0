"""The audit of what waits for a time: retries, endpoints that are held or open, chores, probes, the dead list."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from dispatch.fabric import audit
from dispatch.fabric import functions as f
from dispatch.fabric.records import ChoreReport, Lease, Outcome, Settlement, Verdict
from dispatch.fabric.schema import key
from tests.support.broken_library import load_broken
from tests.support.by_hand import ByHand
from tests.support.commands import Commands
from tests.support.dying import dies
from tests.support.groups import configure, default_document, unique_group
from tests.support.leftovers import counters_above_zero
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess
from tests.support.weather import Weather

WELL, ILL = 0, 1
HOUR_MS = 3_600_000
POOLS = [
    {"pool_id": "default", "max_attempts": 3, "retry_base_ms": HOUR_MS, "retry_cap_ms": HOUR_MS,
     "max_timeout_ms": 24 * HOUR_MS, "default_timeout_ms": 24 * HOUR_MS},
    {"pool_id": "ill", "endpoint": "ill", "max_timeout_ms": 24 * HOUR_MS},
    {"pool_id": "again", "delivery": "at_least_once", "max_attempts": 1, "endpoint": "default"},
]  # fmt: skip
ENDPOINTS = [
    {"endpoint_id": "default", "url": "http://h/v1"},
    {"endpoint_id": "ill", "url": "http://i/v1", "breaker_failures": 1, "open_ms": HOUR_MS, "gate": "vllm",
     "gate_poll_ms": HOUR_MS, "probe_timeout_ms": HOUR_MS},
]  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    return default_document() | {"pools": POOLS, "endpoints": ENDPOINTS, "hold_max_ms": HOUR_MS} | changes


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    group = unique_group()
    configure(valkey.url, group, document())
    hand = ByHand(valkey.url, group)
    yield hand
    hand.close()


@pytest.fixture
def dispatch(hand: ByHand) -> Commands:
    return Commands(hand.url, hand.group)


@pytest.fixture
def keys(hand: ByHand) -> Iterator[redis.Redis]:
    with eye(hand.url) as client:
        yield client


def settle(hand: ByHand, lease: Lease, verdict: Verdict = Verdict.NEUTRAL, hold_ms: int = 0) -> None:
    """Settle a failed run that may be repeated."""
    item = Settlement(
        request_id=lease.request_id, fence=lease.fence, outcome=Outcome.FAILED, error_type="endpoint_unreachable",
        retryable=True, verdict=verdict, hold_ms=hold_ms,
    )  # fmt: skip
    hand.run(f.lease_settle("g", "g/1", nonce=uuid.uuid4().hex, want=0, items=[item]))


def delayed_somehow(hand: ByHand, count: int = 2) -> list[str]:
    """Submit requests and have their first attempt fail; returns their ids. They wait for about an hour."""
    ids = hand.submit("default", count)
    for lease in hand.claim(count):
        settle(hand, lease)
    return ids


def delayed(hand: ByHand, count: int = 1) -> list[str]:
    """Do the same, and see that they are counted."""
    ids = delayed_somehow(hand, count)
    assert hand.section("group")["delayed"] == count
    return ids


def opened(hand: ByHand) -> None:
    """Have the breaker of endpoint `ill` open, and a pool wait for it."""
    hand.submit("ill", 3)
    [lease] = hand.claim(1)
    settle(hand, lease, Verdict.FAILURE)
    assert hand.claim(2) == []
    assert row(hand)["breaker"] == "open"
    assert hand.pool("ill")["pending"] == 2


def row(hand: ByHand) -> dict[str, Any]:
    """Return the snapshot of endpoint `ill`."""
    [found] = [each for each in hand.section("endpoints")["rows"] if each["endpoint_id"] == "ill"]
    return dict(found)


def time_passes(hand: ByHand) -> None:
    """Let the breaker's time be over."""
    hand.change_record("endpoint", {"open_until": 1}, endpoint="ill")


def found(hand: ByHand) -> list[str]:
    return sorted(str(each) for each in audit.differences(hand.connection, hand.group))


def repaired(hand: ByHand, dispatch: Commands, *said: str) -> None:
    """Check that the doctor finds what it should and nothing else, and puts it right."""
    assert found(hand) == sorted(said)
    assert dispatch("doctor").code == ILL
    done = dispatch("doctor", "--repair")
    assert done.code == WELL, done
    assert {f"repaired: {each}" for each in said} <= set(done.out.splitlines())
    assert found(hand) == []


# ---- clean


def test_a_group_full_of_what_waits_is_clean(hand: ByHand, dispatch: Commands) -> None:
    delayed(hand, 3)
    opened(hand)
    dies(hand)
    hand.run(f.endpoint_report("g"))
    assert found(hand) == []
    assert dispatch("doctor").code == WELL
    configure(hand.url, hand.group, document(endpoints=ENDPOINTS[:1], pools=[POOLS[0], POOLS[2], {"pool_id": "ill"}]),
              expected=1)  # fmt: skip
    assert found(hand) == []  # an endpoint that is left out leaves nothing to do behind
    configure(hand.url, hand.group, document(), expected=2)
    assert found(hand) == []


def test_more_than_a_page_of_what_waits_is_counted(hand: ByHand) -> None:
    configure(hand.url, hand.group, document(total_concurrent_dispatch=300, retry_budget_min_per_s=1000), expected=1)
    delayed(hand, 240)
    hand.submit("again", 120)
    while leases := hand.claim(60):
        hand.settle(leases, outcome=Outcome.LOST)
    assert found(hand) == []
    hand.change_record("pool", {"delayed": 239}, pool="default")
    assert found(hand) == ["pool default: delayed is stored as 239, counted 240"]


@pytest.mark.parametrize("policy", ["drr", "fifo"])
@pytest.mark.parametrize("seed", range(4))
def test_flaky_endpoints_leave_everything_true(valkey: ValkeyProcess, seed: int, policy: str) -> None:
    hand = ByHand(valkey.url, unique_group())
    weather = Weather(hand, seed, policy)
    for step in range(400):
        weather.step()
        if step % 20 == 0:
            assert found(hand) == [], step
    weather.clears()
    assert found(hand) == []
    moves = {(event["from"], event["to"]) for event in hand.section("events")["rows"] if event["kind"] == "breaker"}
    assert {("closed", "open"), ("free", "held")} <= moves
    hand.close()


# ---- retries


def test_wrong_counts_of_delayed_requests_are_repaired(hand: ByHand, dispatch: Commands) -> None:
    delayed(hand, 2)
    hand.change_record("pool", {"delayed": 0}, pool="default")
    hand.change_record("group", {"delayed": 7})
    repaired(
        hand, dispatch, "pool default: delayed is stored as 0, counted 2", "group: delayed is stored as 7, counted 2"
    )


def test_a_timer_of_a_request_that_is_not_there_is_removed(hand: ByHand, dispatch: Commands, keys: redis.Redis) -> None:
    keys.zadd(key(hand.group, "timers"), {"retry:ghost": 4e12, "endpoint:ghost": 4e12, "nonsense": 4e12})
    repaired(
        hand, dispatch, "group: next_timer is stored as none, counted 4000000000000",
        *(f"timer {name}: subject is stored as due, counted not there"
          for name in ("retry:ghost", "endpoint:ghost", "nonsense")),
    )  # fmt: skip
    assert keys.exists(key(hand.group, "timers")) == 0


def test_a_delayed_request_whose_hash_is_gone_is_counted_out(
    hand: ByHand, dispatch: Commands, keys: redis.Redis
) -> None:
    [request_id] = delayed(hand)
    keys.delete(key(hand.group, "request", id=request_id))
    repaired(
        hand, dispatch, "pool default: delayed is stored as 1, counted 0", "group: delayed is stored as 1, counted 0",
        f"timer retry:{request_id}: subject is stored as due, counted not there",
    )  # fmt: skip


def test_a_delayed_request_that_lost_its_timer_gets_it_again(
    hand: ByHand, dispatch: Commands, keys: redis.Redis
) -> None:
    [request_id] = delayed(hand)
    keys.zrem(key(hand.group, "timers"), f"retry:{request_id}")
    repaired(hand, dispatch, f"request {request_id}: timer is stored as set, counted not there")
    [request] = hand.section("request", subject=request_id)["rows"]
    assert keys.zscore(key(hand.group, "timers"), f"retry:{request_id}") == request["due_ms"]


def test_when_time_has_something_to_do_is_read_anew(hand: ByHand, dispatch: Commands, keys: redis.Redis) -> None:
    [request_id] = delayed(hand)
    keys.zadd(key(hand.group, "timers"), {f"retry:{request_id}": 1})  # due, if only somebody looked
    hand.change_record("group", {"next_timer": 4_000_000_000_000})
    assert hand.claim(1) == []
    repaired(hand, dispatch, "group: next_timer is stored as 4000000000000, counted 1")
    assert [lease.request_id for lease in hand.claim(1)] == [request_id]


def test_all_timers_gone_are_made_again(hand: ByHand, dispatch: Commands, keys: redis.Redis) -> None:
    ids = delayed(hand, 2)
    opened(hand)
    look = int(keys.zscore(key(hand.group, "timers"), "endpoint:ill"))
    keys.delete(key(hand.group, "timers"))
    repaired(
        hand, dispatch, f"endpoint ill: look is stored as {look}, counted none",
        *(f"request {name}: timer is stored as set, counted not there" for name in ids),
    )  # fmt: skip
    assert keys.zscore(key(hand.group, "timers"), "endpoint:ill") == look


# ---- endpoints


def test_an_endpoint_that_is_free_again_and_lost_its_timer_is_used(
    hand: ByHand, dispatch: Commands, keys: redis.Redis
) -> None:
    opened(hand)
    keys.delete(key(hand.group, "timers"))
    time_passes(hand)
    assert hand.claim(2) == []
    assert dispatch("doctor", "--repair").code == WELL
    [probe] = hand.claim(2)
    assert probe.probe_until_ms > 0


def test_a_probe_that_is_no_lease_is_freed(hand: ByHand, dispatch: Commands, keys: redis.Redis) -> None:
    opened(hand)
    time_passes(hand)
    hand.run(f.endpoint_report("g", ChoreReport(kind="sample", endpoint_id="ill", token=0)))  # looks at it
    [probe] = hand.claim(1)
    assert row(hand)["probe"]["request_id"] == probe.request_id
    assert found(hand) == []
    keys.delete(key(hand.group, "request", id=probe.request_id))
    keys.zrem(key(hand.group, "leases"), probe.request_id)
    told = found(hand)
    assert f"endpoint ill: probe is stored as {probe.request_id}, counted none" in told
    assert dispatch("doctor", "--repair").code == WELL
    assert "probe" not in row(hand)
    assert [lease.probe_until_ms > 0 for lease in hand.claim(1)] == [True]


def test_chores_of_endpoints_that_are_not_there_are_removed(
    hand: ByHand, dispatch: Commands, keys: redis.Redis
) -> None:
    keys.zadd(key(hand.group, "chores"), {"probe:ghost": 4e12, "sample:ghost": 4e12, "tea:ill": 4e12})
    repaired(
        hand, dispatch,
        *(f"chore {name}: subject is stored as due, counted not there"
          for name in ("probe:ghost", "sample:ghost", "tea:ill")),
    )  # fmt: skip


def test_a_chore_that_is_none_holds_up_no_other(hand: ByHand, keys: redis.Redis) -> None:
    keys.zadd(key(hand.group, "chores"), {"tea:ill": 1, "nonsense": 1, "": 1})
    assert hand.run(f.endpoint_report("g")).kind == "SAMPLE"
    assert found(hand) == []


def test_all_chores_gone_are_made_again(hand: ByHand, dispatch: Commands, keys: redis.Redis) -> None:
    opened(hand)
    due = int(keys.zrange(key(hand.group, "chores"), 0, 0, withscores=True)[0][1])
    keys.delete(key(hand.group, "chores"))
    repaired(
        hand, dispatch, "endpoint ill: asked is stored as yes, counted no",
        "endpoint ill: sampled is stored as yes, counted no", f"group: next_chore is stored as {due}, counted none",
    )  # fmt: skip
    assert hand.run(f.endpoint_report("g")).kind == "SAMPLE"


def test_a_chore_that_nobody_needs_is_removed(hand: ByHand, dispatch: Commands, keys: redis.Redis) -> None:
    keys.zadd(key(hand.group, "chores"), {"probe:default": 4e12})
    repaired(hand, dispatch, "endpoint default: asked is stored as no, counted yes")


def test_when_the_next_chore_is_due_is_read_anew(hand: ByHand, dispatch: Commands) -> None:
    hand.change_record("group", {"next_chore": 4_000_000_000_000})
    [said] = found(hand)
    assert said.startswith("group: next_chore is stored as 4000000000000, counted 1")
    repaired(hand, dispatch, said)


# ---- the dead


def test_a_dead_request_of_which_nothing_is_left_is_struck_off(
    hand: ByHand, dispatch: Commands, keys: redis.Redis
) -> None:
    gone, kept = dies(hand), dies(hand)
    keys.delete(key(hand.group, "request", id=gone))
    repaired(hand, dispatch, f"dead {gone}: request is stored as kept, counted not there")
    assert [each["request_id"] for each in hand.section("dead")["rows"]] == [kept]


# ---- the library itself

BROKEN_RULES = {
    "pool: delayed": ("state/slots.lua", "pool.record.delayed = (pool.record.delayed or 0) + 1", ""),
    "group: delayed": ("state/slots.lua", "step.group.delayed = (step.group.delayed or 0) + 1", ""),
    "request: timer": ("state/slots.lua", 'timers.set(step, "retry:" .. request.id, due)', ""),
    "group: next_timer": ("state/timers.lua", "group.next_timer, step.timer_moved = due, true", ""),
    "endpoint: asked": (
        "state/endpoints.lua", 'chores.set(step, "probe", endpoint.name, record.open_until)', "",
    ),
    "endpoint: sampled": ("state/endpoints.lua", 'chores.set(step, "sample", endpoint.name, step.now)', ""),
    "group: next_chore": (
        "state/chores.lua", "step.group.next_chore = first[2] and tonumber(first[2]) or nil",
        "step.group.next_chore = first[2] and 1",
    ),
    "endpoint: look": ("state/endpoints.lua", 'timers.set(step, "endpoint:" .. endpoint.name, at)', ""),
    "timer: subject": ("state/slots.lua", 'if not due then timers.clear(step, "retry:" .. request.id) end', ""),
    "dead: request": (
        "state/dead.lua", 'server.call("ZADD", key, step.now, request.id)',
        'server.call("ZADD", key, step.now, request.id, step.now, "ghost")',
    ),
}  # fmt: skip
"""Kind and field of what the audit must notice, and the rule that is broken: file, what stands there, what instead."""


@pytest.mark.parametrize("field", BROKEN_RULES)
def test_a_broken_rule_is_noticed(start_valkey, tmp_path: Path, field: str) -> None:
    file, right, wrong = BROKEN_RULES[field]
    server = start_valkey(library=False)
    load_broken(server, tmp_path, {file: [(right, wrong)]})
    group = unique_group()
    configure(server.url, group, document())
    hand = ByHand(server.url, group)
    first, *_ = delayed_somehow(hand)
    opened(hand)
    dies(hand)
    hand.run(f.request_cancel(first, actor="t"))
    kinds = {f"{each.kind}: {each.field}" for each in audit.differences(hand.connection, group)}
    hand.close()
    assert field in kinds


# ---- everything gone


@pytest.mark.parametrize("policy", ["drr", "fifo"])
def test_a_deleted_line_is_made_again(hand: ByHand, dispatch: Commands, keys: redis.Redis, policy: str) -> None:
    pools = [{"pool_id": f"p{number}"} for number in range(5)]
    pools[0]["min_concurrent"] = 1
    configure(hand.url, hand.group, default_document() | {"pools": pools, "policy": policy}, expected=1)
    ids = [*hand.submit("p1", 3), *hand.submit("p4", 2), *hand.submit("p0", 2), *hand.submit("p3", 1)]
    keys.delete(key(hand.group, "rotation"), key(hand.group, "heads"), key(hand.group, "kept"))
    assert hand.claim(8) == []
    stuck = dispatch("doctor")
    assert stuck.code == ILL
    assert "pool p4: standing is stored as line, counted none" in stuck.out.splitlines()
    done = dispatch("doctor", "--repair")
    assert done.code == WELL, done
    leases = hand.claim(8)
    assert sorted(lease.request_id for lease in leases) == sorted(ids)
    if policy == "fifo":
        assert [lease.request_id for lease in leases] == ids
    hand.settle(leases)
    assert found(hand) == []
    left = counters_above_zero(hand.url, hand.group)
    assert left == {}

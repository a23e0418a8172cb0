"""The audit and `dispatch doctor`: what is planted is found and repaired, and what is well is left alone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dispatch.fabric import audit
from dispatch.fabric import functions as f
from dispatch.fabric.audit import Difference
from dispatch.fabric.deploy import Installed
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.commands import Commands
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess, free_port

WELL, ILL, TROUBLE = 0, 1, 2


@pytest.fixture
def hand(valkey: ValkeyProcess, group: str) -> Iterator[ByHand]:
    made = ByHand(valkey.url, group)
    yield made
    made.close()


@pytest.fixture
def dispatch(valkey: ValkeyProcess, group: str) -> Commands:
    return Commands(valkey.url, group)


def found(hand: ByHand) -> list[str]:
    return sorted(str(each) for each in audit.differences(hand.connection, hand.group))


def busy(hand: ByHand) -> None:
    """Waiting, running, given back, cancelled, keyed: a bit of everything."""
    hand.submit("interactive", 6)
    hand.submit("backfill", 4, size=50)
    for name in "abc":
        hand.submit("document-extract", 2, fairness_key=name, priority=2)
    leases = hand.claim(5)
    hand.settle(leases[:2])
    hand.settle(leases[2:3], outcome=Outcome.RELEASE)
    hand.run(f.request_cancel(hand.submit("backfill")[0], actor="t"))


# ---- clean


def test_a_group_in_use_is_clean(hand: ByHand, dispatch: Commands) -> None:
    busy(hand)
    assert found(hand) == []
    done = dispatch("doctor")
    assert done.code == WELL
    assert done.out.splitlines()[-1] == f"group {hand.group}: every counter is true"


def test_more_than_a_page_of_everything_is_counted(valkey: ValkeyProcess) -> None:
    group = unique_group()
    pools = [{"pool_id": f"p{number}"} for number in range(230)]
    configure(valkey.url, group, default_document() | {"pools": pools, "total_concurrent_dispatch": 300})
    hand = ByHand(valkey.url, group)
    hand.submit("p0", 350)
    for number in range(300):
        hand.submit("p1", fairness_key=f"user-{number}", priority=number % 4)
    hand.submit("p2", 240)
    leases = hand.claim(240)
    hand.settle(leases[:60], outcome=Outcome.RELEASE)
    hand.settle(leases[60:120], outcome=Outcome.RELEASE)
    assert found(hand) == []
    hand.change_record("pool", {"depth": 1}, pool="p1")
    assert [line.split(" is ")[0] for line in found(hand)] == ["pool p1: depth"]
    hand.close()


@pytest.mark.parametrize("policy", ["drr", "fifo"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_leaves_every_counter_true(valkey: ValkeyProcess, seed: int, policy: str) -> None:
    group = unique_group()
    document = default_document() | {"policy": policy, "total_concurrent_dispatch": 6}
    document["pools"][0] |= {"min_concurrent": 2, "max_concurrent": 3}
    document["endpoints"].append({"endpoint_id": "e", "url": "http://h/v1", "max_concurrent": 2})
    document["pools"][1] |= {"endpoint": "e"}
    document["pools"][2] |= {"endpoint": "e"}
    configure(valkey.url, group, document)
    hand, chance = ByHand(valkey.url, group), random.Random(seed)
    names = [pool["pool_id"] for pool in document["pools"]]
    waiting: list[str] = []
    running: list[Any] = []
    for step in range(300):
        match chance.randrange(8):
            case 0 | 1 | 2:
                options = {"fairness_key": chance.choice("abc")} if chance.random() < 0.5 else {}
                level = chance.choice([None, 0, 3])
                waiting += hand.submit(chance.choice(names), size=chance.randint(2, 99), priority=level, **options)
            case 3 | 4:
                running += hand.claim(chance.randint(1, 4))
            case 5 if running:
                outcome = chance.choice([Outcome.SUCCEEDED, Outcome.FAILED, Outcome.RELEASE])
                hand.settle([running.pop(chance.randrange(len(running)))], outcome=outcome)
            case 6 if waiting:
                hand.run(f.request_cancel(waiting.pop(chance.randrange(len(waiting))), actor="t", only_waiting=True))
            case 7:
                hand.run(f.pool_pause(chance.choice(names), chance.choice(["pause", "resume"]), actor="t"))
        if step % 20 == 0:
            assert found(hand) == []
    assert found(hand) == []
    hand.close()


# ---- planted


PLANTED = {
    "group in_flight": ("group", {}, {"in_flight": 7}, "group: in_flight is stored as 7, counted 2"),
    "group queued": ("group", {}, {"queued": 1}, "group: queued is stored as 1, counted 12"),
    "group kept": ("group", {}, {"kept": 3}, "group: kept is stored as 3, counted 0"),
    "pool depth": ("pool", {"pool": "backfill"}, {"depth": 9}, "pool backfill: depth is stored as 9, counted 3"),
    "pool bytes": ("pool", {"pool": "backfill"}, {"bytes": 1}, "pool backfill: bytes is stored as 1, counted 150"),
    "tombstones": (
        "pool", {"pool": "backfill"}, {"tombstones": 0}, "pool backfill: tombstones is stored as 0, counted 1"
    ),
    "returned": ("pool", {"pool": "backfill"}, {"returned": 2}, "pool backfill: returned is stored as 2, counted 0"),
    "pool in_flight": (
        "pool", {"pool": "interactive"}, {"in_flight": 5}, "pool interactive: in_flight is stored as 5, counted 1"
    ),
    "levels": (
        "pool", {"pool": "backfill"}, {"levels": [0, 0, 0, 2]}, "pool backfill: level_1 is stored as 0, counted 4"
    ),
    "idle keys": (
        "pool", {"pool": "document-extract"}, {"idle_keys": 4},
        "pool document-extract: idle_keys is stored as 4, counted 0",
    ),
    "endpoint in_flight": (
        "endpoint", {"endpoint": "default"}, {"in_flight": 0}, "endpoint default: in_flight is stored as 0, counted 2"
    ),
    "endpoint waiting": (
        "endpoint", {"endpoint": "default"}, {"waiting": 1}, "endpoint default: waiting is stored as 1, counted 0"
    ),
    "holder": (
        "endpoint", {"endpoint": "default"}, {"holder": "default"},
        "endpoint default: holder is stored as default, counted none",
    ),
    "place": (
        "pool", {"pool": "backfill"}, {"place": "idle"}, "pool backfill: standing is stored as none, counted line"
    ),
}  # fmt: skip
"""What is written past the library: key, its parts, changes; and what the audit has to say of it."""


@pytest.mark.parametrize("kind", PLANTED)
def test_a_wrong_record_is_found_and_repaired(hand: ByHand, dispatch: Commands, kind: str) -> None:
    busy(hand)
    name, parts, change, said = PLANTED[kind]
    hand.change_record(name, change, **parts)
    assert said in found(hand)
    told = dispatch("doctor")
    assert told.code == ILL
    assert said in told.out.splitlines()
    assert told.out.endswith("differ; dispatch doctor --repair sets them right\n")
    repaired = dispatch("doctor", "--repair", "--actor", "me")
    assert repaired.code == WELL
    assert f"repaired: {said}" in repaired.out.splitlines()
    assert repaired.out.endswith(": every counter is true\n")
    assert found(hand) == []
    with eye(hand.url) as client:
        kinds = [(event[b"kind"], event[b"actor"]) for _, event in client.xrange(key(hand.group, "events"))]
    assert (b"repair", b"me") in kinds
    assert_all_runs(hand)


def assert_all_runs(hand: ByHand) -> None:
    """Nothing is stuck: all that waits is launched."""
    for row in hand.section("leases")["rows"]:
        hand.run(f.request_cancel(row["request_id"], actor="t"))
    leases = list(hand.claim(6))
    while leases:
        hand.settle(leases)
        leases = hand.claim(6)
    assert [row["pool_id"] for row in hand.section("pools")["rows"] if row["pending"]] == []


@pytest.mark.parametrize("policy", ["drr", "fifo"])
def test_a_pool_that_was_struck_from_the_line_is_put_back(valkey: ValkeyProcess, policy: str) -> None:
    group = unique_group()
    configure(valkey.url, group, default_document() | {"policy": policy})
    hand, dispatch = ByHand(valkey.url, group), Commands(valkey.url, group)
    busy(hand)
    with eye(valkey.url) as client:
        assert client.zrem(key(group, "heads" if policy == "fifo" else "rotation"), "backfill") == 1
        client.zadd(key(group, "rotation" if policy == "fifo" else "heads"), {"interactive": 3})
    told = dispatch("doctor").out.splitlines()
    assert "pool backfill: standing is stored as line, counted none" in told
    assert "pool interactive: standing is stored as line, counted line of the other policy" in told
    assert dispatch("doctor", "--repair").code == WELL
    assert_all_runs(hand)
    hand.close()


def test_lost_entries_are_counted_out(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("backfill", 3)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "requests", pool="backfill"))
    assert dispatch("doctor").code == ILL
    assert dispatch("doctor", "--repair").code == WELL
    assert (hand.pool("backfill")["pending"], hand.section("group")["pending"]) == (0, 0)
    hand.submit("backfill", 1)
    assert len(hand.claim(2)) == 1


def test_a_wrong_counter_that_parked_a_pool_is_repaired_with_its_place(hand: ByHand, dispatch: Commands) -> None:
    dispatch("config", "set", "pools.backfill.max_concurrent=2")
    hand.submit("backfill", 2)
    hand.change_record("pool", {"in_flight": 2}, pool="backfill")
    assert hand.claim(2) == []
    assert dispatch("doctor", "--repair").code == WELL
    assert len(hand.claim(2)) == 2


def test_a_lease_without_its_request_is_told_and_goes_by_itself(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("backfill", 1)
    [lease] = hand.claim(1)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "request", id=lease.request_id))
    done = dispatch("doctor", "--repair", "--json")
    assert done.code == ILL
    assert {row["field"] for row in done.json["repaired"]} == {"in_flight"}
    assert [(row["kind"], row["name"]) for row in done.json["differences"]] == [("lease", lease.request_id)]
    assert "(goes when the lease ends)" in dispatch("doctor").out


def test_a_repair_does_nothing_when_the_counter_has_moved(hand: ByHand) -> None:
    hand.submit("backfill", 2)
    stale = Difference("pool", "backfill", "depth", 5, 2)
    assert audit.repair(hand.connection, hand.group, [stale], actor="t") == []
    gone = Difference("pool", "nope", "depth", 5, 2)
    assert audit.repair(hand.connection, hand.group, [gone], actor="t") == []
    assert hand.pool("backfill")["pending"] == 2


def test_what_one_audit_sees_and_the_next_does_not_is_no_difference(
    hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = Difference("group", "", "queued", 3, 2)
    lasting = Difference("group", "", "in_flight", 3, 2)
    answers = iter([[moment, lasting], [lasting, Difference("group", "", "queued", 4, 3)]])
    monkeypatch.setattr(audit, "differences", lambda *_: next(answers))
    assert audit.confirmed_differences(hand.connection, hand.group) == [lasting]


# ---- the server


def test_settings_that_lose_requests_are_a_sentence_each(start_valkey) -> None:
    server = start_valkey(options=("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"))
    group = unique_group()
    configure(server.url, group)
    done = Commands(server.url, group)("doctor", "--json")
    assert done.code == WELL
    evicting, no_file = done.json["advice"]
    assert "maxmemory-policy is allkeys-lru" in evicting
    assert "there is no append-only file" in no_file
    assert done.err == f"dispatch: {evicting}\ndispatch: {no_file}\n"
    well = start_valkey(aof=True)
    configure(well.url, group)
    assert Commands(well.url, group)("doctor").err == ""


def test_a_missing_or_other_library_is_told_and_nothing_is_audited(
    start_valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_valkey(library=False)
    done = Commands(server.url, "g")("doctor")
    assert (done.code, done.out) == (ILL, "")
    assert f"127.0.0.1:{server.port}: the function library is missing, so nothing was audited; run: " in done.err
    monkeypatch.setattr("dispatch.fabric.deploy._installed", lambda *_: Installed("", "other", "9", ()))
    assert "the function library is different" in Commands(server.url, "g")("doctor").err


def test_no_server_and_no_group_are_one_sentence(valkey: ValkeyProcess) -> None:
    away = Commands(f"valkey://127.0.0.1:{free_port()}", "g")("doctor")
    assert (away.code, away.out, away.err.count("\n")) == (TROUBLE, "", 1)
    unknown = Commands(valkey.url, unique_group())("doctor")
    assert (unknown.code, unknown.out) == (TROUBLE, "")
    assert unknown.err.endswith("has no configuration; run: dispatch config apply FILE\n")


@pytest.mark.parametrize("words", [("doctor",), ("config", "show"), ("pools", "pause", "default", "--json")])
def test_a_silent_server_is_told_within_three_seconds(start_valkey, words: tuple[str, ...]) -> None:
    server = start_valkey()

    def run() -> tuple[subprocess.CompletedProcess[str], float]:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "dispatch", *words, "--url", server.url],
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
        return done, time.monotonic() - started

    _, answered_s = run()  # the program itself takes its time to start, on a busy machine more of it
    server.pause()
    done, silent_s = run()
    assert silent_s < 2 * answered_s + 2
    assert (done.returncode, done.stdout) == (TROUBLE, "")
    assert done.stderr.endswith("does not answer: it took too long\n")
    assert done.stderr.count("\n") == 1

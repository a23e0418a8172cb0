"""`dispatch pools`: listing, showing, pausing, draining and purging, and what each leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dispatch.cli.pools import _REASONS
from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome, Settlement
from dispatch.fabric.schema import document
from tests.support.by_hand import ByHand
from tests.support.commands import Commands
from tests.support.groups import configure, default_document, unique_group
from tests.support.valkey import ValkeyProcess

DONE, REFUSED, TROUBLE = 0, 1, 2
ESCAPE = "\x1b"


@pytest.fixture
def hand(valkey: ValkeyProcess, group: str) -> Iterator[ByHand]:
    made = ByHand(valkey.url, group)
    yield made
    made.close()


@pytest.fixture
def dispatch(valkey: ValkeyProcess, group: str) -> Commands:
    return Commands(valkey.url, group)


def test_the_list_has_every_pool_in_the_order_of_the_config(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("interactive", 3)
    hand.claim(1)
    heading, first, *others = dispatch("pools", "list").out.splitlines()
    assert heading.split()[:5] == ["pool", "state", "weight", "min", "max"]
    assert first.split() == ["interactive", "active", "4", "0", "-", "2", "0", "1", "3", "1", "-"]
    assert [line.split()[0] for line in others] == ["document-extract", "backfill", "default"]
    rows = dispatch("pools", "list", "--json").json["pools"]
    assert (rows[0]["pool_id"], rows[0]["pending"], rows[0]["in_flight"]) == ("interactive", 2, 1)


def test_a_thousand_pools_are_all_listed(valkey: ValkeyProcess) -> None:
    group = unique_group()
    names = [f"pool-{number}" for number in range(999)]
    configure(valkey.url, group, default_document() | {"pools": [{"pool_id": name} for name in names]})
    listed = Commands(valkey.url, group)("pools", "list").out.splitlines()
    assert [line.split()[0] for line in listed[1:]] == [*names, "default"]


@pytest.mark.parametrize("terminal", [{"COLUMNS": "20"}, {"COLUMNS": "20", "NO_COLOR": "1", "TERM": "dumb"}])
@pytest.mark.parametrize(
    "words",
    [
        ("pools", "list"),
        ("pools", "show", "default"),
        ("config", "history"),
        ("doctor",),
        ("dead", "list"),
        ("requests", "list"),
        ("top",),
    ],
)
def test_in_a_pipe_names_are_whole_and_nothing_is_coloured(
    valkey: ValkeyProcess, words: tuple[str, ...], terminal: dict[str, str]
) -> None:
    name = "x" * 128
    group = unique_group()
    configure(valkey.url, group, default_document() | {"pools": [{"pool_id": name}, {"pool_id": "default"}]})
    command = [sys.executable, "-m", "dispatch", *words, "--url", valkey.url, "--group", group]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "FORCE_COLOR": "", **terminal},
    )  # fmt: skip
    assert done.returncode == DONE
    assert ESCAPE not in done.stdout + done.stderr
    assert "…" not in done.stdout
    if words in {("pools", "list"), ("top",)}:
        assert name in done.stdout


def test_one_pool_is_told_in_words(hand: ByHand, dispatch: Commands) -> None:
    dispatch("config", "set", "pools.backfill.max_concurrent=1", "pools.backfill.display_name=Night work")
    hand.submit("backfill", 3, estimated_cost_units=5)
    hand.claim(3)
    dispatch("pools", "pause", "backfill", "--reason", "moving\nhouse", "--actor", "anna")
    told = dispatch("pools", "show", "backfill").out.splitlines()
    lines = {name: value.strip() for name, value in (line.split(":", 1) for line in told)}
    assert lines["pool"] == "backfill (Night work)"
    assert lines["state"].startswith("paused by anna at 20")
    assert lines["state"].endswith("Z: moving house")
    assert lines["slots"] == "at least 0, at most 1"
    assert (lines["waiting"], lines["running"], lines["launched"]) == ("2 of 10000", "1", "1, 5 units")
    assert lines["next request"].startswith("costs 5, submitted 20")
    assert (lines["attempts"], lines["delayed"]) == ("1", "0")
    assert any("1 times: the pool runs as many requests as it may (max_concurrent)" in line for line in told)
    as_json = dispatch("pools", "show", "backfill", "--json").json
    assert as_json["paused"]["by"] == "anna"
    assert as_json["skips"]["lane_capacity"] == 1


def test_attempts_and_what_waits_for_one_are_told(hand: ByHand, dispatch: Commands) -> None:
    dispatch("config", "set", "pools.backfill.max_attempts=3")
    hand.change_record("pool", {"delayed": 2}, pool="backfill")
    told = dispatch("pools", "show", "backfill").out
    assert "at most 3, repeated after unreachable, disconnected, overloaded\n" in told
    assert "2 (each waits for its next attempt)\n" in told


@pytest.mark.parametrize("action", ["show", "pause", "resume", "drain", "purge"])
def test_a_pool_that_is_not_there_is_one_sentence(dispatch: Commands, action: str) -> None:
    done = dispatch("pools", action, "nope")
    assert (done.code, done.out) == (TROUBLE, "")
    assert "nope" in done.err
    assert "is not configured" in done.err
    assert done.err.count("\n") == 1


def test_pause_and_resume_say_how_the_pool_stands_now(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("backfill", 2)
    assert dispatch("pools", "pause", "backfill").out == "pool backfill is now paused; 2 wait, 0 run\n"
    assert dispatch("pools", "pause", "backfill").out == "pool backfill was already paused; 2 wait, 0 run\n"
    assert hand.claim(4) == []
    resumed = dispatch("pools", "resume", "backfill", "--json").json
    assert (resumed["changed"], resumed["state"], resumed["waiting"]) == (True, "active", 2)
    assert len(hand.claim(4)) == 2


def test_every_reason_of_the_schema_has_words() -> None:
    assert set(_REASONS) == set(document()["skips"]["reasons"])


# ---- purge


def test_purge_cancels_what_waits_and_leaves_what_runs(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("backfill", 1200)
    hand.submit("default", 3)
    running = hand.claim(8)
    waiting = hand.pool("backfill")["pending"]
    done = dispatch("pools", "purge", "backfill", "--yes", "--reason", "wrong prompts", "--actor", "anna")
    assert done.out == f"pool backfill: {waiting} cancelled; 0 wait, {hand.pool('backfill')['in_flight']} run\n"
    assert done.err.splitlines()[-1] == f"dispatch: {waiting} cancelled"
    assert len(done.err.splitlines()) > 3  # it said how far it was
    for lease in running:
        [row] = hand.section("request", subject=lease.request_id)["rows"]
        assert (row["state"], row.get("cancel_asked_by")) == ("leased", None)
    hand.settle(running)
    assert hand.pool("backfill")["endings"]["cancelled"] == waiting
    assert hand.pool("default")["pending"] + hand.pool("default")["launched"] == 3


def test_purge_reaches_every_key_and_level(hand: ByHand, dispatch: Commands) -> None:
    for number in range(600):
        hand.submit("backfill", fairness_key=f"user-{number}", priority=number % 4)
    done = dispatch("pools", "purge", "backfill", "--yes", "--json")
    assert (done.json["cancelled"], done.json["waiting"], done.json["running"]) == (600, 0, 0)


def test_purge_reaches_what_waits_for_its_next_attempt(hand: ByHand, dispatch: Commands) -> None:
    config = default_document()
    [pool] = [pool for pool in config["pools"] if pool["pool_id"] == "backfill"]
    pool |= {"max_attempts": 2, "retry_base_ms": 3_600_000, "retry_cap_ms": 3_600_000, "max_timeout_ms": 86_400_000,
             "default_timeout_ms": 86_400_000}  # fmt: skip
    configure(hand.url, hand.group, config, expected=1)
    hand.submit("backfill", 2)
    items = [
        Settlement(
            request_id=lease.request_id, fence=lease.fence, outcome=Outcome.FAILED, error_type="endpoint_unreachable",
            retryable=True,
        )
        for lease in hand.claim(1)
    ]  # fmt: skip
    assert hand.run(f.lease_settle("g", "g/1", nonce="n", want=0, items=items)).answers == ("RETRY",)
    [row] = hand.section("delayed", subject="backfill")["rows"]
    assert (row["request_id"], row["state"]) == (items[0].request_id, "delayed")
    assert hand.section("delayed", subject="default")["rows"] == []
    done = dispatch("pools", "purge", "backfill", "--yes", "--json")
    assert (done.json["cancelled"], done.json["waiting"]) == (2, 0)
    assert hand.pool("backfill")["delayed"] == 0


def test_purge_asks_for_the_pools_name(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("backfill", 2)
    for typed in ("", "yes\n", "default\n"):
        done = dispatch("pools", "purge", "backfill", typed=typed)
        assert (done.code, done.out) == (REFUSED, "")
        assert "2 waiting requests of pool backfill will be cancelled" in done.err
        assert done.err.endswith("nothing was cancelled: the name backfill was not given (--yes does not ask)\n")
    assert hand.pool("backfill")["pending"] == 2
    done = dispatch("pools", "purge", "backfill", typed="backfill\n")
    assert (done.code, done.out) == (DONE, "pool backfill: 2 cancelled; 0 wait, 0 run\n")

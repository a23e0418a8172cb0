"""`dispatch dead`: what is listed and shown, and what comes of a retry or a drop of one, of several, of all."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.commands import Commands
from tests.support.dying import LARGE, LARGE_NONCE, POOLS, dead, dies, group_where_requests_die
from tests.support.groups import configure, default_document
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

DONE, REFUSED, TROUBLE = 0, 1, 2


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    hand = group_where_requests_die(valkey)
    yield hand
    hand.close()


@pytest.fixture
def dispatch(hand: ByHand) -> Commands:
    return Commands(hand.url, hand.group)


def test_the_list_has_whole_ids_and_can_be_of_one_pool(hand: ByHand, dispatch: Commands) -> None:
    long = "r" * 128
    ids = [dies(hand, request_id=long), dies(hand, "once-more")]
    heading, first, second = dispatch("dead", "list").out.splitlines()
    assert heading.split() == ["request", "pool", "attempts", "died", "last", "error"]
    assert first.split()[:3] == [ids[1], "once-more", "1"]
    assert second.split()[:3] == [long, "again", "2"]
    assert second.split()[-1] == "lost"
    rows = dispatch("dead", "list", "--pool", "again", "--json").json["dead"]
    assert [row["request_id"] for row in rows] == [long]


def test_show_tells_every_try_and_no_content_unless_asked(hand: ByHand, dispatch: Commands) -> None:
    secret = b'{"messages":[{"content":"the \\u001b[2J prompt"}],"seed":123456789012345678901234567890}'
    old = dies(hand, body=secret, body_bytes=len(secret), envelope=b'{"metadata":{"k":"v"}}')
    told = dispatch("dead", "show", old)
    assert told.code == DONE
    lines = [line.split(":", 1) for line in told.out.splitlines()]
    assert [value.strip()[:5] for name, value in lines if name.startswith("try ")] == ["lost ", "lost "]
    assert f"{len(secret)} bytes, not shown (--content shows it)" in told.out
    assert "prompt" not in told.out + json.dumps(dispatch("dead", "show", old, "--json").json)
    full = dispatch("dead", "show", old, "--content").out
    assert "the \\u001b[2J prompt" in full
    assert '"k": "v"' in full
    as_json = dispatch("dead", "show", old, "--content", "--json").out
    assert "123456789012345678901234567890" in as_json
    assert json.loads(as_json)["envelope"] == {"metadata": {"k": "v"}}


def test_a_large_body_and_one_that_is_no_json_are_shown_as_text(hand: ByHand, dispatch: Commands) -> None:
    large = dies(hand, size=LARGE)
    assert dispatch("dead", "show", large, "--content").out.endswith("y" * LARGE + "\n")
    odd = dies(hand, body=b"\x1b[2J\xff\x9b", body_bytes=6)
    shown = dispatch("dead", "show", odd, "--content").out
    assert "\x1b" not in shown
    assert dispatch("dead", "show", odd, "--content", "--json").json["body"] == "\x1b[2J\ufffd\ufffd"


def test_several_are_retried_and_counted(hand: ByHand, dispatch: Commands) -> None:
    ids = [dies(hand) for _ in range(3)]
    done = dispatch("dead", "retry", ids[0], ids[1], ids[0], "nope", "--json")
    assert done.code == REFUSED
    assert [row["request_id"] for row in done.json["retried"]] == ids[:2]
    assert done.json["unknown"] == ["nope"]
    assert "dispatch: nope: is not in the dead list\n" in done.err
    new = {row["new_id"] for row in done.json["retried"]}
    assert {row["request_id"] for row in hand.section("waiting", subject="again")["rows"]} == new
    said = dispatch("dead", "drop", ids[2])
    assert (said.code, said.out) == (DONE, f"{ids[2]}: dropped\n1 dropped\n")
    with eye(hand.url) as client:
        events = [event for _, event in client.xrange(key(hand.group, "events")) if event[b"kind"] == b"dead"]
    assert [event[b"action"] for event in events] == [b"retry", b"retry", b"drop"]


def test_all_asks_for_the_number_unless_it_is_told_not_to(hand: ByHand, dispatch: Commands) -> None:
    for _ in range(3):
        dies(hand)
    other = dies(hand, "once-more")
    refused = dispatch("dead", "drop", "--all", "--pool", "again", typed="4\n")
    assert (refused.code, refused.out) == (REFUSED, "")
    assert "3 dead requests of pool again will be dropped; type their number to go on: " in refused.err
    assert refused.err.endswith("nothing was dropped: the number 3 was not given (--yes does not ask)\n")
    assert dispatch("dead", "drop", "--all", "--pool", "again", typed="3\n").out.endswith("\n3 dropped\n")
    assert dead(hand) == [other]
    assert dispatch("dead", "retry", "--all", "--yes").out.endswith("\n1 retried\n")
    assert dispatch("dead", "drop", "--all").out == "nothing to do\n"


@pytest.mark.parametrize("words", [("retry",), ("drop",), ("drop", "a", "--all"), ("retry", "a", "--pool", "again")])
def test_it_has_to_be_said_which_are_meant(dispatch: Commands, words: tuple[str, ...]) -> None:
    done = dispatch("dead", *words)
    assert (done.code, done.out) == (TROUBLE, "")
    assert done.err == "dispatch: name requests, or give --all (with --pool for those of one pool)\n"


def test_one_that_is_not_there_is_one_sentence(hand: ByHand, dispatch: Commands) -> None:
    [waiting] = hand.submit("again")
    for name in ("nope", waiting):
        done = dispatch("dead", "show", name, "--content")
        assert (done.code, done.out, done.err.count("\n")) == (TROUBLE, "", 1)
        assert f"{name} is not in the dead list of group {hand.group}" in done.err


def test_more_than_a_page_is_changed(hand: ByHand, dispatch: Commands) -> None:
    count = 230
    hand.submit("once-more", count)
    while leases := hand.claim(8):
        hand.settle(leases, outcome=Outcome.LOST)
    assert len(dispatch("dead", "list").out.splitlines()) == count + 1
    done = dispatch("dead", "retry", "--all", "--yes")
    assert done.out.endswith(f"\n{count} retried\n")
    assert done.err.splitlines()[-1] == f"dispatch: {count} of {count}"
    assert hand.pool("once-more")["pending"] == count


# ---- what a pool does not take

REFUSALS = {
    "pool_disabled": {"enabled": False},
    "pool_full": {"max_queue_depth": 0},
    "pool_bytes_full": {"max_queue_bytes": 1},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_pool_refuses_a_retry_as_it_refuses_a_submit(hand: ByHand, dispatch: Commands, reason: str) -> None:
    old = dies(hand)
    pools = [POOLS[0] | REFUSALS[reason], *POOLS[1:]]
    configure(hand.url, hand.group, default_document() | {"pools": pools}, expected=1)
    done = dispatch("dead", "retry", old)
    assert (done.code, done.out) == (REFUSED, "1 refused\n")
    assert done.err.startswith(f"dispatch: {old}: not retried: {reason}: the pool ")
    assert dead(hand) == [old]
    configure(hand.url, hand.group, default_document() | {"pools": POOLS}, expected=2)
    assert dispatch("dead", "retry", old).code == DONE


def test_a_pool_that_is_gone_is_told_and_the_request_stays(hand: ByHand, dispatch: Commands) -> None:
    old = dies(hand)
    configure(hand.url, hand.group, default_document() | {"pools": POOLS[1:]}, expected=1)
    done = dispatch("dead", "retry", old, "--json")
    assert done.code == REFUSED
    [refused] = done.json["refused"]
    assert refused["reason"] == "pool_unknown"
    assert 'pool "again" is not configured' in refused["message"]
    assert dead(hand) == [old]


def test_a_body_that_somebody_removed_is_told(hand: ByHand, dispatch: Commands) -> None:
    old = dies(hand, size=LARGE)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "request_body", id=old, nonce=LARGE_NONCE))
    assert "not retried: body_missing" in dispatch("dead", "retry", old).err
    assert dispatch("dead", "drop", old).code == DONE

"""`dispatch explain` and `dispatch top`: where a request is and why, and the group in a terminal and a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.commands import Commands
from tests.support.producing import eye, wide_group
from tests.support.valkey import ValkeyProcess

DONE, UNKNOWN, TROUBLE = 0, 1, 2


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    pools = [{"pool_id": "default"}, {"pool_id": "vision", "max_concurrent": 1, "quantum": 3}]
    made = ByHand(valkey.url, wide_group(valkey.url, pools=pools))
    made.beat()
    yield made
    made.connection.close()


@pytest.fixture
def dispatch(hand: ByHand) -> Commands:
    return Commands(hand.url, hand.group)


def test_a_waiting_request_says_where_it_stands_and_why(hand: ByHand, dispatch: Commands) -> None:
    _, _, last = hand.submit("vision", 3)
    hand.claim(3)
    told = dispatch("explain", last)
    assert told.code == DONE
    assert f"{last} waits in pool vision for its turn" in told.out
    assert "1 request stands before it in its pool." in told.out
    assert "Pool is at its cap" in told.out
    assert "max_concurrent" in told.out
    assert "Its deadline is in " in told.out


def test_a_paused_pool_is_the_persons_who_paused_it(hand: ByHand, dispatch: Commands) -> None:
    [name] = hand.submit("vision")
    hand.run(f.pool_pause("vision", "pause", actor="m.okafor", reason="moving"))
    told = dispatch("explain", name).out
    assert 'vision is paused by m.okafor "moving"; 1 request waits in it.' in told
    assert "It is the next of its pool." in told


def test_a_running_request_says_who_runs_it(hand: ByHand, dispatch: Commands) -> None:
    [name] = hand.submit()
    hand.beat(hand.claim(1))
    told = dispatch("explain", name).out
    assert f"{name} of pool default runs on gateway g against endpoint default for " in told
    assert "attempt 1" in told
    assert "Its gateway was last heard of " in told
    hand.run(f.request_cancel(name, actor="anna"))
    assert "anna asked to stop it" in dispatch("explain", name).out


def test_an_ended_request_is_told_from_its_record(hand: ByHand, dispatch: Commands) -> None:
    [lost] = hand.submit()
    hand.settle(hand.claim(1), outcome=Outcome.LOST)
    [never] = hand.submit()
    hand.run(f.request_cancel(never, actor="anna"))
    with eye(hand.url) as client:  # as after retention_ms
        client.delete(key(hand.group, "request", id=lost))
    told = dispatch("explain", lost)
    assert told.code == DONE
    assert f"{lost} of pool default ended as lost at 20" in told.out
    assert "Its gateway died or lost touch while it ran" in told.out
    assert "on gateway g against endpoint default, attempt 1." in told.out
    cancelled = dispatch("explain", never, "--json").json
    assert (cancelled["found"], cancelled["ending"]["ending"]) == (True, "cancelled")
    assert any(line.startswith("It never ran") for line in cancelled["sentences"])


def test_a_request_without_a_trace_is_one_sentence(dispatch: Commands) -> None:
    told = dispatch("explain", "nobody\nknows")
    assert (told.code, told.out, told.err.count("\n")) == (UNKNOWN, "", 1)
    assert "No trace of nobody knows in Valkey." in told.err
    document = dispatch("explain", "nobody", "--json")
    assert (document.code, document.json["found"]) == (UNKNOWN, False)


def test_top_prints_once_for_a_pipe(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("vision", 2)
    hand.claim(2)
    told = dispatch("top")
    assert told.code == DONE
    lines = told.out.splitlines()
    assert lines[0].startswith(f"{hand.group}   1 waiting   1 of 1\u202f000 in flight")
    [vision] = [line for line in lines if line.startswith("vision")]
    assert vision.endswith("Pool is at its cap")
    assert "1 of 1" in vision
    assert any(line.startswith("g ") and "live" in line for line in lines)


def test_top_as_a_document_has_rows_rates_and_findings(hand: ByHand, dispatch: Commands) -> None:
    hand.submit("vision", 2)
    hand.run(f.pool_pause("vision", "pause", actor="anna"))
    told = dispatch("top", "--json").json
    rows = {row["pool_id"]: row for row in told["pools"]}
    assert (rows["vision"]["pending"], rows["default"]["pending"]) == (2, 0)
    assert told["trend"]["vision"]["arriving_per_s"] == 0
    assert [row["rule"] for row in told["findings"]] == ["stopped_by_person"]
    assert told["truncated"] == []


@pytest.mark.parametrize("words", [("top",), ("explain", "r1"), ("doctor",)])
def test_without_a_server_it_is_one_sentence(words: tuple[str, ...]) -> None:
    started = time.monotonic()
    told = Commands("valkey://127.0.0.1:1", "g")(*words)
    assert (told.code, told.out, told.err.count("\n")) == (TROUBLE, "", 1)
    assert time.monotonic() - started < 30  # usually at once


class Terminal:
    """`dispatch top` on a terminal of 120 columns."""

    def __init__(self, url: str, group: str) -> None:
        self._master, other = pty.openpty()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCH_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dispatch", "top", "--url", url, "--group", group, "--every", "0.2"],
            stdin=other, stdout=other, stderr=other,
            env=clean | {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "50"},
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def until(self, text: str) -> None:
        ends_at = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < ends_at, self.seen[-3000:]
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 65536).decode("utf-8", "replace")

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self._master, keys.encode())

    def close(self) -> int:
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            os.close(self._master)


def test_top_on_a_terminal_takes_keys_and_pauses_after_a_yes(hand: ByHand) -> None:
    hand.submit("vision", 2)
    terminal = Terminal(hand.url, hand.group)
    try:
        terminal.until("pools by config")
        terminal.press("s")
        terminal.until("pools by waiting")
        terminal.press("p")
        terminal.until("pause pool vision?")
        terminal.press("n")
        terminal.until("nothing was changed")
        assert "paused" not in hand.pool("vision")
        terminal.press("p")
        terminal.until("pause pool vision?")
        terminal.press("y")
        terminal.until("Paused by")
        assert hand.pool("vision")["paused"]["reason"] == "dispatch top"
        hand.submit("default", 7)
        terminal.until("9 waiting")
        terminal.press("q")
    finally:
        code = terminal.close()
    assert code == DONE

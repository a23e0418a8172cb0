"""The commands over a gateway do and say what they do straight on Valkey; and what a key forbids, in a sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio.from_thread
import pytest
import yaml

from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from dispatch.ingress import IngressSettings
from tests.support.commands import Commands, Done
from tests.support.control import ControlStack, control_stack
from tests.support.producing import eye
from tests.support.stub import StubBackend, free_port, json_answer
from tests.support.valkey import ValkeyProcess

DONE, REFUSED, TROUBLE = 0, 1, 2
POOLS = [
    {"pool_id": "interactive", "quantum": 4, "display_name": "Chat"},
    {"pool_id": "backfill", "delivery": "at_least_once", "max_attempts": 1},
    {"pool_id": "default", "max_concurrent": 1},
]


@pytest.fixture(scope="module")
def control(valkey: ValkeyProcess) -> Iterator[ControlStack]:
    """A gateway in an event loop of its own."""
    with ExitStack() as exits:
        portal = exits.enter_context(anyio.from_thread.start_blocking_portal())
        yield exits.enter_context(portal.wrap_async_context_manager(control_stack(valkey.url, pools=POOLS)))


@pytest.fixture
def straight(control: ControlStack) -> Commands:
    return Commands(control.hand.url, control.group)


@pytest.fixture
def remote(control: ControlStack, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("DISPATCH_API_KEY", control.tokens["admin"])
    return Commands(control.url, control.group)


def steady(text: str) -> str:
    """Return what a command said without what the server's clock changes."""
    text = re.sub(r'("(server|age|wait)_ms|"per_second)": [\d.]+', r'\1": 0', text)
    text = re.sub(r" +[\d.]+ m?s +", " (since) ", text)  # a cell of a table, and its column's width
    return re.sub(r"[\d.]+ (s \(|launched per)", r"0 \1", text)


def same(one: Done, other: Done) -> Done:
    """Make sure that two runs ended and said the same; documents may be in another order."""
    assert (one.code, one.err) == (other.code, other.err)
    if one.out.startswith("{"):
        assert json.loads(steady(one.out)) == json.loads(steady(other.out))
    else:
        assert steady(one.out) == steady(other.out)
    return one


@pytest.fixture(scope="module")
def worked(control: ControlStack) -> list[str]:
    """Have something of everything; returns the ids of the dead."""
    hand = control.hand
    for number in range(3):
        body = json.dumps({"model": "m", "n": number}).encode()
        hand.submit("backfill", request_id=f"dead-{number}", body=body, body_bytes=len(body))
        hand.settle(hand.claim(1), outcome=Outcome.LOST)
    hand.submit("interactive", 3, fairness_key="anna")
    hand.submit("default", 3)
    hand.claim(2, gateway="g-1")
    Commands(hand.url, control.group)("pools", "pause", "default", "--actor", "anna", "--reason", "moving")
    return [f"dead-{number}" for number in range(3)]


READING = [
    "pools list", "pools show interactive", "pools show default", "pools show nowhere", "config show",
    "config show --generation 1", "config show --generation 77", "config history", "config history 1", "dead list",
    "dead list --pool backfill", "dead list --pool default", "dead show dead-1", "dead show dead-1 --content",
    "dead show nothing", "requests list", "requests list --state running", "requests list --state queued",
    "requests list --pool interactive", "requests list --pool nowhere", "requests list --limit 2",
    "requests show dead-1", "requests show nothing", "requests show a:b", "estimate interactive", "estimate nowhere",
]  # fmt: skip


@pytest.mark.parametrize("line", READING)
@pytest.mark.parametrize("form", ["", "--json"])
def test_reading_commands_say_the_same(
    straight: Commands, remote: Commands, worked: list[str], line: str, form: str
) -> None:
    assert worked
    words = [*line.split(), *form.split()]
    done = same(straight(*words), remote(*words))
    assert done.code == (TROUBLE if re.search(r"nowhere|nothing|77|a:b", line) else DONE)


def test_a_pool_is_paused_resumed_and_purged(control: ControlStack, remote: Commands) -> None:
    control.hand.submit("backfill", 4)
    key_id = control.key_ids["admin"]
    paused = remote("pools", "pause", "backfill", "--actor", "anna", "--reason", "moving")
    assert (paused.code, paused.out) == (DONE, "pool backfill is now paused; 4 wait, 0 run\n")
    assert f"anna with key admin ({key_id})" in remote("pools", "show", "backfill").out
    assert remote("pools", "purge", "backfill", typed="no\n").code == REFUSED
    purged = remote("pools", "purge", "backfill", "--yes", "--reason", "wrong")
    assert (purged.code, purged.out) == (DONE, "pool backfill: 4 cancelled; 0 wait, 0 run\n")
    assert remote("pools", "resume", "backfill").out == "pool backfill is now active; 0 wait, 0 run\n"
    assert remote("pools", "pause", "nowhere").code == TROUBLE


def test_requests_are_cancelled(control: ControlStack, remote: Commands) -> None:
    ids = control.hand.submit("backfill", 150)
    cancelled = remote("cancel", *ids, "nothing", "--json")
    assert cancelled.code == REFUSED
    assert [row["result"] for row in cancelled.json["requests"]] == [*["cancelled"] * 150, "unknown"]
    again = remote("cancel", ids[0])
    assert (again.code, again.out) == (DONE, f"{ids[0]}: cancelled; it was not running\n")
    [runs] = control.hand.submit("interactive", request_id="runs-here")
    control.hand.claim(20, gateway="g-2")
    still = remote("cancel", runs, "--wait", "0")
    assert (still.code, still.err) == (
        REFUSED,
        f"dispatch: {runs}: still runs on gateway g-2, which was told to stop it\n",
    )


def test_the_dead_are_retried_and_dropped(control: ControlStack, remote: Commands, straight: Commands) -> None:
    for name in ("late-1", "late-2", "late-3"):
        control.hand.submit("backfill", request_id=name)
        control.hand.settle(control.hand.claim(1), outcome=Outcome.LOST)
    retried = remote("dead", "retry", "late-1", "--actor", "anna", "--json").json
    [row] = retried["retried"]
    assert row["request_id"] == "late-1"
    assert straight("requests", "show", row["new_id"], "--json").json["detached"] is True
    assert remote("cancel", row["new_id"]).code == DONE
    assert remote("dead", "drop", "late-2", "nothing").code == REFUSED
    remote("pools", "drain", "backfill")
    refused = remote("dead", "retry", "late-3")
    assert (refused.code, refused.out) == (REFUSED, "1 refused\n")
    assert "pool_draining: the pool is being drained" in refused.err
    remote("pools", "resume", "backfill")
    assert remote("dead", "drop", "late-3").out == "late-3: dropped\n1 dropped\n"


def test_a_large_dead_body_comes_whole(control: ControlStack, remote: Commands, straight: Commands) -> None:
    large = json.dumps({"model": "m", "text": "x" * 100_000}).encode()
    with eye(control.hand.url) as look:
        look.set(key(control.group, "request_body", id="large", nonce="nl"), large, px=60_000)
    control.hand.submit("backfill", request_id="large", nonce="nl", body=b"", body_bytes=len(large))
    control.hand.settle(control.hand.claim(1), outcome=Outcome.LOST)
    words = ("dead", "show", "large", "--content", "--json")
    assert same(straight(*words), remote(*words)).json["body"]["text"] == "x" * 100_000


def test_a_config_is_compared_applied_and_rolled_back(
    control: ControlStack, remote: Commands, straight: Commands, tmp_path: Path
) -> None:
    in_force = straight("config", "show", "--json").json["generation"]
    document = yaml.safe_load(remote("config", "show").out) | {"total_concurrent_dispatch": 77}
    good, bad, broken = (tmp_path / name for name in ("good.yaml", "bad.yaml", "broken.yaml"))
    good.write_text(yaml.safe_dump(document))
    bad.write_text(yaml.safe_dump(document | {"policy": "lottery"}))
    broken.write_text("policy: [")
    for file, code in ((good, REFUSED), (bad, REFUSED), (broken, TROUBLE)):
        for form in ((), ("--json",)):
            assert (
                same(straight("config", "diff", str(file), *form), remote("config", "diff", str(file), *form)).code
                == code
            )
    stale = ("config", "apply", str(good), "--expected", "4711")
    assert same(straight(*stale), remote(*stale)).code == REFUSED
    refused = ("config", "apply", str(bad))
    assert same(straight(*refused), remote(*refused)).code == REFUSED
    applied = remote("config", "apply", str(good), "--actor", "anna", "--reason", "room")
    assert (applied.code, applied.out.splitlines()[-1]) == (DONE, f"generation {in_force + 1} is in force")
    assert "total_concurrent_dispatch: 8 -> 77" in applied.out
    assert remote("config", "set", "total_concurrent_dispatch=78").code == DONE
    assert remote("config", "rollback", str(in_force)).code == DONE
    row = straight("config", "history", "--json").json["generations"][2]
    assert (row["actor"], row["reason"]) == (f"anna with key admin ({control.key_ids['admin']})", "room")
    assert straight("config", "show", "--json").json["document"]["total_concurrent_dispatch"] == 8


def test_keys_are_made_listed_and_revoked(control: ControlStack, remote: Commands, straight: Commands) -> None:
    made = remote("keys", "create", "--name", "batch", "--role", "observe", "--pool", "backfill", "--json").json
    assert same(straight("keys", "list"), remote("keys", "list")).out.count("batch") == 1
    control.tokens["made"] = made["token"]
    assert remote("keys", "revoke", made["key_id"]).code == DONE
    assert remote("keys", "revoke", made["key_id"]).code == REFUSED


def test_what_a_key_forbids_is_one_sentence(
    control: ControlStack, remote: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token, told in (
        ("", "a key is needed"), ("nonsense", "DISPATCH_API_KEY"), (control.tokens["observe"], "admin is needed"),
        (control.tokens["admin-of-backfill"], "pool 'default' is not allowed to this key"),
    ):  # fmt: skip
        monkeypatch.setenv("DISPATCH_API_KEY", token)
        done = remote("pools", "pause", "default")
        assert (done.code, done.out, done.err.count("\n")) == (TROUBLE, "", 1)
        assert told in done.err
        assert not token or token not in done.err


def test_another_group_than_the_gateways_is_refused(control: ControlStack, remote: Commands) -> None:
    done = remote("pools", "pause", "backfill", "--group", "elsewhere")
    assert done.code == TROUBLE
    assert control.group in done.err
    assert "elsewhere" in done.err
    assert "paused" not in control.hand.pool("backfill")


@pytest.mark.parametrize(
    "words", [("pools", "list"), ("config", "history"), ("requests", "show", "a"), ("estimate", "a")]
)
def test_a_gateway_that_is_not_there_is_one_sentence(words: tuple[str, ...]) -> None:
    done = Commands("valkey://127.0.0.1:1", "g")(*words, "--gateway", f"http://127.0.0.1:{free_port()}")
    assert (done.code, done.out, done.err.count("\n")) == (TROUBLE, "", 1)
    assert "does not answer: connection refused" in done.err


@pytest.mark.parametrize("url", ["http://", "http://user@host", "http://host/?x=1"])
def test_what_is_no_address_of_a_gateway_is_told(url: str) -> None:
    done = Commands("valkey://127.0.0.1:1", "g")("pools", "list", "--gateway", url)
    assert done.code == TROUBLE
    assert "no gateway's address" in done.err


def test_what_answers_and_is_no_gateway_is_told(control: ControlStack, remote: Commands) -> None:
    done = remote("pools", "list", "--gateway", f"{control.url}/v1/models")
    assert done.code == TROUBLE
    assert "has no such part of the control API" in done.err


@pytest.mark.parametrize("body", [b"{}", b'{"object":"list","data":[]}', b"[]", b"null", b"<html>", b'{"rows":5}'])
@pytest.mark.parametrize("words", [("pools", "list"), ("config", "show"), ("keys", "list"), ("estimate", "a")])
def test_a_server_of_another_kind_is_told(body: bytes, words: tuple[str, ...]) -> None:
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(StubBackend(json_answer(body))) as stub,
    ):
        done = Commands("valkey://127.0.0.1:1", "g")(*words, "--gateway", stub.url)
    assert (done.code, done.out, done.err.count("\n")) == (TROUBLE, "", 1)
    assert "is no gateway's control API" in done.err


def test_names_come_whole_through_a_pipe(control: ControlStack, remote: Commands) -> None:
    assert remote
    [name] = control.hand.submit("backfill", request_id="x" * 128)
    line = f"{sys.executable} -m dispatch requests list --gateway {control.url} --group {control.group}"
    environment = {**os.environ, "COLUMNS": "20", "TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": ""}
    for rest, expected in ((f"| grep {name}", name), ("| head -1", "request"), ("--json | grep -c request_id", "")):
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line} {rest}"], capture_output=True, text=True, timeout=30, check=False,
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (DONE, "")
        assert done.stdout.startswith(expected)
        assert "\x1b" not in done.stdout
        assert "…" not in done.stdout
    remote("cancel", name)


def test_when_valkey_is_away_a_command_over_a_gateway_says_so_soon(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    with ExitStack() as exits:
        portal = exits.enter_context(anyio.from_thread.start_blocking_portal())
        stack = control_stack(server.url, keys=False, settings=IngressSettings())
        running = exits.enter_context(portal.wrap_async_context_manager(stack))
        commands = Commands(running.url, running.group)
        assert commands("pools", "list").code == DONE
        server.pause()
        started = time.monotonic()
        done = commands("pools", "list")
        took = time.monotonic() - started
        server.resume()
    assert (done.code, done.out, done.err.count("\n")) == (TROUBLE, "", 1)
    assert "Valkey" in done.err
    assert took < 3 + 2  # the second part is what starting a process may take on a busy machine

"""What operators see: bounded, without a word of any prompt or key, and never zero for what is not known."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest

from dispatch.errors import BadArgument, GroupUnknown
from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import key
from tests.behaviours.scene import PATIENT, assert_settled, gateway_process, reads_while
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.commands import Commands
from tests.support.producing import eye, until, wide_group
from tests.support.stub import Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

PROMPT, KEY, CALLER_KEY, DETAIL = "planted-prompt", "planted-key", "planted-caller-key", "planted-metadata"
PLANTED = (PROMPT, KEY, CALLER_KEY, DETAIL)
OF_A_SUBJECT = {"generation", "request", "waiting"}


def sections(hand: ByHand) -> list[str]:
    """Return the names of all sections but those of a subject, as the server lists them itself."""
    with pytest.raises(BadArgument) as refused:
        hand.section("nothing")
    names = re.findall(r"[a-z]+", str(refused.value).rpartition("allowed")[2])
    assert {"group", "pools", "endings"} | OF_A_SUBJECT <= set(names), refused.value
    return [name for name in names if name not in OF_A_SUBJECT]


def everything_shown(hand: ByHand, pools: tuple[str, ...] = ("default",)) -> str:
    """Return every section of the snapshot as text, with each request and each pool's waiting list."""
    shown = {name: hand.section(name, limit=200) for name in sections(hand)}
    for pool in pools:
        shown[f"waiting {pool}"] = hand.section("waiting", subject=pool, limit=200)
        shown[f"pool {pool}"] = hand.section("pools", subject=pool)
    shown["generation 1"] = hand.section("generation", subject="1")
    with eye(hand.url) as client:
        for name in client.scan_iter(match=key(hand.group, "request", id="*"), count=1000):
            request_id = name.decode().rpartition(":")[2]
            shown[f"request {request_id}"] = hand.section("request", subject=request_id)
        shown["events"] = [fields for _, fields in client.xrange(key(hand.group, "events"))]
    return repr(shown)


def echo_of_the_prompt(request: SeenRequest) -> Script:
    """A backend that quotes the prompt and our key in its errors."""
    said = json.dumps({"error": {"message": f"cannot do {request.body.decode()} {request.header('authorization')}"}})
    if "good" in request.body.decode():
        return json_answer(COMPLETION)
    status = "400 Bad Request" if "bad" in request.body.decode() else "500 Internal Server Error"
    return json_answer(said.encode(), status=status)


@pytest.mark.anyio
async def test_no_section_and_no_log_line_holds_a_word_of_a_prompt_or_a_key(
    valkey: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", KEY)
    async with StubBackend(echo_of_the_prompt) as stub:
        address = {"endpoint_id": "default", "url": f"{stub.url}/v1", "api_key_env": "PLANTED_KEY"} | PATIENT
        pools = [{"pool_id": "default"}, {"pool_id": "again", "delivery": "at_least_once", "max_attempts": 1}]
        group = wide_group(valkey.url, pools=pools, endpoints=[address])
        hand = ByHand(valkey.url, group)
        async with gateway_process(valkey.url, group, log_level="debug") as gateway:
            headers = {"authorization": f"Bearer {CALLER_KEY}", "x-dispatch-metadata": json.dumps({"note": DETAIL})}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as http:
                for kind in ("good", "bad", "failing", "x" * 9000):
                    content = [{"type": "text", "text": f"{PROMPT} {kind}"}, {"type": "text", "text": PROMPT * 2}]
                    body = {"model": "m", "metadata": {"a": PROMPT}, "messages": [{"role": "user", "content": content}]}
                    answer = await http.post("/v1/chat/completions", json=body)
                    assert answer.status_code == {"good": 200, "bad": 400}.get(kind, 500), answer.text
                hand.run(f.pool_pause("default", "pause", actor="test"))
                waiting = asyncio.create_task(http.post("/v1/chat/completions", json=body))
                await until(lambda: hand.section("group")["pending"] == 1)
                seen = everything_shown(hand) + gateway.stderr
                assert len(stub.requests) == 4
                waiting.cancel()
                await until(lambda: hand.section("group")["pending"] == 0)
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended(10) == 0
            seen += everything_shown(hand) + gateway.stderr
    assert "gateway_stopped" in seen
    assert [word for word in PLANTED if word in seen] == []
    assert f"Bearer {KEY}" == stub.requests[0].header("authorization")  # it was there to be seen
    hand.close()


def test_no_section_shows_the_content_of_what_runs_or_died(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default"}, {"pool_id": "again", "delivery": "at_least_once", "max_attempts": 1}]
    group = wide_group(valkey.url, pools=pools, lease_ms=300, liveness_ms=300)
    hand = ByHand(valkey.url, group)
    planted = {"envelope": json.dumps({"metadata": {"a": DETAIL}}).encode(), "body": PROMPT.encode()}
    for pool in ("default", "again"):
        hand.submit(pool, 2, body_bytes=len(PROMPT), **planted)
    hand.claim(2, "dying")
    while not hand.pool("again").get("endings"):
        hand.beat(gateway="alive")
        hand.run(f.lease_reap(limit=10))
    assert hand.section("dead")["rows"]
    seen = everything_shown(hand, ("default", "again"))
    told = [
        Commands(valkey.url, group)(*words)
        for words in (("pools", "list"), ("dead", "list"), ("dead", "list", "--json"))
    ]
    assert {done.code for done in told} == {0}
    seen += "".join(done.out + done.err for done in told)
    assert [word for word in PLANTED if word in seen] == []
    hand.close()


def test_nothing_of_a_prompt_stays_in_the_server_when_its_request_has_ended(hand: ByHand) -> None:
    hand.submit(count=3, body_bytes=len(PROMPT), body=PROMPT.encode())
    with eye(hand.url) as client:
        large = PROMPT.encode() * 1000
        client.set(key(hand.group, "request_body", id="r4", nonce="n4"), large, ex=60)
        hand.submit(body_bytes=len(large), body=b"")
        hand.settle(hand.claim(1))
        hand.settle(hand.claim(1), outcome=Outcome.FAILED)
        for name in ("r3", "r4"):
            assert hand.run(f.request_cancel(name, actor="test")).status == "CANCELLED"
        names = list(client.scan_iter(match=f"{{{hand.group}}}:*", count=1000))
        end = client.dbsize() + 1000
        while client.exists(key(hand.group, "request_body", id="r4", nonce="n4")) and (end := end - 1):
            pass  # it expires within a millisecond
        stored = b"".join(client.dump(name) or b"" for name in names)
        assert PROMPT.encode() not in stored


def test_a_snapshot_reads_no_body(hand: ByHand) -> None:
    hand.submit(count=5)
    hand.claim(2)
    reads = reads_while(hand, lambda: everything_shown(hand))
    assert reads
    assert not [read for read in reads if " body" in read or "body:llm" in read]


def test_pages_are_bounded_and_say_that_there_is_more(hand: ByHand) -> None:
    hand.submit(count=25)
    walked: list[str] = []
    cursor = ""
    while True:
        page = hand.section("waiting", subject="default", limit=10, cursor=cursor)
        walked += [row["request_id"] for row in page["rows"]]
        cursor = page["cursor"]
        assert page["truncated"] == (cursor != "")
        assert len(page["rows"]) <= 10
        # What is on the page says nothing about how much there is.
        assert hand.section("group")["pending"] == hand.pool("default")["pending"] == 25
        if not cursor:
            break
    assert walked == [f"r{number}" for number in range(1, 26)]
    for section in ("pools", "waiting", "leases", "endings"):
        with pytest.raises(BadArgument, match="limit"):
            hand.section(section, limit=201)


def test_pools_beyond_a_page_are_no_less_listed(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": f"p{number}"} for number in range(230)]
    group = wide_group(valkey.url, pools=pools)
    hand = ByHand(valkey.url, group)
    hand.submit("p229", 3)
    assert hand.section("pools", limit=100)["truncated"] is True
    rows = {
        row["pool_id"]: row["pending"] for row in Commands(valkey.url, group)("pools", "list", "--json").json["pools"]
    }
    assert len(rows) >= 230
    assert rows["p229"] == 3
    hand.close()


@pytest.fixture
def lost_pool(hand: ByHand) -> Iterator[ByHand]:
    """A group in which the record of a pool with waiting work was lost."""
    hand.submit("backfill", 4)
    hand.submit("default", 1)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "pool", pool="backfill"))
    return hand


def test_a_depth_that_cannot_be_read_is_unknown_and_not_zero(lost_pool: ByHand) -> None:
    hand = lost_pool
    rows = {row["pool_id"]: row["pending"] for row in hand.section("pools")["rows"]}
    assert "backfill" not in rows
    assert rows["default"] == 1
    assert hand.section("pools", subject="backfill")["rows"] == []
    assert hand.section("group")["pending"] == 5
    command = Commands(hand.url, hand.group)
    shown = command("pools", "show", "backfill")
    assert shown.code != 0
    assert "0" not in shown.out
    listed = command("pools", "list").out
    assert not [line for line in listed.splitlines() if "backfill" in line and " 0 " in line]
    assert "backfill" in command("doctor").out


def test_a_group_whose_record_was_lost_is_unknown_and_not_empty(hand: ByHand) -> None:
    hand.submit(count=2)
    names = sections(hand)
    with eye(hand.url) as client:
        client.delete(key(hand.group, "group"))
    for section in (*names, "waiting"):
        with pytest.raises(GroupUnknown):
            hand.section(section)
    listed = Commands(hand.url, hand.group)("pools", "list", "--json")
    assert (listed.code != 0, listed.out) == (True, "")


def test_what_an_unreachable_server_holds_is_unknown_and_not_zero(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    command = Commands(server.url, wide_group(server.url))
    assert command("pools", "list").code == 0
    server.kill()
    for words in (("pools", "list"), ("pools", "list", "--json"), ("dead", "list", "--json"), ("doctor", "--json")):
        done = command(*words)
        assert (done.code != 0, done.out) == (True, "")
        assert len(done.err.splitlines()) == 1


def test_facts_that_are_not_known_are_left_out_and_not_zero(hand: ByHand) -> None:
    hand.submit(count=1, message_count=None)
    hand.settle(hand.claim(1))  # neither status nor tokens were told
    [row] = hand.section("endings")["rows"]
    assert not {"status", "input_tokens", "output_tokens", "error_type"} & set(row)
    [request] = hand.section("request", subject="r1")["rows"]
    assert "message_count" not in request
    [pool] = [row for row in hand.section("pools")["rows"] if row["pool_id"] == "default"]
    assert not {"max_concurrent", "max_burst_per_visit"} & set(pool)
    assert_settled(hand.url, hand.group)

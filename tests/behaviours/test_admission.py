"""What is admitted once is admitted once, groups do not see each other, and full memory stops only what comes in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dispatch.contract import Reply
from dispatch.errors import (
    BadArgument,
    GroupUnknown,
    IdempotencyConflict,
    PoolUnknown,
    RequestInProgress,
    RequestRefused,
    StateConflict,
)
from dispatch.fabric import functions as f
from dispatch.fabric.records import Admitted, Exists, Heartbeat, Replayed, Submission
from dispatch.fabric.schema import key
from dispatch.fabric.sync import BlockingConnection
from tests.behaviours.scene import BOTH_CLIENTS, Caller, Watching, assert_settled, at_once, gateway_on, records
from tests.support.by_hand import ByHand
from tests.support.calls import COMPLETION
from tests.support.groups import configure, unique_group
from tests.support.producing import MESSAGES, eye, say, wide_group
from tests.support.stack import stack
from tests.support.stub import Pause, Script, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

BODY = b'{"model":"m"}'


def submission(**changes: Any) -> Submission:
    fields: dict[str, Any] = {
        "request_id": "r", "pool_id": "default", "producer_id": "p", "session": "s", "nonce": "n", "model": "m",
        "message_count": 1, "images": 0, "pages": 0, "estimated_cost_units": None, "timeout_ms": None,
        "envelope": b"{}", "body_bytes": len(BODY), "body": BODY,
    }  # fmt: skip
    return Submission(**fields | changes)


def test_of_8_identical_submits_at_once_one_is_admitted_and_7_are_told_that_it_exists(hand: ByHand) -> None:
    connections = [BlockingConnection(hand.url) for _ in range(8)]
    answers = at_once(
        [
            lambda one=one, at=at: one.run(hand.group, f.request_submit(submission(nonce=f"n{at}")))
            for at, one in enumerate(connections)
        ]
    )
    assert Counter(type(answer) for answer in answers) == {Admitted: 1, Exists: 7}
    assert {answer.state for answer in answers if isinstance(answer, Exists)} == {"queued"}
    assert hand.section("group")["pending"] == 1
    assert len(hand.claim(8)) == 1
    for one in connections:
        one.close()


def test_of_8_repeats_of_one_submit_each_is_told_that_it_is_admitted_and_one_is_queued(hand: ByHand) -> None:
    connections = [BlockingConnection(hand.url) for _ in range(8)]
    call = f.request_submit(submission())  # one nonce: the answers of the others were lost
    answers = at_once([lambda one=one: one.run(hand.group, call) for one in connections])
    assert {type(answer) for answer in answers} == {Admitted}
    assert len({answer.deadline_ms for answer in answers}) == 1
    assert hand.section("group")["pending"] == 1
    for one in connections:
        one.close()


def test_a_changed_body_under_an_id_in_use_conflicts_and_does_not_touch_the_first(hand: ByHand) -> None:
    hand.run(f.request_submit(submission()))
    large = b"y" * 5000
    with eye(hand.url) as client:
        client.set(key(hand.group, "request_body", id="r", nonce="other"), large, ex=60)
        changed = submission(nonce="other", body_bytes=len(large), body=b"", pool_id="backfill")
        assert isinstance(hand.run(f.request_submit(changed)), Exists)
        assert client.exists(key(hand.group, "request_body", id="r", nonce="other")) == 0
    [lease] = hand.claim(8)
    assert (lease.request_id, lease.pool_id, lease.body, lease.nonce) == ("r", "default", BODY, "n")


@pytest.mark.parametrize("state", ["queued", "leased", "ended"])
def test_of_8_submits_at_once_under_one_idempotency_key_at_most_one_is_made(hand: ByHand, state: str) -> None:
    keyed = {"idempotency": "hash", "fingerprint": "f1"}
    if state != "queued":
        hand.run(f.request_submit(submission(request_id="first", nonce="first", **keyed)))
        leases = hand.claim(1)
        if state == "ended":
            hand.settle(leases)
    connections = [BlockingConnection(hand.url) for _ in range(8)]
    answers = at_once(
        [
            lambda one=one, at=at: one.run(
                hand.group, f.request_submit(submission(request_id=f"r{at}", nonce=f"n{at}", **keyed))
            )
            for at, one in enumerate(connections)
        ]
    )
    expected = {"queued": {Admitted: 1, Exists: 7}, "leased": {Exists: 8}, "ended": {Replayed: 8}}[state]
    assert Counter(type(answer) for answer in answers) == expected
    assert {answer.same for answer in answers if isinstance(answer, Exists)} <= {True}
    changed = submission(request_id="other", nonce="other", idempotency="hash", fingerprint="f2")
    conflict = hand.run(f.request_submit(changed))
    assert isinstance(conflict, Exists)
    assert conflict.same is False
    assert hand.pool("default")["submitted"] == 1
    for one in connections:
        one.close()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", BOTH_CLIENTS)
async def test_of_8_identical_calls_one_is_made_7_are_told_and_a_changed_body_conflicts(
    valkey: ValkeyProcess, kind: str
) -> None:
    group, executor = wide_group(valkey.url), Watching()
    async with gateway_on(valkey.url, group, executor), Caller(kind, valkey.url, fabric_group=group) as caller:
        call = {"request_id": "r", "messages": MESSAGES}
        calls = [asyncio.create_task(caller.complete(**call)) for _ in range(8)]
        done: set[asyncio.Task[Reply]] = set()
        while len(done) < 7:
            done, _ = await asyncio.wait(calls, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert {type(task.exception()) for task in done} <= {RequestInProgress, StateConflict}
        with pytest.raises(IdempotencyConflict):
            await caller.complete(request_id="r", messages=say("something else"))
        executor.release()
        [first] = [task for task in calls if task not in done]
        reply = await first
        assert (await caller.complete(**call)).body == reply.body
        with pytest.raises(IdempotencyConflict):
            await caller.complete(request_id="r", messages=say("something else"))
    assert executor.begun.total() == 1
    assert_settled(valkey.url, group)


@pytest.mark.anyio
async def test_of_8_identical_http_calls_one_is_made_and_a_changed_body_conflicts(valkey: ValkeyProcess) -> None:
    body, chat = {"model": "m", "messages": MESSAGES}, "/v1/chat/completions"
    async with (
        StubBackend(Script((Pause(0.5), *json_answer(COMPLETION).steps))) as stub,
        stack(valkey.url, f"{stub.url}/v1") as path,
        httpx.AsyncClient(base_url=path.url, headers={"idempotency-key": "k-1"}, timeout=20) as http,
    ):
        answers = await asyncio.gather(*(http.post(chat, json=body) for _ in range(8)))
        assert Counter(answer.status_code for answer in answers) == {200: 1, 409: 7}
        again = await http.post(chat, json=body)
        assert (again.status_code, again.content) == (200, COMPLETION)
        assert (await http.post(chat, json=body | {"n": 2})).status_code == 422
        assert len(stub.requests) == path.submitted() == 1
        assert_settled(valkey.url, path.group)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"pool_id": "nowhere"}, PoolUnknown, "interactive"),
        ({"request_id": "a:b"}, BadArgument, "request_id"),
        ({"request_id": "{x}"}, BadArgument, "request_id"),
        ({"producer_id": ""}, BadArgument, "producer"),
        ({"fairness_key": "a b"}, BadArgument, "fairness_key"),
        ({"priority": 9}, BadArgument, "priority"),
        ({"envelope": b"x" * 70_000}, BadArgument, "envelope"),
        ({"timeout_ms": 0}, BadArgument, "timeout_ms"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_named_and_queues_nothing(
    hand: ByHand, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        hand.run(f.request_submit(submission(**changes)))
    assert hand.section("group")["pending"] == 0
    with eye(hand.url) as client:
        assert not client.keys(f"{{{hand.group}}}:*request*")


def test_what_is_wrong_with_one_of_a_batch_does_not_touch_the_others(hand: ByHand) -> None:
    calls = [
        f.request_submit(submission(request_id=f"r{at}", pool_id=pool, nonce=f"n{at}"))
        for at, pool in enumerate(["default", "nowhere", "default"])
    ]
    first, second, third = hand.run(f.submit_together(calls))
    assert isinstance(first, Admitted)
    assert isinstance(second, PoolUnknown)
    assert isinstance(third, Admitted)
    assert hand.section("group")["pending"] == 2


def test_groups_do_not_see_each_other(valkey: ValkeyProcess) -> None:
    groups = [unique_group() for _ in range(2)]
    hands = []
    for group in groups:
        configure(valkey.url, group)
        hands.append(ByHand(valkey.url, group))
    for hand in hands:  # everything has the same names in both
        hand.submit(count=2)
        hand.beat()
    one, two = hands
    [lease] = one.claim(1)
    assert two.section("group")["in_flight"] == 0
    assert two.section("gateways")["rows"][0]["in_flight"] == 0
    assert two.run(f.request_cancel("r1", actor="test")).status == "CANCELLED"
    with eye(valkey.url) as client:
        client.delete(key(two.group, "alive", producer="p"))
    two.run(f.pool_pause("default", "pause", actor="test"))
    one.settle([lease])
    assert [lease.request_id for lease in one.claim(4)] == ["r2"]
    assert {record["request_id"]: record["ending"] for record in records(valkey.url, one.group)} == {"r1": "succeeded"}
    assert {record["request_id"]: record["ending"] for record in records(valkey.url, two.group)} == {"r1": "cancelled"}
    with pytest.raises(GroupUnknown), BlockingConnection(valkey.url) as connection:
        connection.run(unique_group(), f.request_submit(submission()))
    for hand in hands:
        hand.close()


def test_an_older_session_cannot_submit_for_its_producer_any_more(hand: ByHand) -> None:
    hand.run(f.request_submit(submission(session="newer")))
    with pytest.raises(StateConflict, match="another session owns producer p"):
        hand.run(f.request_submit(submission(session="older", request_id="r2", nonce="n2")))
    assert hand.section("group")["pending"] == 1


def test_full_memory_refuses_admission_while_cleaning_up_works(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(options=("--maxmemory-policy", "noeviction"))
    group = unique_group()
    configure(server.url, group)
    hand = ByHand(server.url, group)
    hand.submit(count=12)
    held = hand.claim(4)
    with eye(server.url) as client:
        before = set(client.keys("*"))
        client.config_set("maxmemory", 1)
        with pytest.raises(RequestRefused) as refused:
            hand.submit(producer_id="new")
        assert (refused.value.reason, refused.value.retry_after_ms) == ("memory_full", None)
        assert set(client.keys("*")) == before
        beat = Heartbeat(
            gateway_id="g", host="h", pid=1, version="1", slots=8,
            held=tuple((lease.request_id, lease.fence) for lease in held),
        )  # fmt: skip
        assert hand.run(f.lease_renew(beat)).lost == ()
        hand.settle(held)
        hand.settle(hand.claim(4))
        assert hand.run(f.request_cancel("r12", actor="test")).status == "CANCELLED"
        hand.run(f.pool_pause("default", "pause", actor="test"))
        hand.run(f.lease_reap(limit=10))
        assert hand.run(f.reply_ack("p", "s", upto=10**9)).trimmed == 9
        assert hand.section("group")["pending"] == 3
        client.config_set("maxmemory", 0)
    hand.run(f.pool_pause("default", "resume", actor="test"))
    hand.submit(producer_id="new")
    hand.settle(hand.claim(8))
    assert_settled(server.url, group)
    hand.close()

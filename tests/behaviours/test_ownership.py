"""Who holds a lease writes, nobody else; and an answer that is lost is found out, never guessed or sent twice."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from typing import Any

import anyio
import pytest

from dispatch.errors import FabricUnavailable
from dispatch.fabric import functions as f
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connecting import connect
from dispatch.fabric.records import Chunks, Heartbeat, Lease, Outcome, Settlement
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from dispatch.sync import DispatchClient as BlockingClient
from tests.behaviours.scene import Watching, assert_settled, endings, gateway_on, records
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.lossy import LossyConnection
from tests.support.producing import eye, said, say, until, wide_group
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def stolen(valkey: ValkeyProcess) -> Any:
    """A request whose first lease ran out and was claimed anew by another gateway: (hand, old lease, new lease)."""
    group = unique_group()
    pools = [{"pool_id": "default", "delivery": "at_least_once", "max_attempts": 5}]
    configure(valkey.url, group, default_document() | {"pools": pools, "lease_ms": 900, "liveness_ms": 900})
    hand = ByHand(valkey.url, group)
    hand.submit(timeout_ms=60_000)
    [old] = hand.claim(1, "frozen")
    while not hand.run(f.lease_reap(limit=10)).requeued:
        hand.beat(gateway="other")
        time.sleep(0.02)
    [new] = hand.claim(1, "other")
    yield hand, old, new
    hand.close()


def settle(hand: ByHand, lease: Lease, gateway: str, outcome: Outcome = Outcome.SUCCEEDED) -> str:
    item = Settlement(request_id=lease.request_id, fence=lease.fence, outcome=outcome, body=b"{}", head=b"{}")
    call = f.lease_settle(gateway, f"{gateway}/1", nonce=uuid.uuid4().hex, want=0, items=[item])
    return str(hand.run(call).answers[0])


def test_an_old_fence_is_refused_on_every_write(stolen: tuple[ByHand, Lease, Lease]) -> None:
    hand, old, new = stolen
    assert new.fence > old.fence
    with eye(hand.url) as client:
        request = key(hand.group, "request", id=old.request_id)
        before = (client.hgetall(request), client.zrange(key(hand.group, "leases"), 0, -1, withscores=True))
        for outcome in Outcome:
            assert settle(hand, old, "frozen", outcome) == "LEASE_LOST"
            assert settle(hand, old, "other", outcome) == "LEASE_LOST"  # its holder's name does not help
            assert settle(hand, new, "frozen", outcome) == "LEASE_LOST"  # nor does the fence alone
        for lease, gateway in ((old, "frozen"), (old, "other"), (new, "frozen")):
            chunks = Chunks(request_id=lease.request_id, fence=lease.fence, number=0, count=1, payload=b"x")
            assert hand.run(f.reply_append(gateway, [chunks])) == ("LEASE_LOST",)
        held = ((old.request_id, old.fence),)
        beat = Heartbeat(gateway_id="frozen", host="h", pid=1, version="1", slots=8, held=held)
        assert hand.run(f.lease_renew(beat)).lost == (old.request_id,)
        after = (client.hgetall(request), client.zrange(key(hand.group, "leases"), 0, -1, withscores=True))
        assert after == before
        assert client.llen(key(hand.group, "replies", producer="p")) == 0
    assert settle(hand, new, "other") == "OK"
    [record] = records(hand.url, hand.group)
    assert (record["gateway"], record["attempt"]) == ("other", "2")
    assert_settled(hand.url, hand.group)


def test_a_lease_that_ran_out_writes_nothing_even_before_anybody_has_noticed(valkey: ValkeyProcess) -> None:
    group = unique_group()
    configure(valkey.url, group, default_document() | {"lease_ms": 900, "liveness_ms": 900})
    hand = ByHand(valkey.url, group)
    hand.submit()
    [lease] = hand.claim(1)
    while True:  # until it has run out, and no outage is digested
        hand.beat(gateway="other")
        now = hand.section("group")
        if now["server_ms"] > max(lease.lease_until_ms, now["grace_until_ms"]):
            break
        time.sleep(0.02)
    assert settle(hand, lease, "g") == "LEASE_LOST"
    while not hand.run(f.lease_reap(limit=10)).lost:
        time.sleep(0.02)
    assert endings(valkey.url, group) == {lease.request_id: "lost"}
    hand.close()


def answers_of(hand: ByHand, call: FunctionCall[Any]) -> tuple[Any, Any]:
    return hand.run(call), hand.run(call)


def test_every_function_that_is_called_again_answers_the_same_and_does_nothing_twice(hand: ByHand) -> None:
    hand.submit(count=4)
    claim = f.lease_claim("g", "g/1", nonce="claim", want=2)
    first, again = answers_of(hand, claim)
    assert [lease.fence for lease in first.leases] == [lease.fence for lease in again.leases] == [1, 2]
    items = [
        Settlement(request_id=lease.request_id, fence=lease.fence, outcome=Outcome.SUCCEEDED) for lease in first.leases
    ]
    settled, again = answers_of(hand, f.lease_settle("g", "g/1", nonce="settle", want=1, items=items))
    assert settled.answers == again.answers == ("OK", "OK")
    assert [lease.fence for lease in settled.claim.leases] == [lease.fence for lease in again.claim.leases] == [3]
    assert [a.status for a in answers_of(hand, f.request_cancel("r4", actor="t"))] == ["CANCELLED", "ENDED"]
    assert [a.status for a in answers_of(hand, f.request_cancel("r3", actor="t"))] == ["CANCELLING", "CANCELLING"]
    acknowledged = answers_of(hand, f.reply_ack("p", "s", upto=2))
    assert [(a.owner, a.remaining) for a in acknowledged] == [(True, 1), (True, 1)]
    assert [a.changed for a in answers_of(hand, f.pool_pause("default", "pause", actor="t"))] == [True, False]
    document = b'{"pools":[{"pool_id":"default"}],"endpoints":[{"endpoint_id":"d","url":"http://x/v1"}]}'
    change = f.group_configure(document, expected_generation=1, actor="t", reason="", nonce="config")
    hand.run(f.pool_pause("default", "resume", actor="t"))
    one, two = answers_of(hand, change)
    assert (one.status, one.generation, two.generation) == ("APPLIED", 2, 2)
    assert two.status in ("APPLIED", "UNCHANGED")
    assert [a.more for a in answers_of(hand, f.lease_reap(limit=10))] == [False, False]
    assert [a.status for a in answers_of(hand, f.dead_change("drop", "r1", actor="t"))] == ["UNKNOWN", "UNKNOWN"]
    assert len(records(hand.url, hand.group)) == 3


def test_chunks_and_dead_requests_are_sent_and_made_anew_once_however_often_it_is_said(valkey: ValkeyProcess) -> None:
    group = unique_group()
    pools = [{"pool_id": "default", "delivery": "at_least_once", "max_attempts": 1}]
    configure(valkey.url, group, default_document() | {"pools": pools, "lease_ms": 900, "liveness_ms": 900})
    hand = ByHand(valkey.url, group)
    hand.submit(count=2, timeout_ms=60_000)
    stream, lease = hand.claim(2, "dying")
    chunks = Chunks(request_id=stream.request_id, fence=stream.fence, number=0, count=2, payload=b"data")
    assert answers_of(hand, f.reply_append("dying", [chunks])) == (("OK",), ("OK",))
    with eye(hand.url) as client:
        assert client.llen(key(group, "replies", producer="p")) == 1
    while not hand.section("dead")["rows"]:
        hand.beat(gateway="other")
        hand.run(f.lease_reap(limit=10))
        time.sleep(0.02)
    made = answers_of(hand, f.dead_change("retry", lease.request_id, actor="t", new_id="again"))
    assert made[0].status == "RETRIED"
    assert endings(valkey.url, group) == {stream.request_id: "lost", lease.request_id: "dead"}
    assert hand.pool("default")["submitted"] == 3
    assert [one.request_id for one in hand.claim(4, "other")] == ["again"]
    hand.close()


class LosingAnswers(LossyConnection):
    """Loses answers also of what is read along with a call, and of calls made together."""

    async def run_then_read(self, group: str, call: FunctionCall[Any], read: str, count: int) -> Any:
        answer = await self._inner.run_then_read(group, call, read, count)
        self._maybe_lose(call.function)
        return answer

    async def run_many(self, group: str, calls: Any) -> Any:
        answer = await self._inner.run_many(group, calls)
        for call in calls:
            self._maybe_lose(call.function)
        return answer

    def _maybe_lose(self, function: str) -> None:
        if self.on and function in self._loses and self._chance.random() < self._part:
            self.lost[function] += 1
            raise FabricUnavailable("the answer was lost")


EVERYTHING = frozenset(
    {"request_submit", "request_cancel", "reply_ack", "lease_claim", "lease_settle", "lease_renew", "lease_reap"}
)


@pytest.mark.anyio
async def test_lost_answers_of_every_function_are_found_out_without_sending_anything_twice(
    valkey: ValkeyProcess,
) -> None:
    group, executor = wide_group(valkey.url, lease_ms=1500), Watching(held=False, takes_s=0.005)
    theirs = LosingAnswers(await connect(valkey.url, client="redis"), loses=EVERYTHING, seed=1, part=0.25)
    ours = LosingAnswers(await connect(valkey.url), loses=EVERYTHING, seed=2, part=0.25)
    replies: dict[str, str] = {}
    async with (
        DispatchClient(valkey.url, fabric_group=group, connection=ours) as client,
        gateway_on(valkey.url, group, executor, connection=theirs),
    ):

        async def one(number: int) -> None:
            name = f"r-{number}"
            if number % 5 == 0:  # these leave at some moment
                with anyio.move_on_after(number % 50 / 700):
                    await client.complete(model="m", messages=say(name), request_id=name, timeout=30)
                return
            reply = await client.complete(model="m", messages=say(name), request_id=name, timeout=30)
            replies[name] = reply.request_id

        theirs.on = ours.on = True
        sent = 0
        with anyio.fail_after(40):
            while sent < 150 or EVERYTHING - set(theirs.lost + ours.lost):
                async with anyio.create_task_group() as tasks:
                    for number in range(sent, sent + 50):
                        tasks.start_soon(one, number)
                sent += 50
        theirs.on = ours.on = False
    assert replies == {f"r-{number}": f"r-{number}" for number in range(sent) if number % 5}
    assert max(executor.begun.values()) == 1
    assert {said(body) for body in executor.bodies.values()} == set(executor.bodies)
    ended = endings(valkey.url, group)
    assert {ended[name] for name in replies} == {"succeeded"}
    assert set(ended.values()) <= {"succeeded", "cancelled"}
    assert_settled(valkey.url, group)
    await theirs.aclose()
    await ours.aclose()


@pytest.mark.anyio
async def test_answers_that_a_cut_connection_swallows_are_found_out_by_the_blocking_client(
    valkey: ValkeyProcess,
) -> None:
    group, executor = wide_group(valkey.url), Watching(held=False, takes_s=0.002)
    found: list[str] = []
    opened = threading.Event()

    def work(url: str) -> None:
        with BlockingClient(url, fabric_group=group) as client:
            opened.set()
            for number in range(60):
                reply = client.complete(model="m", messages=say(str(number)), request_id=f"r-{number}", timeout=30)
                found.append(reply.request_id)

    async with TcpProxy(valkey.port) as proxy, gateway_on(valkey.url, group, executor):
        working = asyncio.create_task(anyio.to_thread.run_sync(work, f"valkey://127.0.0.1:{proxy.port}"))
        await until(opened.is_set)
        while not working.done():
            proxy.cut()
            await asyncio.wait({working}, timeout=0.05)
        await working
    assert found == [f"r-{number}" for number in range(60)]
    assert (executor.begun.total(), max(executor.begun.values())) == (60, 1)
    assert_settled(valkey.url, group)

"""What is told on the group's channel: each change once, however many gateways there are, and no mere age."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from dispatch.errors import BadArgument, GroupUnknown
from dispatch.fabric import functions as f
from dispatch.fabric.records import Outcome, Publication
from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import unique_group
from tests.support.producing import eye, until, wide_group
from tests.support.valkey import ValkeyProcess


class Channel:
    """An independent ear on a group's channel."""

    def __init__(self, url: str, group: str) -> None:
        self._client = eye(url)
        self._heard = self._client.pubsub()
        self._heard.subscribe(key(group, "snapshot_channel"))
        confirmed = self._heard.get_message(timeout=5)
        assert confirmed is not None
        assert confirmed["type"] == "subscribe"

    def next(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the next message, None when none came for `seconds`."""
        ends_at = time.monotonic() + seconds
        while True:
            message = self._heard.get_message(timeout=max(0.05, ends_at - time.monotonic()))
            if message is not None:
                found: dict[str, Any] = json.loads(message["data"])
                return found
            if time.monotonic() >= ends_at:
                return None

    def drain(self) -> list[dict[str, Any]]:
        """Return what has come."""
        return list(iter(self.next, None))

    def close(self) -> None:
        self._heard.close()
        self._client.close()


@pytest.fixture
def hand(valkey: ValkeyProcess) -> Iterator[ByHand]:
    made = ByHand(valkey.url, wide_group(valkey.url, lease_ms=600_000))
    yield made
    made.connection.close()


@pytest.fixture
def channel(hand: ByHand) -> Iterator[Channel]:
    made = Channel(hand.url, hand.group)
    yield made
    made.close()


def publish(hand: ByHand, gateway: str = "g") -> Publication:
    answer: Publication = hand.run(f.snapshot_publish(gateway))
    return answer


def pause(hand: ByHand) -> None:
    hand.run(f.pool_pause("backfill", "pause", actor="t"))


def claim(hand: ByHand) -> None:
    assert hand.claim(1)


def settle(hand: ByHand) -> None:
    hand.settle(hand.claim(1))


def beat(hand: ByHand) -> None:
    hand.beat(gateway="another")


def refuse(hand: ByHand) -> None:
    hand.run(f.pool_pause("backfill", "drain", actor="t"))
    publish(hand)
    assert hand.refusal("backfill") == "pool_draining"


CHANGES: dict[str, tuple[Callable[[ByHand], Any], set[str]]] = {
    "submit": (lambda hand: hand.submit(), {"requests"}),
    "claim": (claim, {"requests", "pools"}),
    "end": (settle, {"requests", "endings"}),
    "refusal": (refuse, {"endings"}),
    "pause": (pause, {"events"}),
    "gateway": (beat, {"gateways"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_once_with_its_kind(hand: ByHand, channel: Channel, name: str) -> None:
    change, kinds = CHANGES[name]
    hand.submit()
    first = publish(hand)
    assert (first.status, publish(hand).status) == ("PUBLISHED", "UNCHANGED")
    channel.drain()
    change(hand)
    assert publish(hand).status == "PUBLISHED"
    message = channel.drain()[-1]
    assert kinds <= set(message["changed"]), message
    assert publish(hand).status == "UNCHANGED"
    assert channel.drain() == []


def test_a_message_has_the_totals(hand: ByHand, channel: Channel) -> None:
    hand.submit(count=3)
    hand.claim(1)
    hand.beat()
    answer = publish(hand)
    [message] = channel.drain()
    group = hand.section("group")
    assert {name: message[name] for name in ("pending", "in_flight", "delayed", "dead", "generation", "pools")} == {
        name: group[name] for name in ("pending", "in_flight", "delayed", "dead", "generation", "pools")
    }
    assert (message["sequence"], message["gateways"]) == (answer.sequence, 1)
    assert 0 <= group["server_ms"] - message["server_ms"] < 60_000
    assert (message["newest_ending_id"], message["newest_event_id"] != "") == ("", True)


def test_renewed_leases_and_passing_time_are_no_change(hand: ByHand, channel: Channel) -> None:
    hand.submit(count=2)
    leases = hand.claim(1)
    hand.beat(leases)
    publish(hand)
    channel.drain()
    for _ in range(20):
        hand.beat(leases)
        assert publish(hand).status == "UNCHANGED"
    assert channel.drain() == []


def test_an_unchanged_state_is_told_again_after_five_seconds(hand: ByHand, channel: Channel) -> None:
    first = publish(hand)
    with eye(hand.url) as client:
        told = client.hget(key(hand.group, "published"), "at_ms")
        assert told is not None
        client.hset(key(hand.group, "published"), "at_ms", int(told) - 5_001)
    again = publish(hand)
    assert (again.status, again.sequence) == ("PUBLISHED", first.sequence + 1)
    assert channel.drain()[-1]["changed"] == []


def test_one_gateway_publishes_and_another_takes_over_when_it_is_gone(hand: ByHand) -> None:
    assert publish(hand, "a").status == "PUBLISHED"
    waiting = publish(hand, "b")
    assert waiting.status == "WAIT"
    assert 0 < waiting.again_ms <= 1_000
    with eye(hand.url) as client:
        client.delete(key(hand.group, "publisher"))  # what a second does
    assert publish(hand, "b").status == "UNCHANGED"
    assert publish(hand, "a").status == "WAIT"


def test_what_is_wrong_is_said(hand: ByHand) -> None:
    with pytest.raises(BadArgument, match="gateway"):
        publish(hand, "no name")
    with pytest.raises(GroupUnknown):
        hand.connection.run(unique_group(), f.snapshot_publish("g"))


def test_a_dead_request_and_its_ending_are_told(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default", "delivery": "at_least_once", "max_attempts": 1}]
    hand = ByHand(valkey.url, wide_group(valkey.url, pools=pools))
    channel = Channel(hand.url, hand.group)
    hand.submit()
    leases = hand.claim(1)
    publish(hand)
    hand.settle(leases, outcome=Outcome.LOST)
    publish(hand)
    assert channel.drain()[-1]["dead"] == 1
    channel.close()
    hand.connection.close()


@pytest.mark.anyio
@pytest.mark.timeout(240)
async def test_three_gateways_tell_each_change_once_and_in_time_and_replace_one_that_dies(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    hand, channel = ByHand(server.url, group), Channel(server.url, group)
    names = ("gw-a", "gw-b", "gw-c")
    fleet = {name: GatewayProcess(server.url, group, gateway_id=name).launch() for name in names}
    try:
        for gateway in fleet.values():
            await until(lambda started=gateway: started.event("listening") is not None, within_s=100)
        while (await heard(channel))["gateways"] < 3:
            pass
        await quiet(channel)
        delays, sequences = [], []
        for number in range(8):
            changed_at = time.monotonic()
            pause_or_resume(hand, number)
            message = await heard(channel)
            while message["changed"] == []:  # the repetition came between
                message = await heard(channel)
            delays.append(time.monotonic() - changed_at)
            sequences.append(message["sequence"])
            assert message["changed"] == ["events"]
        assert sequences == sorted(set(sequences)), "each change stands for one message"
        assert statistics.median(delays) < 2.5, delays  # usually 0.1 s, at most 0.25
        publisher = holder(server, group)
        fleet[publisher].signal(signal.SIGKILL)
        died_at = time.monotonic()
        pause_or_resume(hand, 8)
        while "events" not in (await heard(channel))["changed"]:
            pass
        assert time.monotonic() - died_at < 15  # usually a second
        assert holder(server, group) in set(names) - {publisher}
    finally:
        for gateway in fleet.values():
            gateway.close()
        channel.close()
        hand.connection.close()


def pause_or_resume(hand: ByHand, number: int) -> None:
    hand.run(f.pool_pause("backfill", "resume" if number % 2 else "pause", actor="t"))


def holder(server: ValkeyProcess, group: str) -> str:
    with eye(server.url) as client:
        found = client.get(key(group, "publisher"))
        assert found is not None, "nobody publishes"
        return found.decode()


async def heard(channel: Channel) -> dict[str, Any]:
    message = await anyio.to_thread.run_sync(channel.next, 20.0)
    assert message is not None, "nothing is told, not even that nothing has changed"
    return message


async def quiet(channel: Channel) -> None:
    """Wait until nothing changes: what is told is a repetition."""
    while (await heard(channel))["changed"]:
        pass

"""Stream chunks on their way to the producer: in order, once, only under the lease, and bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from dispatch.fabric import functions as f
from dispatch.fabric.records import Chunks, Lease, Outcome, Settlement
from dispatch.fabric.schema import key
from dispatch.fabric.sync import BlockingConnection
from tests.support.fleet import Fleet
from tests.support.valkey import ValkeyProcess


class Stream:
    """One leased request whose chunks are sent."""

    def __init__(self, url: str, delivery: str = "at_most_once", **group: int) -> None:
        self.fleet = Fleet(url, {"chat": {"delivery": delivery, "max_attempts": 3}}, lease_ms=600, **group)
        [self.request_id] = self.fleet.submit("chat", [1])
        [self.lease] = self.fleet.claim(1)
        self.connection: BlockingConnection = self.fleet.connection
        self.client = redis.Redis.from_url(url.replace("valkey://", "redis://"))

    def append(self, number: int, *payloads: bytes, lease: Lease | None = None) -> str:
        item = Chunks(
            request_id=self.request_id, fence=(lease or self.lease).fence, number=number, count=len(payloads),
            payload=b"\n".join(payloads),
        )  # fmt: skip
        return self.connection.run(self.fleet.group, f.reply_append("g", [item]))[0]

    def frames(self) -> list[bytes]:
        found = self.client.lrange(key(self.fleet.group, "replies", producer=self.lease.producer_id), 0, -1)
        return [frame.split(b"|", 2)[2] for frame in found]

    def backlog(self) -> int | None:
        found = self.client.get(key(self.fleet.group, "reply_bytes", producer=self.lease.producer_id))
        return None if found is None else int(found)

    def settle(self, outcome: Outcome, **more: str) -> str:
        item = Settlement(request_id=self.request_id, fence=self.lease.fence, outcome=outcome, **more)
        call = f.lease_settle("g", "g/d", nonce=f"s{self.lease.fence}", want=0, items=[item])
        return self.connection.run(self.fleet.group, call).answers[0]

    def request(self) -> dict[str, object]:
        found = self.connection.run(self.fleet.group, f.fabric_snapshot("request", subject=self.request_id))
        return found["rows"][0]


@pytest.fixture
def stream(valkey: ValkeyProcess) -> Iterator[Stream]:
    made = Stream(valkey.url)
    yield made
    made.connection.close()


def test_chunks_arrive_in_order_and_a_repeated_call_sends_none_again(stream: Stream) -> None:
    assert [stream.append(0, b"a", b"b"), stream.append(2, b"c")] == ["OK", "OK"]
    assert [stream.append(0, b"a", b"b"), stream.append(2, b"c")] == ["OK", "OK"]
    assert stream.frames() == [
        f"chunks|{stream.request_id}|0\na\nb".encode(), f"chunks|{stream.request_id}|2\nc".encode()
    ]  # fmt: skip


def test_a_gap_is_told_and_nothing_is_sent(stream: Stream) -> None:
    assert stream.append(1, b"b") == "GAP"
    assert stream.frames() == []


def test_a_stale_fence_and_another_gateway_send_nothing(stream: Stream) -> None:
    item = Chunks(request_id=stream.request_id, fence=stream.lease.fence + 1, number=0, count=1, payload=b"x")
    other = Chunks(request_id=stream.request_id, fence=stream.lease.fence, number=0, count=1, payload=b"x")
    run = stream.connection.run
    assert run(stream.fleet.group, f.reply_append("g", [item])) == ("LEASE_LOST",)
    assert run(stream.fleet.group, f.reply_append("g2", [other])) == ("LEASE_LOST",)
    assert stream.frames() == []


def test_a_cancelled_stream_and_one_whose_producer_left_are_told(stream: Stream) -> None:
    stream.connection.run(stream.fleet.group, f.request_cancel(stream.request_id, actor="test"))
    assert stream.append(0, b"a") == "CANCELLED"


def test_a_producer_that_is_gone_is_told(stream: Stream) -> None:
    stream.client.delete(key(stream.fleet.group, "alive", producer=stream.lease.producer_id))
    assert stream.append(0, b"a") == "PRODUCER_GONE"


def test_a_producer_that_was_taken_for_gone_and_is_back_hears_of_the_end(stream: Stream) -> None:
    """Between the word to the gateway and its settle: a look at the request there finds it running, and waits on."""
    marker = key(stream.fleet.group, "alive", producer=stream.lease.producer_id)
    stream.client.rename(marker, f"{marker}:away")
    assert stream.append(0, b"a") == "PRODUCER_GONE"
    stream.client.rename(f"{marker}:away", marker)
    assert stream.settle(Outcome.PRODUCER_GONE, error_type="producer_gone") == "OK"
    [frame] = stream.frames()
    assert frame.startswith(f"terminal|{stream.request_id}|producer_gone|".encode())


def test_a_producer_that_takes_nothing_is_slow_until_it_has_taken_something(valkey: ValkeyProcess) -> None:
    stream = Stream(valkey.url, max_stream_backlog_bytes=2000)
    assert stream.append(0, b"a" * 1900) == "OK"
    assert stream.append(1, b"b" * 200) == "SLOW_CONSUMER"
    assert stream.append(1, b"b" * 2) == "OK"
    session = stream.client.get(key(stream.fleet.group, "alive", producer=stream.lease.producer_id))
    ack = f.reply_ack(stream.lease.producer_id, session.decode(), upto=1)
    assert stream.connection.run(stream.fleet.group, ack).trimmed == 1
    assert stream.append(2, b"b" * 200) == "OK"
    left = stream.backlog()
    assert left is not None
    assert 200 < left < 400
    stream.connection.run(stream.fleet.group, f.reply_ack(stream.lease.producer_id, session.decode(), upto=99))
    assert stream.backlog() is None
    stream.connection.close()


def test_a_stream_has_a_greatest_length(valkey: ValkeyProcess) -> None:
    stream = Stream(valkey.url, max_stream_bytes=1024)
    assert stream.append(0, b"a" * 1000) == "OK"
    assert stream.append(1, b"b" * 25) == "SLOW_CONSUMER"
    stream.connection.close()


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.FAILED])
def test_what_a_caller_has_seen_a_part_of_is_never_run_again(valkey: ValkeyProcess, outcome: Outcome) -> None:
    stream = Stream(valkey.url, "at_least_once")
    assert stream.append(0, b"a") == "OK"
    assert stream.settle(outcome, error_type="endpoint_disconnected") == "OK"
    found = stream.request()
    assert (found["state"], found["ending"]) == ("ended", outcome.value)
    stream.connection.close()


def test_a_stream_that_has_begun_is_not_given_back(valkey: ValkeyProcess) -> None:
    stream = Stream(valkey.url, "at_least_once")
    assert stream.append(0, b"a") == "OK"
    assert stream.settle(Outcome.RELEASE) == "OK"
    assert stream.request()["ending"] == "lost"
    stream.connection.close()

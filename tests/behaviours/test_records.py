"""What the streams of records say, and how far their readers are."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import redis

from dispatch.contract import Operation, RequestEnvelope
from dispatch.fabric import functions as f
from dispatch.fabric.frames import read_delivered
from dispatch.fabric.records import Outcome, Settlement
from dispatch.fabric.schema import LIMITS, key
from dispatch.fabric.streams import HISTORY
from dispatch.telemetry.spans import EndingRecord
from dispatch.telemetry.stream_records import read_ending
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ended(hand: ByHand) -> list[EndingRecord]:
    with eye(hand.url) as client:
        return [read_ending(name.decode(), fields) for name, fields in client.xrange(key(hand.group, "endings"))]


def envelope(**fields: Any) -> bytes:
    known: dict[str, Any] = {
        "contract": 1, "request_id": "r", "producer_id": "p", "pool_id": "default", "model": "m",
        "operation": Operation.CHAT_COMPLETIONS,
    }  # fmt: skip
    return msgspec.json.encode(RequestEnvelope(**known | fields))


@pytest.fixture
def small(valkey: ValkeyProcess) -> ByHand:
    """A group whose pool takes one request."""
    group = unique_group()
    pools = [{"pool_id": "default", "max_queue_depth": 1, "max_attempts": 3, "retry_base_ms": 1, "retry_cap_ms": 1}]
    configure(valkey.url, group, default_document() | {"pools": pools})
    return ByHand(valkey.url, group)


def settle(hand: ByHand, **fields: Any) -> tuple[str, ...]:
    [lease] = hand.claim(1)
    item = Settlement(request_id=lease.request_id, fence=lease.fence, **fields)
    call = f.lease_settle("g", "g/1", nonce=f"s{lease.fence}", want=0, items=[item])
    words: tuple[str, ...] = hand.run(call).answers
    return words


def test_a_record_says_who_ran_it_what_it_said_of_each_attempt_and_why_it_waited(small: ByHand) -> None:
    small.submit(size=7, envelope=envelope(traceparent=TRACEPARENT))
    small.run(f.pool_pause("default", "pause", actor="a"))
    assert small.claim(1) == []
    small.run(f.pool_pause("default", "resume", actor="a"))
    first = settle(
        small, outcome=Outcome.FAILED, status=503, error_type="endpoint_overloaded", retryable=True,
        details=b'{"backend_address":"http://one/v1"}',
    )  # fmt: skip
    assert first == ("RETRY",)
    time.sleep(0.01)
    sentence = "the endpoint said " + "no " * 400
    settle(
        small, outcome=Outcome.FAILED, status=400, error_type="endpoint_rejected", error_message=sentence,
        details=b'{"backend_address":"http://two/v1","response_id":"c"}',
    )  # fmt: skip
    [record] = ended(small)
    assert (record.gateway_id, record.dispatcher_id, record.endpoint_id) == ("g", "g/1", "default")
    assert (record.attempt, record.body_bytes, record.skip_reason) == (2, 7, "paused")
    assert record.error_message == sentence[:500]
    assert (record.details.backend_address, record.details.response_id) == ("http://two/v1", "c")
    assert [one.error_type for one in record.tries] == ["endpoint_overloaded"]
    assert [one.backend_address for one in record.tried] == ["http://one/v1"]
    assert record.envelope is not None
    assert record.envelope.traceparent == TRACEPARENT


def test_a_request_that_ends_in_the_queue_says_why_it_waited(small: ByHand) -> None:
    [name] = small.submit()
    small.run(f.pool_pause("default", "pause", actor="a"))
    assert small.claim(1) == []
    small.run(f.request_cancel(name, actor="operator", reason="not wanted"))
    [record] = ended(small)
    assert (record.ending, record.skip_reason, record.claimed_ms) == ("cancelled", "paused", None)
    assert record.error_message == "cancelled by operator: not wanted"


def test_a_refused_submit_leaves_a_record(small: ByHand) -> None:
    small.submit()
    assert small.refusal("default") == "pool_full"
    [record] = ended(small)
    assert (record.ending, record.error_type, record.pool_id) == ("rejected", "pool_full", "default")
    assert (record.request_id, record.producer_id, record.body_bytes) == ("r2", "p", 2)
    assert record.submitted_ms == record.ended_ms > 0
    assert record.error_message == "the pool holds max_queue_depth requests"
    assert small.pool("default")["rejected"] == {"pool_full": 1}


def test_a_flood_of_refusals_leaves_a_bounded_number_of_records_that_say_how_many_there_were(small: ByHand) -> None:
    small.submit()
    count = 8 * LIMITS["rejected_per_second"]
    started = time.time()
    for _ in range(count):
        assert small.refusal("default") == "pool_full"
    seconds = int(time.time()) - int(started) + 1
    time.sleep(1.01)  # a second of the server's clock has to be over
    small.run(f.lease_reap(limit=1))
    found = ended(small)
    named, counted = [one for one in found if not one.left_out], [one for one in found if one.left_out]
    assert len(named) <= seconds * LIMITS["rejected_per_second"]
    assert len(named) + sum(one.left_out for one in counted) == count
    assert {(one.pool_id, one.error_type, one.request_id) for one in counted} == {("default", "pool_full", "")}
    small.run(f.lease_reap(limit=1))
    assert len(ended(small)) == len(found)


def test_an_acknowledgement_records_what_was_handed_over(hand: ByHand) -> None:
    names = hand.submit(count=2, envelope=envelope(traceparent=TRACEPARENT))
    names += hand.submit(envelope=envelope(metadata={"x": f'"traceparent":"{TRACEPARENT}"'}))
    hand.settle(hand.claim(2))
    hand.run(f.request_cancel(names[2], actor="a"))
    answer = hand.run(f.reply_ack("p", "s", upto=10_000))
    assert answer.trimmed == 3
    with eye(hand.url) as client:
        [(_, fields)] = client.xrange(key(hand.group, "deliveries"))
    assert fields[b"producer"] == b"p"
    delivered = [one for line in fields[b"frames"].split(b"\n") if (one := read_delivered(line))]
    assert [one.request_id for one in delivered] == names
    assert [one.traceparent for one in delivered] == [TRACEPARENT, TRACEPARENT, ""]
    by_name = {record.request_id: record for record in ended(hand)}
    for one in delivered:
        record = by_name[one.request_id]
        assert (one.submitted_ms, one.ended_ms) == (record.submitted_ms, record.ended_ms)
        assert int(fields[b"at_ms"]) >= one.ended_ms
    hand.run(f.reply_ack("p", "s", upto=10_000))
    with eye(hand.url) as client:
        assert client.xlen(key(hand.group, "deliveries")) == 1


def test_many_replies_that_are_handed_over_at_once_are_some_records(hand: ByHand) -> None:
    names = hand.submit(count=40)
    for _ in range(5):
        hand.settle(hand.claim(8))
    hand.run(f.reply_ack("p", "s", upto=10_000))
    with eye(hand.url) as client:
        found = [fields[b"frames"].split(b"\n") for _, fields in client.xrange(key(hand.group, "deliveries"))]
    assert [len(lines) for lines in found] == [16, 16, 8]
    assert [read_delivered(line).request_id for lines in found for line in lines] == names


@pytest.mark.parametrize("line", [b"", b"1|2|terminal|r|succeeded|p|1|2|3|0|", b"1|2|terminal|r|s|p|1|x|3|0||5|", b"x"])
def test_a_header_line_that_cannot_be_read_is_no_delivery(line: bytes) -> None:
    assert read_delivered(line) is None


def test_only_looking_at_the_streams_makes_no_reader(hand: ByHand) -> None:
    state = hand.run(f.records_watch(HISTORY))
    assert (state.endings.length, state.endings.lag, state.endings.pending) == (0, None, None)
    hand.submit()
    hand.settle(hand.claim(1))
    state = hand.run(f.records_watch(HISTORY))
    assert (state.endings.length, state.endings.added, state.endings.lag) == (1, 1, None)
    assert state.endings.first_id == state.endings.last_id != ""


def test_a_reader_begins_with_what_is_there_and_its_lag_is_told(hand: ByHand) -> None:
    hand.submit(count=3)
    hand.settle(hand.claim(3))
    assert hand.run(f.records_watch(HISTORY, prepare=True)).endings.lag == 3
    with eye(hand.url) as client:
        read(client, hand, 2)
    state = hand.run(f.records_watch(HISTORY, prepare=True)).endings
    assert (state.lag, state.pending, state.lost_now) == (1, 2, 0)


def test_what_is_trimmed_before_it_is_read_is_counted_once(hand: ByHand) -> None:
    hand.run(f.records_watch(HISTORY, prepare=True))
    endings = key(hand.group, "endings")
    with eye(hand.url) as client:
        for lost in (5, 12):
            hand.submit(count=8)
            hand.settle(hand.claim(8))
            client.xtrim(endings, maxlen=3 if lost == 5 else 1, approximate=False)
            state = hand.run(f.records_watch(HISTORY, prepare=True))
            assert state.lost == lost
            assert hand.run(f.records_watch(HISTORY, prepare=True)).endings.lost_now == 0
            assert len(read(client, hand, 100)) == state.endings.length == state.endings.lag
        state = hand.run(f.records_watch(HISTORY, prepare=True))
        assert (state.lost, state.endings.lag, state.endings.added) == (12, 0, 16)


def test_what_was_trimmed_before_there_was_a_reader_is_not_lost(hand: ByHand) -> None:
    hand.submit(count=4)
    hand.settle(hand.claim(4))
    with eye(hand.url) as client:
        client.xtrim(key(hand.group, "endings"), maxlen=1, approximate=False)
    state = hand.run(f.records_watch(HISTORY, prepare=True))
    assert (state.lost, state.endings.lag) == (0, 1)


def read(client: redis.Redis, hand: ByHand, count: int) -> list[Any]:
    answer = client.xreadgroup(HISTORY, "me", {key(hand.group, "endings"): ">"}, count=count)
    return list(answer[0][1]) if answer else []

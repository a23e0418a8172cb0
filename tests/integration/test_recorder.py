"""The recorder: records of endings and deliveries reach the sink at least once, whatever dies or goes away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from structlog.testing import capture_logs

from dispatch.fabric import functions as f
from dispatch.fabric.connecting import connect
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import LIMITS, key
from dispatch.telemetry.recorder import Recorder, RecorderOptions, RecorderStats
from dispatch.telemetry.sinks import SinkAway, ThreadSink
from tests.support.by_hand import ByHand
from tests.support.producing import eye, until
from tests.support.tracing import RESOURCE, Kept
from tests.support.tracing import recording as recording_on

pytestmark = pytest.mark.anyio


def options(hand: ByHand, **changes: Any) -> RecorderOptions:
    known: dict[str, Any] = {
        "group": hand.group, "consumer": "g", "resource": RESOURCE, "pause_s": 0.01, "retry_s": 0.02,
    }  # fmt: skip
    return RecorderOptions(**known | changes)


def recording(hand: ByHand, sink: Any, **changes: Any) -> AbstractAsyncContextManager[Recorder]:
    return recording_on(hand.url, hand.group, sink, **changes)


def pending(hand: ByHand) -> int | None:
    found: int | None = hand.run(f.records_watch("history")).endings.pending
    return found


def seen(recorder: Recorder, condition: Callable[[RecorderStats], bool]) -> Callable[[], bool]:
    return lambda: condition(recorder.stats())


def end(hand: ByHand, count: int = 1) -> list[str]:
    ids = hand.submit(count=count)
    hand.settle(hand.claim(count))
    return ids


@pytest.fixture
def hand(valkey, group) -> ByHand:
    return ByHand(valkey.url, group)


async def test_each_record_becomes_spans_once_and_is_acknowledged(hand: ByHand) -> None:
    sink = Kept()
    before = end(hand, 2)
    async with recording(hand, sink) as recorder:
        after = end(hand, 3)
        hand.run(f.reply_ack("p", "s", upto=1000))
        await until(lambda: len(sink.spans) == 15)
        await until(lambda: pending(hand) == 0)
        await until(seen(recorder, lambda now: (now.lag, now.pending) == (0, 0)))
        stats = recorder.stats()
    assert sink.requests() == Counter(before + after)
    kinds = Counter(span.name.partition(" ")[0] for span in sink.spans)
    assert kinds == {"process": 5, "chat": 5, "deliver": 5}
    assert (stats.records, stats.taken, stats.lost, stats.away, stats.length) == (6, 15, 0, False, 5)
    assert {span.resource for span in sink.spans} == {RESOURCE}


async def test_what_a_sink_has_not_taken_is_not_acknowledged(hand: ByHand) -> None:
    sink = Kept()
    sink.open = anyio.Event()
    async with recording(hand, sink):
        end(hand, 3)
        await until(lambda: sink.offered == 1)
        assert pending(hand) == 3
        end(hand, 4)  # nothing more is read meanwhile: one batch is all that is held
        assert pending(hand) == 3
        sink.open.set()
        await until(lambda: pending(hand) == 0 and len(sink.requests()) == 7)


async def test_a_batch_is_bounded(hand: ByHand) -> None:
    sink = Kept()
    end(hand, 8), end(hand, 8), end(hand, 8)
    async with recording(hand, sink, batch=5):
        await until(lambda: len(sink.requests()) == 24)
    assert sink.at_once <= 2 * 5


async def test_a_sink_that_is_away_is_warned_about_once_and_gets_everything_later(hand: ByHand) -> None:
    sink = Kept()
    sink.problem = SinkAway("no route to it")
    with capture_logs() as logs:
        async with recording(hand, sink) as recorder:
            ids = end(hand, 3)
            await until(lambda: sink.offered >= 4)
            stats = recorder.stats()
            assert (stats.away, stats.taken, stats.dropped) == (True, 0, 0)
            assert stats.failures >= 3
            sink.problem = None
            await until(seen(recorder, lambda now: now.taken > 0 and not now.away))
    assert sink.requests() == Counter(ids)
    assert [line["reason"] for line in logs if line["event"] == "sink_away"] == ["no route to it"]
    assert [line["event"] for line in logs if line["event"] == "sink_back"] == ["sink_back"]


async def test_a_batch_that_a_sink_never_takes_is_counted_and_does_not_stop_the_next(hand: ByHand) -> None:
    sink = Kept()
    sink.problem = ValueError("that is no span")
    async with recording(hand, sink) as recorder:
        end(hand, 1)
        await until(seen(recorder, lambda now: now.dropped == 2))
        sink.problem = None
        ids = end(hand, 1)
        await until(lambda: sink.requests() == Counter(ids))
        await until(lambda: pending(hand) == 0)


async def test_a_sink_with_bounded_patience_costs_its_own_spans(hand: ByHand) -> None:
    sink = Kept(patience_s=0.1)
    sink.problem = SinkAway("away")
    async with recording(hand, sink) as recorder:
        end(hand, 1)
        await until(seen(recorder, lambda now: now.dropped == 2))
        tried = sink.offered
        end(hand, 1)
        await until(seen(recorder, lambda now: now.dropped == 4))
        assert sink.offered == tried + 1  # it is away already: no time is lost on it
        sink.problem = None
        ids = end(hand, 1)
        await until(lambda: sink.requests() == Counter(ids))


async def test_what_a_dead_process_had_read_is_taken_over(hand: ByHand) -> None:
    stuck, sink = Kept(), Kept()
    stuck.open = anyio.Event()
    connection = await connect(hand.url)
    dead = Recorder(connection, options(hand, consumer="dead"), stuck)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dead.run)
        ids = end(hand, 3)
        await until(lambda: stuck.offered == 1)
        tasks.cancel_scope.cancel()
    await connection.aclose()
    async with recording(hand, sink, claim_idle_s=0.2) as recorder:
        await until(lambda: sink.requests() == Counter(ids))
        await until(lambda: pending(hand) == 0)
        await until(seen(recorder, lambda now: now.claimed == 3))


async def test_two_recorders_share_the_records_and_each_sink_gets_all(hand: ByHand) -> None:
    one, two, traces = Kept(), Kept(), Kept("otlp")
    async with recording(hand, one, batch=2), recording(hand, two, consumer="h", batch=2), recording(hand, traces):
        ids = [name for _ in range(4) for name in end(hand, 8)]
        await until(lambda: one.requests() + two.requests() == Counter(ids))
        await until(lambda: traces.requests() == Counter(ids))


async def test_a_record_that_is_delivered_again_has_the_same_ids(hand: ByHand) -> None:
    first, second = Kept(), Kept("again")
    end(hand, 2)
    for sink in (first, second):
        async with recording(hand, sink):
            await until(lambda sink=sink: len(sink.spans) == 4)
    assert [span.context for span in first.spans] == [span.context for span in second.spans]
    assert [span.attributes for span in first.spans] == [span.attributes for span in second.spans]


async def test_what_is_trimmed_before_it_is_read_is_counted_and_warned_about(hand: ByHand) -> None:
    sink = Kept()
    async with recording(hand, sink):
        end(hand, 1)
        await until(lambda: len(sink.requests()) == 1)
    end(hand, 8)
    with eye(hand.url) as client:
        client.xtrim(key(hand.group, "endings"), maxlen=3, approximate=False)
    with capture_logs() as logs:
        async with recording(hand, sink) as recorder:
            await until(lambda: len(sink.requests()) == 4)
            assert recorder.stats().lost == 5
    assert [(line["count"], line["stream"]) for line in logs if line["event"] == "records_lost"] == [(5, "endings")]


async def test_a_record_that_cannot_be_read_is_counted_and_not_read_again(hand: ByHand) -> None:
    sink = Kept()
    async with recording(hand, sink) as recorder:
        with eye(hand.url) as client:
            client.xadd(key(hand.group, "endings"), {"ending": "lost"})
            client.xadd(key(hand.group, "deliveries"), {"frames": "x"})
            client.xadd(key(hand.group, "deliveries"), {"frames": "x|y\n", "at_ms": "1"})
        ids = end(hand, 1)
        await until(lambda: sink.requests() == Counter(ids))
        await until(seen(recorder, lambda now: now.records == 4))
        assert recorder.stats().unreadable == 2
        assert pending(hand) == 0


async def test_a_stop_records_what_is_there_and_does_not_wait_for_a_sink_that_is_away(hand: ByHand) -> None:
    sink = Kept()
    async with recording(hand, sink, pause_s=30) as recorder:
        await until(seen(recorder, lambda now: now.lag == 0))
        ids = end(hand, 20 // 4)
    assert sink.requests() == Counter(ids)
    sink.problem = SinkAway("away")
    with anyio.fail_after(10):
        async with recording(hand, sink, retry_s=5) as recorder:
            end(hand, 1)
            recorder.stop(0.2)
    assert pending(hand) == 1


async def test_streams_that_vanish_are_read_anew(hand: ByHand) -> None:
    sink = Kept()
    async with recording(hand, sink):
        end(hand, 1)
        await until(lambda: len(sink.requests()) == 1)
        with eye(hand.url) as client:
            client.delete(key(hand.group, "endings"), key(hand.group, "deliveries"))
        ids = end(hand, 2)
        await until(lambda: set(ids) <= set(sink.requests()))


async def test_requests_go_first_until_much_waits_to_be_recorded(hand: ByHand) -> None:
    connection = await connect(hand.url)
    recorder = Recorder(connection, options(hand), Kept())
    rests = []
    for lag in (None, 0, LIMITS["endings_kept"] // 8, LIMITS["endings_kept"] // 4, LIMITS["endings_kept"]):
        recorder._stats = RecorderStats("history", lag=lag)
        rests.append(recorder._rest())
    assert rests[0] == rests[1] > rests[2] > rests[3] == rests[4] == 0
    await connection.aclose()


async def test_a_blocking_function_is_a_sink(hand: ByHand) -> None:
    rows: list[ReadableSpan] = []
    away = True
    closed: list[bool] = []

    def write(spans: Sequence[ReadableSpan]) -> None:
        if away:
            raise ConnectionError("refused")
        rows.extend(spans)

    sink = ThreadSink("history", write, away=OSError, close=lambda: closed.append(True))
    async with recording(hand, sink) as recorder:
        hand.submit()
        hand.settle(hand.claim(1), outcome=Outcome.FAILED)
        await until(seen(recorder, lambda now: now.away))
        away = False
        await until(lambda: len(rows) == 2)
    await sink.aclose()
    await sink.aclose()
    assert closed == [True]

"""The intake of streams: in order, once, bounded, and each one's trouble its own."""

from __future__ import annotations

from dispatch.errors import StreamBroken, StreamTooSlow
from dispatch.fabric.frames import ChunkFrame
from dispatch.producer.intake import FRAME_BYTES, TAKE_BYTES, Intake, Reservoir
from dispatch.producer.options import ClientOptions


class Reader(Intake):
    def __init__(self, reservoir: Reservoir, request_id: str = "r") -> None:
        self.woken = 0
        self.given_up = 0
        self.begin(request_id, reservoir, self._stop)

    def _stop(self) -> None:
        self.given_up += 1

    def wake(self) -> None:
        self.woken += 1

    def texts(self) -> list[bytes]:
        return [chunk.data for chunk in self.take()]


def reservoir(**options: int) -> Reservoir:
    return Reservoir(ClientOptions(**options))  # type: ignore[arg-type] # whole numbers, all of them


def frame(number: int, *data: bytes) -> ChunkFrame:
    return ChunkFrame(1, "r", number, b"\n".join(b"|" + each for each in data))


def test_chunks_come_out_as_they_went_in() -> None:
    reader = Reader(reservoir())
    reader.feed(frame(0, b"a", b"b"))
    reader.feed(frame(2, b"c"))
    assert reader.woken == 2
    assert reader.texts() == [b"a", b"b", b"c"]
    assert reader.texts() == []


def test_what_came_before_is_dropped_whole_or_in_part() -> None:
    reader = Reader(reservoir())
    for repeated in (frame(0, b"a", b"b"), frame(0, b"a", b"b"), frame(1, b"b"), frame(1, b"b", b"c")):
        reader.feed(repeated)
    assert reader.texts() == [b"a", b"b", b"c"]
    assert reader.failure is None


def test_a_gap_ends_the_stream_and_stops_its_request() -> None:
    reader = Reader(reservoir())
    reader.feed(frame(0, b"a"))
    reader.feed(frame(3, b"d"))
    assert isinstance(reader.failure, StreamBroken)
    assert "chunks 1 to 2 of request r" in str(reader.failure)
    assert (reader.given_up, reader.texts()) == (1, [])
    reader.feed(frame(1, b"b"))
    assert reader.texts() == []


def test_a_reader_that_is_too_far_behind_loses_its_stream_and_its_memory() -> None:
    shared = reservoir(stream_unread_bytes=3000)
    reader, other = Reader(shared), Reader(shared, "s")
    other.feed(frame(0, b"x"))
    reader.feed(frame(0, b"a" * 1500))
    reader.feed(frame(1, b"b" * 900))
    assert reader.failure is None
    reader.feed(frame(2, b"c" * 900))
    assert isinstance(reader.failure, StreamTooSlow)
    assert "3000 bytes" in str(reader.failure)
    assert (reader.given_up, reader.unread_bytes, reader.texts()) == (1, 0, [])
    assert other.texts() == [b"x"]
    assert shared.bytes == 0


def test_one_chunk_is_taken_in_however_large_it_is() -> None:
    reader = Reader(reservoir(stream_unread_bytes=100))
    reader.feed(frame(0, b"a" * 10_000))
    assert [len(text) for text in reader.texts()] == [10_000]
    reader.feed(frame(1, b"b" * 10_000))
    assert reader.failure is None


def test_together_streams_are_bounded_too_and_the_one_furthest_behind_pays() -> None:
    shared = reservoir(streams_unread_bytes=10_000)
    fast, slow, ended = Reader(shared, "fast"), Reader(shared, "slow"), Reader(shared, "ended")
    ended.feed(frame(0, b"e" * 4000))
    slow.feed(frame(0, b"s" * 5000))
    fast.feed(frame(0, b"f" * 1000))
    assert (fast.failure, slow.given_up, ended.failure) == (None, 1, None)
    assert isinstance(slow.failure, StreamTooSlow)
    ended.close()
    assert fast.texts() == [b"f" * 1000]
    assert shared.bytes == 0


def test_a_reader_takes_a_bounded_piece_at_once() -> None:
    reader = Reader(reservoir())
    for number in range(20):
        reader.feed(frame(number, b"a" * 10_000))
    first = reader.texts()
    assert TAKE_BYTES <= len(first) * (10_000 + FRAME_BYTES) < TAKE_BYTES + 20_000
    assert len(first) + len(reader.texts()) + len(reader.texts()) == 20


def test_a_closed_intake_takes_nothing_more() -> None:
    shared = reservoir()
    reader = Reader(shared)
    reader.feed(frame(0, b"a"))
    reader.close()
    reader.close()
    reader.feed(frame(1, b"b"))
    assert (reader.texts(), shared.bytes, reader.given_up) == ([], 0, 0)

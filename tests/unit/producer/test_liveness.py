from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dispatch.errors import FabricUnavailable
from dispatch.producer.liveness import Listener, Liveness
from dispatch.producer.options import ClientOptions
from dispatch.producer.session import Session

TTL_MS = 150
SESSION = Session.begin(ClientOptions(fabric_group="g", producer_id="p", liveness_ms=TTL_MS))


class FakeBeat:
    """A blocking connection that notes signs of life; `error` is raised instead."""

    def __init__(self) -> None:
        self.owner: bytes | None = SESSION.session_id.encode()  # the client gives the first sign itself
        self.writes = 0
        self.signs = 0
        self.error: Exception | None = None
        self.closed = threading.Event()
        self.given = threading.Condition()

    def get(self, _key: str) -> bytes | None:
        if self.error is not None:
            raise self.error
        return self.owner

    def renew_alive(self, alive_key: str, replies_key: str, *, alive_ms: int, replies_ms: int) -> bool:
        assert (alive_key, replies_key) == ("{g}:key:llm:producer:p:alive", "{g}:list:llm:replies:p")
        assert (alive_ms, replies_ms) == (TTL_MS, 300_000)
        with self.given:
            if self.owner is not None:
                self.signs += 1
                self.given.notify_all()
            return self.owner is not None

    def keep_alive(self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int) -> None:
        self.owner = session.encode()
        self.writes += 1
        assert self.renew_alive(alive_key, replies_key, alive_ms=alive_ms, replies_ms=replies_ms)

    def close(self) -> None:
        self.closed.set()

    def wait_for(self, count: int) -> None:
        with self.given:
            assert self.given.wait_for(lambda: self.signs >= count, 5)


@pytest.fixture
def beat() -> FakeBeat:
    return FakeBeat()


def started(beat: FakeBeat, connect: Callable[[], FakeBeat] | None = None) -> tuple[Liveness, list[str]]:
    told: list[str] = []
    listener = Listener(lapsed=lambda: told.append("lapsed"), taken_over=lambda: told.append("taken over"))
    liveness = Liveness(SESSION, connect or (lambda: beat), listener)
    liveness.start()
    return liveness, told


def test_signs_are_given_until_it_is_stopped(beat: FakeBeat) -> None:
    liveness, told = started(beat)
    beat.wait_for(4)
    liveness.stop()
    liveness.join()
    assert beat.closed.is_set()
    signs = beat.signs
    time.sleep(TTL_MS / 1000)
    assert beat.signs == signs
    assert beat.writes == 0
    assert told == []


def test_a_marker_that_vanished_is_written_again_and_the_gap_is_told(beat: FakeBeat) -> None:
    liveness, told = started(beat)
    beat.wait_for(1)
    with beat.given:
        beat.owner = None
    beat.wait_for(beat.signs + 2)
    liveness.stop()
    liveness.join()
    assert beat.owner == SESSION.session_id.encode()
    assert beat.writes == 1
    assert told == ["lapsed"]


@pytest.mark.parametrize("error", [FabricUnavailable("away"), RuntimeError("a bug"), OSError("no socket")])
def test_no_error_ends_it_and_a_gap_is_told(beat: FakeBeat, error: Exception) -> None:
    liveness, told = started(beat)
    beat.wait_for(1)
    beat.error = error
    time.sleep(TTL_MS * 2 / 1000)
    signs, beat.error = beat.signs, None
    beat.wait_for(signs + 1)
    liveness.stop()
    liveness.join()
    assert told == ["lapsed"]


def test_a_connection_that_cannot_be_made_is_tried_again(beat: FakeBeat) -> None:
    attempts = 0

    def connect() -> FakeBeat:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise FabricUnavailable("away")
        return beat

    liveness, _ = started(beat, connect)
    beat.wait_for(2)
    liveness.stop()
    liveness.join()
    assert attempts == 4


def test_the_newest_session_keeps_the_producer(beat: FakeBeat) -> None:
    liveness, told = started(beat)
    beat.wait_for(1)
    beat.owner = b"another session"
    assert beat.closed.wait(5)
    liveness.join()
    assert told == ["taken over"]
    assert beat.owner == b"another session"

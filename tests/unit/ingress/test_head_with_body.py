"""An answer's head goes out with the first piece of its body, in one write."""

import asyncio

from dispatch.ingress.protocol import HeadWithBody


class Wire(asyncio.Transport):
    """Keeps what is written, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_head_and_first_piece_are_one_write() -> None:
    wire = Wire()
    answer = HeadWithBody(wire)
    for data in (b"HTTP/1.1 200 OK\r\n\r\n", b"first", b"second"):
        answer.write(data)
    assert wire.writes == [b"HTTP/1.1 200 OK\r\n\r\nfirst", b"second"]


def test_an_empty_piece_sends_the_head() -> None:
    wire = Wire()
    answer = HeadWithBody(wire)
    answer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert not wire.writes
    answer.write(b"")
    answer.write(b"later")
    assert wire.writes == [b"HTTP/1.1 200 OK\r\n\r\n", b"later"]


def test_leave_to_send_does_not_wait() -> None:
    wire = Wire()
    answer = HeadWithBody(wire)
    answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert wire.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    answer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    answer.write(b"body")
    assert wire.writes[1:] == [b"HTTP/1.1 200 OK\r\n\r\nbody"]


def test_an_answer_broken_off_after_its_head_shows_it() -> None:
    wire = Wire()
    answer = HeadWithBody(wire)
    answer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    answer.close()
    assert wire.writes == [b"HTTP/1.1 200 OK\r\n\r\n"]
    assert answer.is_closing()

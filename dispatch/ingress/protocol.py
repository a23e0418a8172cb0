"""The server's HTTP protocol, with some differences.

Only what can be read in one way reaches the parser (see `framing`), a request's head is bounded in size and time, and
connections in number. Its own errors have OpenAI's form, no answer goes out before its turn, all requests of a
connection learn that their client has left, one that reads nothing is let go, and offers to upgrade are ignored.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dispatch.contract.answers import Problem, answer_of_problem, rejected
from dispatch.ingress.connections import TURNED_AWAY_MAX, ConnectionLimits, Door
from dispatch.ingress.framing import NO_HTTP, Framing, Refused

_HEAD_TOO_SLOW = rejected(
    HTTPStatus.REQUEST_TIMEOUT, "head_too_slow", "the request's head did not come within its time"
)

_LINGER_S = 1.0
"""How long a client may still send after its refusal; what it sends is thrown away."""

_PIPELINED_MAX = 32
"""Requests of one connection that wait for their answers; what a client sends beyond is not read."""

_CONTINUE = b"HTTP/1.1 100"
_JOINED_BYTES = 64 * 1024  # copying more costs more than a second write


class HttpProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`. No WebSockets.

    A head of more than `head_max_bytes` or `head_max_fields`, or one that takes longer than `head_s` (from the
    connection's begin, or its own first byte), is refused: without that one client could take all memory or time.
    A client that takes nothing of its answers for `unread_s` is disconnected. `door` counts the connections.
    """

    head_max_bytes = 64 * 1024
    head_max_fields = 256
    head_s = 30.0
    unread_s = 60.0
    door = Door()

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[HttpProtocol]:
        """Return the protocol for a server of its own, with these bounds."""
        return type(cls.__name__, (cls,), {"door": Door(limits)})

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._framing = Framing(self.head_max_bytes, self.head_max_fields)
        self._parsing_body = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._given_up = False
        self._address: str | None = None  # counted in
        self._turned_away: Problem | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own signature
        """Begin a connection; a client that then says nothing does not hold it for ever."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self._turned_away = self.door.enter(address)
        if self._turned_away is None:
            self._address = address
            self._time_head()
            return
        self.door.turned_away += 1
        if self.door.turned_away > TURNED_AWAY_MAX:
            transport.abort()
        # It is told when it has asked: an answer before the request is none to many clients.
        self._head_timer = self.loop.call_later(_LINGER_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client is gone, not only the newest."""
        self._stop_timing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        if self._address is not None:
            self.door.leave(self._address)
            self._address = None
        elif self._turned_away is not None:
            self.door.turned_away -= 1
        for cycle in self._unanswered:
            _disconnect(cycle)
        self._unanswered.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes off the connection."""
        if self._given_up:
            return
        if self._turned_away is not None:
            self._give_up(self._turned_away)
            return
        self._unset_keepalive_if_required()
        try:
            for piece in self._framing.cut(data):
                self.parser.feed_data(piece)
                if self._parsing_body is not self._framing.in_body:  # the two do not see the same requests
                    self._give_up(NO_HTTP)
                if self._given_up:
                    return
        except Refused as refusal:
            self._give_up(refusal.problem)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._give_up(NO_HTTP)
        else:
            if self._framing.begun and self._head_timer is None:
                self._time_head()

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind those before it on the connection."""
        self._stop_timing()
        self._parsing_body = True
        newest = self.cycle
        super().on_headers_complete()
        if self.cycle is newest:
            return
        self.cycle.transport = HeadWithBody(self.transport)
        self._framing.last = not self.cycle.keep_alive
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        """End a request's body: what follows is the next one's head."""
        super().on_message_complete()
        self._parsing_body = False
        if len(self._unanswered) > _PIPELINED_MAX:
            self._give_up(NO_HTTP)

    def on_response_complete(self) -> None:
        """Go on with the next request; a connection that ends is not held open by a client that does not read."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._time_reading()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - ours says more
        """Answer a request that cannot be read; the connection ends."""
        self._give_up(NO_HTTP)

    def pause_writing(self) -> None:
        """Wait for a client that reads more slowly than it is answered, as long as it reads at all."""
        super().pause_writing()
        self._time_reading()

    def resume_writing(self) -> None:
        """Go on answering."""
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; also one whose client has not read its last answer."""
        super().timeout_keep_alive_handler()
        self._time_reading()

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.flow.read_paused:  # it is us who do not read: answers to earlier requests are due
            self._time_head()
        else:
            self._give_up(_HEAD_TOO_SLOW)

    def _stop_timing(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_reading(self) -> None:
        if self._unread_timer is None and (unread := self.transport.get_write_buffer_size()) > 0:
            self._unread_bytes = unread
            self._unread_timer = self.loop.call_later(self.unread_s, self._nothing_was_read)

    def _nothing_was_read(self) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._time_reading()
        else:
            self.transport.abort()

    def _give_up(self, problem: Problem) -> None:
        """Read no more of the connection.

        Requests before the bad one get their answers first, or the client would take its refusal for the answer to the
        oldest of them.
        """
        self._given_up = True
        self._stop_timing()
        owed = [cycle for cycle in self._unanswered if not cycle.response_complete]
        broken = owed.pop() if owed and owed[-1].more_body else None  # its body is what cannot be read
        if broken is not None:
            _disconnect(broken)
            if owed:
                self.pipeline.popleft()  # it has not begun: it is the last in the line
        if owed:
            owed[-1].keep_alive = False  # the connection ends with its answer
            return
        if broken is not None and broken.response_started:
            self.transport.close()
            return
        self.transport.write(_whole_answer(problem))
        # A socket closed with unread bytes in it is reset, and a reset throws the answer away at the client.
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)


class HeadWithBody(asyncio.Transport):
    """What a cycle writes to: the head of its answer goes out with the first piece of the body, as ASGI has it.

    Two writes are two system calls, and wake the client twice.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data`; the head of an answer with what follows it."""
        if self._head is None and not data.startswith(_CONTINUE):  # type: ignore[union-attr]  # uvicorn writes bytes
            self._head = bytes(data)
            return
        if self._head:
            if len(data) <= _JOINED_BYTES:
                data = self._head + data
            else:
                self._transport.write(self._head)
            self._head = b""
        self._transport.write(data)

    def close(self) -> None:
        """Close; a head that nothing followed is written before."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self._transport.is_closing()


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _whole_answer(problem: Problem) -> bytes:
    answer = answer_of_problem(problem)
    fields = [*answer.fields, ("x-request-id", uuid.uuid4().hex), ("content-length", str(len(answer.body)))]
    status = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"
    head = [status, *(f"{name}: {value}" for name, value in fields), "connection: close", "", ""]
    return "\r\n".join(head).encode("ascii") + answer.body

"""The server's HTTP protocol, with some differences.

Its own errors have OpenAI's form, a request's head is bounded in size and time, no answer goes out before its turn, all
requests of a connection learn that their client has left, and offers to upgrade are ignored.

Some clients (Java's, by default) offer HTTP/2 with the first request on a plain connection. A server may ignore that
(RFC 9110 section 7.8), but this parser ends the message at the offer and drops its body.
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

_OFFER = frozenset({b"upgrade", b"http2-settings"})
_NO_HTTP = rejected(HTTPStatus.BAD_REQUEST, "invalid_http", "the bytes received are no HTTP request")
_NO_PROXY = rejected(HTTPStatus.BAD_REQUEST, "invalid_http", "this server is no proxy")
_HEAD_TOO_LARGE = rejected(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "head_too_large",
    "the request's head is too large or has too many fields",
)
_HEAD_TOO_SLOW = rejected(
    HTTPStatus.REQUEST_TIMEOUT, "head_too_slow", "the request's head did not come within its time"
)

_LINGER_S = 1.0
"""How long a client may still send after its refusal; what it sends is thrown away."""


class _HeadTooLarge(Exception):
    """Stops the parser."""


class HttpProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`. No WebSockets.

    A head of more than `head_max_bytes` or `head_max_fields`, or one that takes longer than `head_s` (from the
    connection's begin, or its own first byte), is refused: without that one client could take all memory or time.
    """

    head_max_bytes = 64 * 1024
    head_max_fields = 256
    head_s = 30.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._in_head = True
        self._head_begun = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._given_up = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own signature
        """Begin a connection; a client that then says nothing does not hold it for ever."""
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client is gone, not only the newest."""
        self._stop_timing()
        for cycle in self._unanswered:
            _disconnect(cycle)
        self._unanswered.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes off the connection."""
        if self._given_up:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_begun = True
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._give_up(_HEAD_TOO_LARGE if isinstance(error.__context__, _HeadTooLarge) else _NO_HTTP)
        else:
            if self._in_head and self._head_bytes > self.head_max_bytes:
                self._give_up(_HEAD_TOO_LARGE)
            elif self._head_begun and self._head_timer is None:
                self._time_head()

    def on_message_begin(self) -> None:
        """Begin a head; it may do so in the middle of the bytes received."""
        super().on_message_begin()
        self._head_begun = True

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind those before it on the connection."""
        self._stop_timing()
        # The bytes counted may be of a body, too: only when they are many, the head's own are.
        large = self._head_bytes > self.head_max_bytes and self._head_size() > self.head_max_bytes
        self._in_head, self._head_begun, self._head_bytes = False, False, 0
        if large or len(self.headers) > self.head_max_fields:
            raise _HeadTooLarge
        newest = self.cycle
        super().on_headers_complete()
        if self.cycle is not newest:
            while self._unanswered and self._unanswered[0].response_complete:
                self._unanswered.popleft()
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        """End a request's body: what follows is the next one's head."""
        super().on_message_complete()
        self._in_head, self._head_begun, self._head_bytes = True, False, 0

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - ours says more
        """Answer a request that cannot be read; the connection ends."""
        self._give_up(_NO_HTTP)

    def _should_upgrade(self) -> bool:
        """Hold a request with an offer back: it is parsed again without it."""
        return True

    def _decline(self, rest: bytes) -> None:
        """Parse the request again without its offer; `rest` is what followed its head."""
        method = self.scope["method"].encode("ascii")
        if method == b"CONNECT":  # asks for a tunnel, not for an upgrade
            self._give_up(_NO_PROXY)
            return
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token for token in value.split(b",") if token.strip().lower() not in _OFFER]
                lines.append(b"connection:" + b",".join(tokens))
            elif name not in _OFFER:
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _time_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._give_up, _HEAD_TOO_SLOW)

    def _stop_timing(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

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
        self.loop.call_later(_LINGER_S, self.transport.close)


def _disconnect(cycle: RequestResponseCycle) -> None:
    cycle.disconnected = True
    cycle.message_event.set()


def _whole_answer(problem: Problem) -> bytes:
    answer = answer_of_problem(problem)
    fields = [*answer.fields, ("x-request-id", uuid.uuid4().hex), ("content-length", str(len(answer.body)))]
    status = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"
    head = [status, *(f"{name}: {value}" for name, value in fields), "connection: close", "", ""]
    return "\r\n".join(head).encode("ascii") + answer.body

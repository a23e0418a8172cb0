"""Where one request of a connection ends and the next begins, by the strictest reading there is. No I/O.

A proxy in front and the parser behind must see the same requests, or what one takes for a body is the next request to
the other. So nothing reaches the parser that two readers could cut differently: lines end in CRLF and are not folded,
names are followed by their colon at once, the target is a path, a body has one length or is chunked and not both,
chunks have plain sizes and no extensions, and nothing follows the last one. What is refused ends the connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus

from dispatch.contract.answers import Problem, rejected

_BAD = HTTPStatus.BAD_REQUEST
_LINES = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]++) HTTP/1\.([01])\r\n"
    rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]++:[\t\x20-\x7e\x80-\xff]*+\r\n)*+\r\n"
)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_SIZE_LINE_MAX = 10
_NO_SIZE = re.compile(rb"[^0-9A-Fa-f\r]")
_END_OF_HEAD = b"\r\n\r\n"
_OVERLAP = len(_END_OF_HEAD) - 1
_OTHER_LINES = 2  # of a head: its first, and the empty one that ends it
_BLANK = re.compile(rb"(?:\r\n)*")
_NEVER = re.compile(rb"(?<!\r)\n|\r[^\n]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_OFFERS = frozenset({b"upgrade", b"http2-settings"})
_WATCHED = re.compile(rb"\n(content-length|transfer-encoding|host|upgrade|http2-settings):([^\r]*)")

NO_HTTP = rejected(_BAD, "invalid_http", "the bytes received are no HTTP request")
_NO_PROXY = rejected(_BAD, "invalid_http", "this server is no proxy: a request's target must be a path")
_LENGTHS = rejected(_BAD, "invalid_http", "a request must have one Content-Length in digits, or none")
_CODING = rejected(_BAD, "invalid_http", "the only Transfer-Encoding taken is 'chunked', once and in HTTP/1.1")
_BOTH = rejected(_BAD, "invalid_http", "a request must not have both Content-Length and Transfer-Encoding")
_HOSTS = rejected(_BAD, "invalid_http", "a request must not have more than one Host")
_NO_HOST = rejected(_BAD, "invalid_http", "a request must have a Host (RFC 9112 section 3.2)")
_CHUNK = rejected(
    _BAD, "invalid_http", "the body's chunks cannot be read: plain sizes, no extensions and no trailers are taken"
)
HEAD_TOO_LARGE = rejected(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "head_too_large",
    "the request's head is too large or has too many fields",
)


class Refused(Exception):
    """The connection cannot be read any further; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Framing:
    """Cuts what one connection sends. `last`, set while a message is read, makes it the last: the rest is ignored."""

    def __init__(self, head_max_bytes: int, head_max_fields: int) -> None:
        self._max_bytes = head_max_bytes
        self._max_fields = head_max_fields
        self._head = bytearray()
        self._blank = 0
        self._left = 0  # of a body of known length, or of a chunk
        self._chunks = False
        self._line = bytearray()  # of a chunk: its size, or what ends it
        self._line_is_size = True
        self._size = 0
        self.in_body = False
        self.last = False

    @property
    def begun(self) -> bool:
        """Whether a head has begun and not ended."""
        return bool(self._head or self._blank)

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield what of `data` the parser may have: whole heads, pieces of bodies.

        Raises:
            Refused: nothing more may be read.
        """
        while data:
            if not self.in_body:
                if self.last:
                    return
                head, data = self._take_head(data)
                if not head:
                    return
                yield self._begin(head)
            elif self._chunks:
                piece, data = self._take_chunks(data)
                if piece:
                    yield piece
            else:
                piece = data if len(data) <= self._left else data[: self._left]
                data = data[len(piece) :]
                self._left -= len(piece)
                self.in_body = self._left > 0
                yield piece

    def _take_head(self, data: bytes) -> tuple[bytes, bytes]:
        """Return a whole head and what follows it; nothing while it is not complete."""
        if self._head == b"\r":  # perhaps the first half of an empty line
            data = b"\r" + data
            self._head.clear()
        if not self._head:  # empty lines before a request are allowed, not for ever
            blank = _BLANK.match(data)
            assert blank is not None  # matches nothing, too  # noqa: S101 - for the type checker
            self._blank += blank.end()
            data = data[blank.end() :]
        tail = bytes(self._head[-_OVERLAP:])
        seen = tail + data
        end = seen.find(_END_OF_HEAD)
        size = len(self._head) - len(tail) + (len(seen) if end < 0 else end + len(_END_OF_HEAD))
        if size + self._blank > self._max_bytes:
            raise Refused(HEAD_TOO_LARGE)
        # Said at once: its end may never come. From the last byte looked at before, which may be half of a line's end.
        if end < 0 and _NEVER.search(seen, max(0, len(tail) - 1)):
            raise Refused(NO_HTTP)
        cut = len(data) if end < 0 else end + len(_END_OF_HEAD) - len(tail)
        self._head += data[:cut]
        if end < 0:
            return b"", b""
        head = bytes(self._head)
        self._head.clear()
        self._blank = 0
        return head, data[cut:]

    def _begin(self, head: bytes) -> bytes:
        """Read how long the body is, and return the head as the parser gets it: without offers to upgrade."""
        if head.count(b"\r\n") - _OTHER_LINES > self._max_fields:
            raise Refused(HEAD_TOO_LARGE)
        lines = _LINES.fullmatch(head)
        if lines is None:
            raise Refused(NO_HTTP)
        method, target, minor = lines.groups()
        if method == b"CONNECT" or not target.startswith(b"/"):
            raise Refused(_NO_PROXY)
        found: dict[bytes, list[bytes]] = {}
        for name, value in _WATCHED.findall(head.lower()):
            found.setdefault(name, []).append(value.strip(b" \t"))
        self._measure(found, minor)
        return head if found.keys().isdisjoint(_OFFERS) else _without_offers(head)

    def _measure(self, found: dict[bytes, list[bytes]], minor: bytes) -> None:
        lengths, codings = found.get(b"content-length", ()), found.get(b"transfer-encoding", ())
        if lengths and codings:
            raise Refused(_BOTH)
        if codings and (len(codings) > 1 or codings[0] != b"chunked" or minor == b"0"):
            raise Refused(_CODING)
        if lengths and (len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0])):
            raise Refused(_LENGTHS)
        hosts = len(found.get(b"host", ()))
        if hosts > 1:
            raise Refused(_HOSTS)
        if not hosts and minor == b"1":
            raise Refused(_NO_HOST)
        self._chunks = bool(codings)
        self._line_is_size, self._size = True, 0
        self._left = int(lengths[0]) if lengths else 0
        self.in_body = self._chunks or self._left > 0

    def _take_chunks(self, data: bytes) -> tuple[bytes, bytes]:
        """Return what belongs to the chunks of a body, without a line that is not complete, and what follows them."""
        taken = bytearray()
        at = 0
        while at < len(data) and self.in_body:
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                taken += piece
                continue
            end = data.find(b"\n", at, at + _SIZE_LINE_MAX)
            line = data[at : at + _SIZE_LINE_MAX if end < 0 else end + 1]
            at += len(line)
            self._line += line
            if end >= 0:
                taken += self._line
                self._end_line(bytes(self._line))
                self._line.clear()
            elif len(self._line) >= _SIZE_LINE_MAX or _NO_SIZE.search(self._line):
                raise Refused(_CHUNK)
        return bytes(taken), data[at:]

    def _end_line(self, line: bytes) -> None:
        if not self._line_is_size:  # what ends a chunk, or the body
            if line != b"\r\n":
                raise Refused(_CHUNK)
            self.in_body = self._size > 0
            self._line_is_size = True
            return
        size = _SIZE.fullmatch(line)
        if size is None:
            raise Refused(_CHUNK)
        self._size = self._left = int(size[1], 16)
        self._line_is_size = False


def _without_offers(head: bytes) -> bytes:
    """Return the head without what offers another protocol, which a server may ignore (RFC 9110 section 7.8).

    Some clients (Java's, by default) offer HTTP/2 with the first request on a plain connection; the parser would end
    the message at the offer and drop its body.
    """
    kept = []
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == b"connection":
            tokens = [token for token in value.split(b",") if token.strip().lower() not in _OFFERS]
            kept.append(b"connection:" + b",".join(tokens))
        elif name not in _OFFERS:
            kept.append(line)
    return b"\r\n".join(kept)

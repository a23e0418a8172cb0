"""The event-stream format (WHATWG HTML, section 9.2), read from bytes as they come.

Why no library: those for Python decode to text first, which replaces bytes that a payload must keep, hold a line that
ends in CR until the next read, keep a byte order mark in the first field's name, or have no bound on an event.

What the format leaves to the reader, and is decided here: comments, `id`, `retry` and unknown fields are dropped; an
event whose data is empty or blank is none; an event that the body's end cuts off is given to the caller, who can tell
whether its data is whole.
"""

from __future__ import annotations

import msgspec

_BOM = b"\xef\xbb\xbf"
_LF, _CR = 10, 13
_FIELDS = (b"data", b"event", b"id", b"retry", b"")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event: its name (b"" = it has none) and its data, several `data` lines joined by LF."""

    name: bytes
    data: bytes


class EventParser:
    """Cuts one stream into events. Keeps no more than the one event that is not complete; see `held_bytes`."""

    __slots__ = ("_after_cr", "_began", "_data", "_line", "_lines_bytes", "_name", "strange")

    def __init__(self) -> None:
        self._line = bytearray()  # a line whose end has not come
        self._data: list[bytes] = []
        self._name = b""
        self._lines_bytes = 0  # of complete lines of the event that is not complete
        self._after_cr = False
        self._began = False
        self.strange = False
        """Whether a line came that is no field of the format: what is read may be something else."""

    @property
    def held_bytes(self) -> int:
        """How much of an event is kept that is not complete; whoever feeds bounds it."""
        return self._lines_bytes + len(self._line)

    @property
    def _is_between_events(self) -> bool:
        return self._began and not self._line and not self._lines_bytes

    def feed(self, piece: bytes) -> list[Event]:
        """Take the next bytes and return the events that they complete, in order.

        A line is complete at its CR, LF or CR LF and nowhere else: U+2028, U+0085, VT and the like are data. Where a
        CR LF is cut in two, the CR ends the line at once and the LF that follows is dropped.
        """
        if self._after_cr and piece:
            self._after_cr = False
            if piece[0] == _LF:
                piece = piece[1:]
        if not piece:
            return []
        lines = piece.splitlines()  # of bytes: at CR, LF and CR LF
        if len(lines) == 2 and piece.endswith(b"\n\n") and lines[0].startswith(b"data: {") and self._is_between_events:
            return [Event(b"", lines[0][6:])]  # most pieces are one such event; the rest of this costs twice as much
        last = piece[-1]
        self._after_cr = last == _CR
        complete = last in {_LF, _CR}
        if self._line:
            self._line += lines[0]
            if len(lines) > 1 or complete:
                lines[0] = bytes(self._line)
                self._line.clear()
            else:
                lines.clear()
        if lines and not complete:
            self._line += lines.pop()
        return self._read(lines) if lines else []

    def close(self) -> Event | None:
        """Return the event that was not complete when the body ended, None if there is none; the parser is used up."""
        line, strange = bytes(self._line), self.strange
        self._line.clear()
        events = self._read([line, b""] if line else [b""])
        field, colon, _ = line.removeprefix(_BOM).partition(b":")
        cut = not colon and any(name.startswith(field) for name in _FIELDS)
        self.strange = strange or not (cut or field in _FIELDS)
        return events[0] if events else None

    def _read(self, lines: list[bytes]) -> list[Event]:
        if not self._began:
            self._began = True
            lines[0] = lines[0].removeprefix(_BOM)
        events: list[Event] = []
        for line in lines:
            if not line:
                if self._data:
                    data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    self._data.clear()
                    if data and not data.isspace():
                        events.append(Event(self._name, data))
                self._name = b""
                self._lines_bytes = 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._lines_bytes += len(line)
            elif not line.startswith(b":"):  # which begins a comment
                self._read_field(line)
        return events

    def _read_field(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"event":
            self._name = value.removeprefix(b" ")
            self._lines_bytes += len(line)
        elif field == b"data":  # without a colon: an empty line of data
            self._data.append(b"")
            self._lines_bytes += len(line)
        elif field not in _FIELDS:
            self.strange = True

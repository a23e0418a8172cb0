"""Who waits for which reply, and what the frames of the reply list bring. No I/O; usable from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from dispatch.contract.reply import Reply
from dispatch.errors import ContractError, ContractMismatch, DispatchError, IdempotencyConflict, RequestInProgress
from dispatch.fabric.frames import ChunkFrame, Frame, read_frame, sequence_of
from dispatch.producer.intake import Intake

_log = structlog.get_logger(__name__)

Outcome = Reply | Frame | DispatchError
"""How a request came back to its caller: a reply, a frame whose body the caller has to read, or why there is none."""

_REQUEST_ID_CELL = 3
TERMINAL = "terminal"


class Slot(Protocol):
    """Where an outcome is put, once: a future of either world."""

    def done(self) -> bool:
        """Whether an outcome is there."""
        ...

    def set_result(self, result: Outcome, /) -> None:
        """Put the outcome."""
        ...


@dataclass(slots=True)
class _Entry:
    slot: Slot
    fingerprint: str
    lasting: bool
    admitted: bool = False


@dataclass(slots=True)
class Inbox:
    """The requests of one session that wait for their reply.

    A request that its caller has left is kept as *abandoned* for a while: its reply is still due, and has to be taken
    out of the list. Frames nobody waits for are dropped and counted in `dropped`.
    """

    clock: Callable[[], float]
    dropped: int = 0
    _waiting: dict[str, _Entry] = field(default_factory=dict)
    _abandoned: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, request_id: str, slot: Slot, *, fingerprint: str = "", lasting: bool = False) -> None:
        """Give the reply of `request_id` to `slot` when it comes; chunks before it, too, if it is an `Intake`.

        `fingerprint` says what call it is, `lasting` that it goes on when nobody waits for it.

        Raises:
            RequestInProgress, IdempotencyConflict: this client already waits for a request of that id, which is the
                same call, or another one.
        """
        with self._lock:
            if (earlier := self._waiting.get(request_id)) is not None:
                message = f"request_id {request_id!r} is in use: this client waits for that request's reply"
                if earlier.fingerprint == fingerprint:
                    raise RequestInProgress(message, request_id=request_id)
                raise IdempotencyConflict(f"{message}, and it is another call", request_id=request_id)
            self._waiting[request_id] = _Entry(slot, fingerprint, lasting)
            self._abandoned.pop(request_id, None)

    def admitted(self, request_id: str) -> None:
        """Note that the group has the request: from now on a reply is due."""
        with self._lock:
            if (entry := self._waiting.get(request_id)) is not None:
                entry.admitted = True

    def withdraw(self, request_id: str, slot: Slot) -> None:
        """Stop waiting with `slot`; no reply is due. Another slot that waits for the same id is not touched."""
        with self._lock:
            entry = self._waiting.get(request_id)
            if entry is not None and entry.slot is slot:
                del self._waiting[request_id]

    def abandon(self, request_id: str, slot: Slot, until: float) -> None:
        """Stop waiting although a reply is due, by `until` on the clock; it will be taken out and dropped."""
        self.withdraw(request_id, slot)
        with self._lock:
            if request_id not in self._waiting:
                self._abandoned[request_id] = until

    def forget(self, request_id: str) -> None:
        """Expect no reply of an abandoned request any more."""
        with self._lock:
            self._abandoned.pop(request_id, None)

    def settle(self, request_id: str, outcome: Outcome) -> bool:
        """Hand `outcome` to whoever waits for `request_id`. Only the first one counts; returns whether this was it."""
        with self._lock:
            entry = self._waiting.pop(request_id, None)
        return _put(entry, outcome)

    def fail_all(self, error: Callable[[], DispatchError]) -> int:
        """Settle every waiting request with an error of its own; returns how many."""
        ids = self.outstanding()
        return sum(self.settle(request_id, error()) for request_id in ids)

    def fail_lasting(self, error: Callable[[], DispatchError]) -> None:
        """Settle those that wait for a request which goes on without them with an error of their own."""
        with self._lock:
            ids = [name for name, entry in self._waiting.items() if entry.lasting and entry.admitted]
        for request_id in ids:
            self.settle(request_id, error())

    def outstanding(self, *, admitted_only: bool = False) -> list[str]:
        """List the ids that wait for a reply."""
        with self._lock:
            return [name for name, entry in self._waiting.items() if entry.admitted or not admitted_only]

    def busy(self) -> bool:
        """Whether any reply is due, wanted or not."""
        with self._lock:
            if self._abandoned and not self._waiting:
                now = self.clock()
                self._abandoned = {name: until for name, until in self._abandoned.items() if until > now}
            return bool(self._waiting or self._abandoned)

    def receive(self, raws: Sequence[bytes]) -> int | None:
        """Hand the frames over; returns the sequence to acknowledge up to (None = no frame had one).

        A frame of another contract or a damaged one fails its own request only.
        """
        upto: int | None = None
        for raw in raws:
            try:
                frame = read_frame(raw)
            except ContractError as error:
                sequence = self._refuse(raw, error)
            else:
                sequence = frame.sequence
                if isinstance(frame, ChunkFrame):
                    self._feed(frame)
                elif frame.kind != TERMINAL or not self._deliver(
                    frame.reply.request_id, frame if frame.by_reference else frame.reply
                ):
                    self.dropped += 1
            if sequence is not None:
                upto = sequence if upto is None else max(upto, sequence)
        return upto

    def _feed(self, frame: ChunkFrame) -> None:
        with self._lock:
            entry = self._waiting.get(frame.request_id)
        slot = None if entry is None else entry.slot
        if not isinstance(slot, Intake):
            self.dropped += 1
            return
        slot.feed(frame)

    def _deliver(self, request_id: str, outcome: Outcome) -> bool:
        with self._lock:
            self._abandoned.pop(request_id, None)
            entry = self._waiting.pop(request_id, None)
        return _put(entry, outcome)

    def _refuse(self, raw: bytes, error: ContractError) -> int | None:
        """Tell who waits for a frame that cannot be read; returns its sequence, None if it has none."""
        try:
            sequence = sequence_of(raw)
        except ContractError:
            _log.error("reply_frame_unreadable", error=str(error))
            return None
        cells = raw.partition(b"\n")[0].split(b"|")
        request_id = cells[_REQUEST_ID_CELL].decode("utf-8", "replace") if len(cells) > _REQUEST_ID_CELL else ""
        kind = ContractMismatch if isinstance(error, ContractMismatch) else ContractError
        delivered = self._refuse_to(request_id, kind(f"{error} (request {request_id!r})"))
        self.dropped += not delivered
        _log.error("reply_frame_refused", request_id=request_id, delivered=delivered, error=str(error))
        return sequence

    def _refuse_to(self, request_id: str, error: DispatchError) -> bool:
        with self._lock:
            entry = self._waiting.get(request_id)
        if entry is None or not isinstance(entry.slot, Intake):
            return self._deliver(request_id, error)
        entry.slot.give_up(error)
        return True


def _put(entry: _Entry | None, outcome: Outcome) -> bool:
    if entry is None or entry.slot.done():
        return False
    entry.slot.set_result(outcome)
    return True

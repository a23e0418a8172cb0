"""Reply frames: what stands in a producer's reply list.

A terminal frame has three parts, divided by newlines: a line of scalars that Lua wrote, the gateway's `ReplyHead` as
JSON, and the endpoint's body, raw. Lua never reads the second and third part.

    contract|sequence|kind|request_id|ending|pool|attempt|queue_ms|execution_ms|by_reference|tries|submitted_ms|
    traceparent

`tries` are the earlier attempts, joined by `;`, the cells of each (see `Attempt`) by `,`. The last two say to which
trace the request belongs (`read_delivered`). A frame without the last two or three fields is one that an older library
pushed.

A frame of chunks is a line of scalars and then a line for each chunk: its event ("" where events have no names; bars
and percent signs in it are percent-encoded) and its data. `number` is that of the first one, from 0. The terminal frame
of a request follows all of them.

    contract|sequence|chunks|request_id|number
    event|data
"""

from __future__ import annotations

import msgspec

from dispatch.contract.chunk import Chunk
from dispatch.contract.envelope import CONTRACT_VERSION
from dispatch.contract.reply import Attempt, Reply, ReplyHead
from dispatch.errors import ContractError, ContractMismatch

_FIELDS = 13
_TRIES, _SUBMITTED, _TRACEPARENT = 10, 11, 12
_FORMS = (_TRIES, _SUBMITTED, _FIELDS)
_CHUNK_FIELDS = 5
_CHUNKS = b"chunks"
_CONTRACT = b"%d" % CONTRACT_VERSION
_LINE_END, _BAR = b"\n", b"|"
_HEAD = msgspec.json.Decoder(ReplyHead)


class Frame(msgspec.Struct, frozen=True):
    """One frame. `by_reference`: the body stands under the reply body key and has to be read from there."""

    sequence: int
    kind: str
    by_reference: bool
    reply: Reply


class ChunkFrame(msgspec.Struct, frozen=True, gc=False):
    """One frame of a running stream. What its chunks say is read when somebody wants it (`chunks`)."""

    sequence: int
    request_id: str
    number: int
    payload: bytes

    @property
    def count(self) -> int:
        """How many chunks it has."""
        return self.payload.count(_LINE_END) + 1

    def without(self, first: int) -> ChunkFrame:
        """Return the frame without its `first` chunks; at least one is left."""
        payload = self.payload.split(_LINE_END, first)[first]
        return ChunkFrame(self.sequence, self.request_id, self.number + first, payload)

    def chunks(self) -> list[Chunk]:
        """Return its chunks in order.

        Raises:
            ContractError: it is damaged.
        """
        found: list[Chunk] = []
        for line in self.payload.split(_LINE_END):
            event, bar, data = line.partition(_BAR)
            if not bar:
                raise ContractError(f"damaged chunk of request {self.request_id!r}: {line[:40]!r}")
            found.append(Chunk(data, _event_of(event) if event else ""))
        return found


def chunk_line(event: str, data: bytes) -> bytes:
    """Return a chunk's line in a frame. `data` has no line end in it; `event` may be any text without one."""
    if not event:
        return _BAR + data
    return event.replace("%", "%25").replace("|", "%7C").encode() + _BAR + data


def _event_of(cell: bytes) -> str:
    event = cell.decode("utf-8", "replace")
    return event.replace("%7C", "|").replace("%25", "%") if "%" in event else event


def sequence_of(raw: bytes) -> int:
    """Return a frame's sequence, also of a frame of another contract.

    Raises:
        ContractError: it is no frame.
    """
    try:
        return int(raw.split(b"|", 2)[1])
    except (IndexError, ValueError) as error:
        raise ContractError(f"not a reply frame: {raw[:40]!r}") from error


def read_frame(raw: bytes) -> Frame | ChunkFrame:
    """Decode one frame of either kind. One of chunks costs about a microsecond.

    Raises:
        ContractMismatch, ContractError: as of `decode_frame`.
    """
    line, _, payload = raw.partition(_LINE_END)
    cells = line.split(_BAR)
    if len(cells) != _CHUNK_FIELDS or cells[2] != _CHUNKS or cells[0] != _CONTRACT:
        return decode_frame(raw)
    try:
        return ChunkFrame(int(cells[1]), cells[3].decode(), int(cells[4]), payload)
    except ValueError as error:
        raise ContractError(f"damaged frame of chunks: {line[:80]!r}") from error


def decode_frame(raw: bytes) -> Frame:
    """Decode one terminal frame.

    Raises:
        ContractMismatch: another contract version wrote it.
        ContractError: it is no frame, or damaged.
    """
    line, _, rest = raw.partition(b"\n")
    cells = line.decode("utf-8", "replace").split("|")
    if not cells[0].isdigit():
        raise ContractError(f"not a reply frame: {raw[:40]!r}")
    if int(cells[0]) != CONTRACT_VERSION:
        raise ContractMismatch(f"reply frame of contract {cells[0]}, this process speaks {CONTRACT_VERSION}")
    if len(cells) not in _FORMS:
        raise ContractError(f"reply frame with {len(cells)} fields, {_FIELDS} are expected")
    head, _, body = rest.partition(b"\n")
    try:
        reply = Reply(
            request_id=cells[3],
            ending=cells[4],
            pool_id=cells[5],
            attempt=int(cells[6]),
            head=_HEAD.decode(head) if head else ReplyHead(),
            body=body,
            queue_ms=int(cells[7]) if cells[7] else None,
            execution_ms=int(cells[8]) if cells[8] else None,
            tries=read_tries(cells[_TRIES]) if len(cells) > _TRIES else (),
        )
        return Frame(int(cells[1]), cells[2], cells[9] == "1", reply)
    except (ValueError, msgspec.DecodeError) as error:
        raise ContractError(f"damaged reply frame for request {cells[3]!r}: {error}") from error


class Delivered(msgspec.Struct, frozen=True):
    """What the header line of a terminal frame says of a reply that its producer has handed over.

    Times are milliseconds of the server's clock. `traceparent` is the producer's, "" = none.
    """

    request_id: str
    pool_id: str
    ending: str
    submitted_ms: int
    ended_ms: int
    traceparent: str


def read_delivered(line: bytes) -> Delivered | None:
    """Read the header line of a terminal frame; None = an older library pushed it, or it is none.

    Never raises: what cannot be read cannot be measured.
    """
    cells = line.decode("utf-8", "replace").split("|")
    if len(cells) != _FIELDS:
        return None
    try:
        submitted_ms, queue_ms = int(cells[_SUBMITTED]), int(cells[7])
        ended_ms = submitted_ms + queue_ms + (int(cells[8]) if cells[8] else 0)
    except ValueError:
        return None
    return Delivered(cells[3], cells[5], cells[4], submitted_ms, ended_ms, cells[_TRACEPARENT])


def read_tries(text: str) -> tuple[Attempt, ...]:
    """Return the earlier attempts that `text` (as of a frame, "" = none) tells of.

    Raises:
        ValueError: it is damaged.
    """
    return tuple(_attempt(*one.split(",")) for one in text.split(";")) if text else ()


def _attempt(*cells: str) -> Attempt:
    number, claimed_ms, ended_ms, status, *words = cells
    error_type, gateway_id, endpoint_id = words
    answered = int(status) if status else None
    return Attempt(int(number), int(claimed_ms), int(ended_ms), answered, error_type, gateway_id, endpoint_id)

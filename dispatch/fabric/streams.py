"""Streams of records, and who reads them: what is read, and how far a reader is."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

HISTORY = "history"
"""The consumer group whose records become history. Each sink has a group of its own, so none waits for another."""


class Reading(msgspec.Struct, frozen=True):
    """Who reads: a consumer of a consumer group; `count` records of each stream at most."""

    reader: str
    consumer: str
    count: int


class StreamEntry(msgspec.Struct, frozen=True):
    """One record of a stream: the stream's key, the record's id there, and its fields."""

    key: str
    entry_id: str
    fields: dict[bytes, bytes]


class Claimed(msgspec.Struct, frozen=True):
    """Records taken over from consumers that have not acknowledged them for long.

    `cursor`: where to go on ("0-0" = all were looked at). `deleted`: so many were trimmed, only their ids were left.
    """

    entries: list[StreamEntry]
    cursor: str
    deleted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A stream of records and its reader. Ids are the stream's, "" = there is none.

    `added` counts all records ever appended, `length` those that are there. `lag` is how many the reader has not read
    yet, `pending` how many it has and did not acknowledge; None = there is no such reader, or that cannot be said.
    `lost_now`: trimmed before they were read, found by this very call.
    """

    length: int
    added: int
    first_id: str
    last_id: str
    read_id: str
    lag: int | None
    pending: int | None
    lost_now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsState:
    """Answer of `records_watch`. `lost`: records of both streams, ever, trimmed before the reader came to them."""

    lost: int
    endings: StreamState
    deliveries: StreamState

"""Reading what the function library appends to the streams of endings and deliveries.

Fields that are missing or empty have their defaults. What cannot be read in one field (an envelope that is damaged,
which is why its request ended `malformed`) is left out; the record itself still counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from dispatch.contract import RequestEnvelope
from dispatch.contract.details import NO_DETAILS, AttemptDetails
from dispatch.errors import ContractError
from dispatch.fabric.frames import read_delivered, read_tries
from dispatch.telemetry.spans import DeliveryRecord, EndingRecord

Fields = Mapping[bytes, bytes]
T = TypeVar("T")

_ENVELOPE: msgspec.json.Decoder[RequestEnvelope | None] = msgspec.json.Decoder(RequestEnvelope)
_DETAILS = msgspec.json.Decoder(AttemptDetails)
_TRIED: msgspec.json.Decoder[tuple[AttemptDetails, ...]] = msgspec.json.Decoder(tuple[AttemptDetails, ...])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)


def read_ending(record_id: str, fields: Fields) -> EndingRecord:
    """Read one record of the endings stream.

    Raises:
        ContractError: it is none.
    """
    read = _Reader(fields)
    try:
        ending, ended_ms = read.text(b"ending"), int(fields[b"ended_ms"])
        return EndingRecord(
            record_id=record_id,
            ending=ending,
            outcome=read.text(b"outcome") or ending,
            pool_id=read.text(b"pool"),
            ended_ms=ended_ms,
            submitted_ms=read.whole(b"submitted_ms") or ended_ms,
            request_id=read.text(b"request_id"),
            producer_id=read.text(b"producer"),
            gateway_id=read.text(b"gateway"),
            dispatcher_id=read.text(b"dispatcher"),
            endpoint_id=read.text(b"endpoint"),
            attempt=read.whole(b"attempt") or 0,
            cost_units=read.whole(b"cost"),
            body_bytes=read.whole(b"bytes"),
            skip_reason=read.text(b"skip_reason"),
            claimed_ms=read.whole(b"claimed_ms"),
            status=read.whole(b"status"),
            error_type=read.text(b"error_type"),
            error_message=read.text(b"error_message"),
            input_tokens=read.whole(b"input_tokens"),
            output_tokens=read.whole(b"output_tokens"),
            chunks=read.whole(b"chunks") or 0,
            first_chunk_ms=read.whole(b"first_chunk_ms"),
            tries=read_tries(read.text(b"tries")),
            tried=_decoded(_TRIED, fields.get(b"tried", b""), ()),
            details=_decoded(_DETAILS, fields.get(b"details", b""), NO_DETAILS),
            envelope=_decoded(_ENVELOPE, fields.get(b"envelope", b""), None),
            left_out=read.whole(b"left_out") or 0,
        )
    except (KeyError, ValueError) as error:
        raise ContractError(f"damaged record of an ending {record_id}: {error}") from error


def read_deliveries(record_id: str, fields: Fields) -> list[DeliveryRecord]:
    """Read one record of the deliveries stream: the replies that one acknowledgement was about.

    Raises:
        ContractError: it is none.
    """
    read = _Reader(fields)
    try:
        acked_ms, lines = int(fields[b"at_ms"]), fields[b"frames"].split(b"\n")
    except (KeyError, ValueError) as error:
        raise ContractError(f"damaged record of a delivery {record_id}: {error}") from error
    producer_id = read.text(b"producer")
    return [
        DeliveryRecord(
            record_id=record_id,
            request_id=one.request_id,
            pool_id=one.pool_id,
            producer_id=producer_id,
            ending=one.ending,
            submitted_ms=one.submitted_ms,
            ended_ms=one.ended_ms,
            acked_ms=acked_ms,
            traceparent=one.traceparent,
        )
        for line in lines
        if (one := read_delivered(line)) is not None
    ]


class _Reader:
    """The fields of one record."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def text(self, name: bytes) -> str:
        return self._fields.get(name, b"").decode("utf-8", "replace")

    def whole(self, name: bytes) -> int | None:
        value = self._fields.get(name, b"")
        return int(float(value)) if value else None


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes, otherwise: T) -> T:
    """Return what a field holds; `otherwise` where it is empty or damaged."""
    try:
        return decoder.decode(raw) if raw else otherwise
    except _UNREADABLE:
        return otherwise

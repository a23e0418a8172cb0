"""Reading what travels beside a call's body. Values are bytes from anywhere: none is trusted or echoed as it came.

`X-Dispatch-Pool`        the pool (or the base URL `/pools/{pool}/v1`; both must agree; none = `default`)
`X-Dispatch-Timeout-Ms`  whole milliseconds from admission, 1 to 3,600,000
`X-Dispatch-Max-Wait-Ms`  do not queue longer than this: whole milliseconds, 1 to 3,600,000
`X-Dispatch-Fairness-Key`  a name: for whom the call is. The keys of one pool share it evenly
`X-Dispatch-Priority`    0 (first) to 3, among the calls of one key
`X-Dispatch-Metadata`    a JSON object of scalars; `image_count`, `page_count`, `chunk_page_count` and
                         `estimated_cost_units` feed the cost rule
`Idempotency-Key`        1 to 255 visible ASCII characters, in quotes (RFC 8941) or bare: a call that is repeated with
                         its key is made once
`X-Request-Id`           1 to 128 visible ASCII characters: recorded and echoed; anything else is replaced
`traceparent`, `tracestate`  W3C trace context, passed on; what does not follow that standard is ignored, as it says
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus

import msgspec

from dispatch.contract import Scalar, check_name
from dispatch.errors import InvalidRequest
from dispatch.producer.idempotency import KEY_FORM, check_key
from dispatch.producer.options import DEFAULT_POOL, METADATA_MAX_BYTES, METADATA_MAX_MEMBERS, PRIORITY_MAX, CallOptions

TIMEOUT_MAX_MS = 3_600_000

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_PRIORITY = re.compile(rb"[0-9]")
_TIMEOUT = re.compile(rb"[1-9][0-9]{0,6}")
_QUOTED_KEY = re.compile(rb'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_BARE_KEY = re.compile(rb"[\x21\x23-\x2b\x2d-\x5b\x5d-\x7e]+")  # no quote, backslash or comma: a list is no key
_ESCAPED = re.compile(rb"\\(.)")
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")
_METADATA = msgspec.json.Decoder(dict[str, str | int | float | bool | None])
_INTEGER_MAX = 2**63 - 1
_UNITS_MAX = 2**31 - 1

Headers = Mapping[bytes, tuple[bytes, ...]]


def collect(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return header fields by name in lower case; a field sent more than once has several values."""
    found: dict[bytes, tuple[bytes, ...]] = {}
    for name, value in raw:
        found[name] = (*found[name], value) if name in found else (value,)
    return found


def caller_request_id(headers: Headers) -> str | None:
    """Return the caller's own request id if it came once and is safe to echo, else None."""
    values = headers.get(b"x-request-id", ())
    if len(values) != 1 or _REQUEST_ID.fullmatch(values[0]) is None:
        return None
    return values[0].decode("ascii")


def check_form(headers: Headers) -> None:
    """Refuse a body that says it is no JSON, before a byte of it is read. One that says nothing is looked at.

    Raises:
        InvalidRequest: status 415.
    """
    for value in headers.get(b"content-type", ()):
        media = value.partition(b";")[0].strip().lower()
        if media and media != b"application/json" and not media.endswith(b"+json"):
            shown = media[:60].decode("ascii", "backslashreplace")
            raise _unsupported(f"content-type {shown} is not JSON; send application/json")
    for value in headers.get(b"content-encoding", ()):
        if value.strip().lower() not in (b"", b"identity"):
            raise _unsupported("a call's body must not be encoded; send it without content-encoding")


def call_options(
    headers: Headers, path_pool: str | None, admission_ms: int, *, default_pool: str = DEFAULT_POOL
) -> CallOptions:
    """Read the options of a call. One that names no pool goes to `default_pool`.

    Raises:
        InvalidRequest: a header is wrong; names it.
    """
    traceparent, tracestate = _trace(headers)
    return CallOptions(
        pool_id=_pool(headers, path_pool) or default_pool,
        idempotency_key=_idempotency_key(headers),
        timeout_ms=_timeout_ms(headers, b"x-dispatch-timeout-ms"),
        max_wait_ms=_timeout_ms(headers, b"x-dispatch-max-wait-ms"),
        fairness_key=_fairness_key(headers),
        priority=_priority(headers),
        metadata=_metadata(headers),
        admission_ms=admission_ms,
        caller_request_id=caller_request_id(headers),
        traceparent=traceparent,
        tracestate=tracestate,
    )


def _pool(headers: Headers, path_pool: str | None) -> str | None:
    value = _single(headers, b"x-dispatch-pool")
    pool = path_pool
    if value is not None:
        pool = value.decode("latin-1")
        if path_pool is not None and pool != path_pool:
            raise InvalidRequest(
                "the header X-Dispatch-Pool and the base URL name different pools", param="pool", code="pool_conflict"
            )
    return None if pool is None else check_name("pool", pool)


def _idempotency_key(headers: Headers) -> str | None:
    value = _single(headers, b"idempotency-key")
    if value is None:
        return None
    if (quoted := _QUOTED_KEY.fullmatch(value)) is not None:
        value = _ESCAPED.sub(rb"\1", quoted[1])
    elif _BARE_KEY.fullmatch(value) is None:
        value = b""
    try:
        key = value.decode("ascii")
        check_key(key)
    except InvalidRequest:
        raise _wrong("Idempotency-Key", f"must be {KEY_FORM}, as a string in quotes or bare") from None
    return key


def _timeout_ms(headers: Headers, name: bytes) -> int | None:
    value = _single(headers, name)
    if value is None:
        return None
    if _TIMEOUT.fullmatch(value) is None or int(value) > TIMEOUT_MAX_MS:
        raise _wrong(name.decode("ascii").title(), f"must be a whole number from 1 to {TIMEOUT_MAX_MS}")
    return int(value)


def _fairness_key(headers: Headers) -> str | None:
    value = _single(headers, b"x-dispatch-fairness-key")
    if value is None:
        return None
    try:
        return check_name("fairness_key", value.decode("latin-1"))
    except InvalidRequest:
        raise _wrong("X-Dispatch-Fairness-Key", "must be 1 to 128 of letters, digits, '.', '_', '-'") from None


def _priority(headers: Headers) -> int | None:
    value = _single(headers, b"x-dispatch-priority")
    if value is None:
        return None
    if _PRIORITY.fullmatch(value) is None or int(value) > PRIORITY_MAX:
        raise _wrong("X-Dispatch-Priority", f"must be a whole number from 0 (first) to {PRIORITY_MAX}")
    return int(value)


def _metadata(headers: Headers) -> Mapping[str, Scalar]:
    value = _single(headers, b"x-dispatch-metadata")
    if value is None:
        return {}
    name = "X-Dispatch-Metadata"
    if len(value) > METADATA_MAX_BYTES:
        raise _wrong(name, f"has {len(value)} bytes, at most {METADATA_MAX_BYTES} are allowed")
    try:
        metadata = _METADATA.decode(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise _wrong(name, "must be a JSON object of text, numbers, booleans and null") from None
    if len(metadata) > METADATA_MAX_MEMBERS:
        raise _wrong(name, f"has {len(metadata)} members, at most {METADATA_MAX_MEMBERS} are allowed")
    if any(isinstance(item, int) and abs(item) > _INTEGER_MAX for item in metadata.values()):
        raise _wrong(name, "holds an integer beyond 64 bits")
    units = metadata.get("estimated_cost_units")
    if type(units) is int:  # the cost rule brings it into its own bounds anyway
        metadata["estimated_cost_units"] = min(max(units, 0), _UNITS_MAX)
    return metadata


def _trace(headers: Headers) -> tuple[str | None, str | None]:
    parents = headers.get(b"traceparent", ())
    if len(parents) != 1 or _TRACEPARENT.fullmatch(parents[0]) is None:
        return None, None
    state = b",".join(headers.get(b"tracestate", ()))
    return parents[0].decode("ascii"), state.decode("ascii") if _TRACESTATE.fullmatch(state) else None


def _single(headers: Headers, name: bytes) -> bytes | None:
    values = headers.get(name, ())
    if len(values) > 1:
        raise _wrong(name.decode("ascii").title(), "was sent more than once")
    return values[0].strip() if values else None


def _wrong(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"the header {name} {what}", param=name.lower(), code="invalid_header")


def _unsupported(message: str) -> InvalidRequest:
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    return InvalidRequest(message, code="unsupported_media_type", status=status)

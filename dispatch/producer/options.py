"""What a client and a single call can be told; checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypedDict

import msgspec

from dispatch.contract import Scalar, check_name
from dispatch.errors import ConfigurationError, InvalidRequest
from dispatch.fabric.schema import LIMITS
from dispatch.producer.idempotency import check_key

if TYPE_CHECKING:  # the HTTP stack is loaded by clients that call an endpoint themselves, not by every producer
    from dispatch.backend.endpoint import Endpoint

DEFAULT_POOL = "default"
_TIMEOUT_MS_MAX = 2**31 - 1
_UNITS_MAX = 2**31 - 1
PRIORITY_MAX = LIMITS["priority_levels"] - 1
METADATA_MAX_BYTES = 8_192
"""Of a call's metadata as JSON. It stands in the record of its ending, with those of many others."""
METADATA_MAX_MEMBERS = 64
_INTEGER_MAX = 2**63 - 1

_WHOLE_OPTIONS = (
    "liveness_ms",
    "replies_ttl_ms",
    "admission_ms",
    "close_ms",
    "stream_unread_bytes",
    "streams_unread_bytes",
)

ClientName = Literal["glide", "redis"]


class ClientKeywords(TypedDict, total=False):
    """The keyword arguments of both clients: the members of `ClientOptions`, all optional."""

    fabric_group: str
    producer_id: str | None
    direct: bool
    endpoint: str | Endpoint | None
    client: ClientName
    liveness_ms: int
    replies_ttl_ms: int
    admission_ms: int
    close_ms: int
    stream_unread_bytes: int
    streams_unread_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves.

    `producer_id` None = one is made up; a given one belongs to one client at a time (the newest takes it over).
    `direct` sends calls straight to `endpoint` (a base URL or an `Endpoint`) without a queue; no Valkey is used.
    `client` is the Valkey client of the asynchronous data path.
    `liveness_ms` is how long the group takes this producer for alive after its last sign; a sign goes out at a third.
    `replies_ttl_ms` is how long replies wait for a producer that does not read.
    `admission_ms` bounds how long a submit whose answer was lost is repeated (or the call's timeout, if shorter). It
    stays below the time a group remembers an ended request (60 s), so that a repeat can never be a second request. The
    wait behind other requests of this client does not count while the server answers those.
    `close_ms` bounds how long closing waits for outstanding requests to be cancelled.
    `stream_unread_bytes` bounds how much of one stream may wait to be read, beyond a single chunk, and
    `streams_unread_bytes` how much of all together: a stream that is too far behind is stopped (`StreamTooSlow`).
    """

    fabric_group: str = "default"
    producer_id: str | None = None
    direct: bool = False
    endpoint: str | Endpoint | None = None
    client: ClientName = "glide"
    liveness_ms: int = 30_000
    replies_ttl_ms: int = 300_000
    admission_ms: int = 50_000
    close_ms: int = 2_000
    stream_unread_bytes: int = 8 * 1024 * 1024
    streams_unread_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        _check_text_name("fabric_group", self.fabric_group)
        if self.producer_id is not None:
            _check_text_name("producer_id", self.producer_id)
        if self.direct and self.endpoint is None:
            raise ConfigurationError("direct=True needs an endpoint: a base URL such as http://127.0.0.1:9000/v1")
        if self.endpoint is not None and not self.direct:
            raise ConfigurationError("endpoint is only for direct=True: a queued call goes where its pool points")
        if self.client not in ("glide", "redis"):
            raise ConfigurationError(f"client is {self.client!r}, allowed are 'glide' and 'redis'")
        for name in _WHOLE_OPTIONS:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                unit = "milliseconds" if name.endswith("_ms") else "bytes"
                raise ConfigurationError(f"{name} is {value!r}, it must be a whole number of {unit}, at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What travels beside one call's body.

    `request_id` None = one is made up; a given one counts as an idempotency key, too, unless a stream is asked for.
    `idempotency_key`: the group makes the call once, and whoever repeats it with this key (also elsewhere, also when
    the first caller is gone) gets the stored reply, until `idempotency_ttl_ms` after its end. The call is not cancelled
    when its caller leaves. A stream takes no such key. `scope` parts callers whose keys must not meet (the id of an API
    key).
    `timeout_ms` None = the pool's default; it counts from admission.
    `metadata` is for operators and for the cost rule (`image_count`, `chunk_page_count`, `page_count`,
    `estimated_cost_units`); it is never part of the body. `admission_ms` None = the client's.
    `fairness_key` says for whom the call is: the keys of one pool share it evenly (None = one key for all without).
    `priority` orders the calls of one key: 0 first to 3, None = the usual (1); what waits long goes first anyway.
    `max_wait_ms`: do not queue longer than this; a call that was not launched by then ends `expired` (None = its
    deadline alone). `wait_for_room`: a call that is refused because pool or group is full is submitted again, as soon
    as the refusal says or after growing pauses, until it is admitted. All that waiting counts as a part of
    `timeout_ms`, which is needed; when the next try would come after it, the refusal is raised at once.
    `traceparent` None = that of the current OpenTelemetry span, if there is one.
    `detached`: nobody waits for the reply; the group keeps it to be fetched by the request's id.
    """

    pool_id: str = DEFAULT_POOL
    request_id: str | None = None
    idempotency_key: str | None = None
    scope: str = ""
    timeout_ms: int | None = None
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    estimated_cost_units: int | None = None
    admission_ms: int | None = None
    fairness_key: str | None = None
    priority: int | None = None
    caller_request_id: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    detached: bool = False
    max_wait_ms: int | None = None
    wait_for_room: bool = False

    def __post_init__(self) -> None:
        _check_text_name("pool", self.pool_id)
        for name in ("request_id", "fairness_key"):
            if getattr(self, name) is not None:
                _check_text_name(name, getattr(self, name))
        if self.idempotency_key is not None:
            check_key(self.idempotency_key)
        if self.priority is not None and (type(self.priority) is not int or not 0 <= self.priority <= PRIORITY_MAX):
            message = f"priority is {self.priority!r}: a whole number from 0 (first) to {PRIORITY_MAX} is allowed"
            raise InvalidRequest(message, param="priority", code="invalid_value")
        for name in ("timeout_ms", "admission_ms", "max_wait_ms"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= _TIMEOUT_MS_MAX):
                message = f"{name} is {value!r}: a whole number from 1 to {_TIMEOUT_MS_MAX} is allowed"
                raise InvalidRequest(message, param=name, code="invalid_value")
        if self.wait_for_room and self.timeout_ms is None:
            message = "wait_for_room waits within the call's timeout, and none is given"
            raise InvalidRequest(message, param="timeout", code="missing_required_parameter")
        whole_units("cost", self.estimated_cost_units)
        if self.metadata:
            _check_metadata(self.metadata)


def timeout_ms(seconds: float | None, name: str = "timeout") -> int | None:
    """Return `seconds` (the argument `name`) as whole milliseconds, rounded up; None stays None.

    Raises:
        InvalidRequest: no number, not finite, not above 0, or more than about 24 days.
    """
    if seconds is None:
        return None
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= _TIMEOUT_MS_MAX / 1000:
        return math.ceil(seconds * 1000)
    raise InvalidRequest(
        f"{name} is {seconds!r}: seconds above 0 and at most {_TIMEOUT_MS_MAX // 1000} are allowed",
        param=name,
        code="invalid_value",
    )


def whole_units(name: str, value: object) -> int | None:
    """Return `value` if it is a whole number >= 0 that the cost rule can use; None stays None.

    Raises:
        InvalidRequest: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _UNITS_MAX:
        return value
    raise InvalidRequest(
        f"{name} is {value!r}: a whole number from 0 to {_UNITS_MAX} is allowed", param=name, code="invalid_value"
    )


def require_url(url: str) -> str:
    """Return `url`.

    Raises:
        ConfigurationError: it is empty.
    """
    if not url:
        raise ConfigurationError("the Valkey URL is missing: DispatchClient('valkey://host:6379', fabric_group=...)")
    return url


def _check_metadata(metadata: Mapping[str, Scalar]) -> None:
    if len(metadata) > METADATA_MAX_MEMBERS:
        raise _wrong_metadata(f"has {len(metadata)} members, at most {METADATA_MAX_MEMBERS} are allowed")
    for name, item in metadata.items():
        if not isinstance(name, str) or not isinstance(item, str | int | float | bool | None):
            message = f"{name!r} is {type(item).__name__}: only text, numbers, booleans and null are allowed"
            raise _wrong_metadata(message, name, code="invalid_type")
        if isinstance(item, float) and not math.isfinite(item):
            raise _wrong_metadata(f"{name!r} is {item}: it must be finite", name)
        if isinstance(item, int) and abs(item) > _INTEGER_MAX:
            raise _wrong_metadata(f"{name!r} is an integer beyond 64 bits", name)
    try:
        size = len(msgspec.json.encode(metadata))
    except UnicodeEncodeError:
        raise _wrong_metadata("holds half a surrogate pair, which is no text") from None
    if size > METADATA_MAX_BYTES:
        raise _wrong_metadata(f"has {size} bytes as JSON, at most {METADATA_MAX_BYTES} are allowed")


def _wrong_metadata(what: str, name: object = None, *, code: str = "invalid_value") -> InvalidRequest:
    param = "metadata" if name is None else f"metadata.{name}"
    return InvalidRequest(f"metadata {what}", param=param, code=code)


def _check_text_name(kind: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{kind} is {value!r}: text is expected", param=kind, code="invalid_type")
    check_name(kind, value)

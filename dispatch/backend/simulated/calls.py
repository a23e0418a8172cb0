"""Reading a call as an engine would: only what decides its reply."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import msgspec

from dispatch.backend.document import without_lone_surrogates
from dispatch.backend.simulated.behaviour import PLAIN, Behaviour
from dispatch.contract import Operation

_MAX_CHOICES = 128
_BYTES_PER_TOKEN = 4


class CallRefused(Exception):
    """The call is answered with an OpenAI error of this status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True):
    model: str
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stream_options: _StreamOptions | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    simulate: Behaviour | None = None
    metadata: msgspec.Raw = msgspec.Raw()


class SimulatedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call. `limit` is the caller's bound of output tokens; `seed` comes from the body: equal calls are equal."""

    operation: Operation
    model: str
    body: bytes
    content: msgspec.Raw
    items: int
    stream: bool
    include_usage: bool
    choices: int
    limit: int | None
    dimensions: int
    base64: bool
    behaviour: Behaviour
    request_id: str

    @property
    def prompt_tokens(self) -> int:
        """A rough count, the same for the same content."""
        return max(1, memoryview(self.content).nbytes // _BYTES_PER_TOKEN)

    @property
    def is_plain(self) -> bool:
        """Whether it asks for nothing that takes time or goes wrong."""
        plain = self.behaviour is PLAIN or not (self.behaviour.has_fault or self.behaviour.takes_time)
        return plain and not self.stream

    @property
    def seed(self) -> int:
        """A number that stands for the body."""
        return zlib.crc32(self.body)


_decode = msgspec.json.Decoder(_Body).decode


def read_simulated_call(operation: Operation, body: bytes, header_id: str = "") -> SimulatedCall:
    """Read a call. Its id for the statistics: `simulate.id`, `metadata.request_id`, or the header's.

    Raises:
        CallRefused: 400, with a sentence that says what is wrong.
    """
    try:
        found = _decode(body)
    except msgspec.ValidationError as error:
        raise CallRefused(400, str(error)) from None
    except msgspec.DecodeError:
        found = _decode_patiently(body)
    except RecursionError:
        raise CallRefused(400, "the body is nested too deeply") from None
    content: msgspec.Raw = getattr(found, operation.main_member)
    if not memoryview(content).nbytes:
        raise CallRefused(400, f"the member {operation.main_member!r} is missing", param=operation.main_member)
    choices = 1 if found.n is None else found.n
    if not 1 <= choices <= _MAX_CHOICES:
        raise CallRefused(400, f"'n' must be 1 to {_MAX_CHOICES}", param="n")
    limits = [found.max_completion_tokens, found.max_tokens, found.max_output_tokens]
    limit = next((value for value in limits if value is not None), None)
    if limit is not None and limit < 1:
        raise CallRefused(400, "the bound of output tokens must be at least 1", param="max_tokens")
    behaviour = found.simulate or PLAIN
    return SimulatedCall(
        operation=operation,
        model=found.model,
        body=body,
        content=content,
        items=_count_items(operation, content),
        stream=bool(found.stream),
        include_usage=bool(found.stream_options and found.stream_options.include_usage),
        choices=choices,
        limit=limit,
        dimensions=16 if found.dimensions is None else min(max(found.dimensions, 1), 4096),
        base64=found.encoding_format == "base64",
        behaviour=behaviour,
        request_id=behaviour.id or _id_in(found.metadata) or header_id,
    )


def _decode_patiently(body: bytes) -> _Body:
    try:
        return _decode(without_lone_surrogates(body))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CallRefused(400, f"the body is no JSON: {error}") from None


def _count_items(operation: Operation, content: msgspec.Raw) -> int:
    """Return how many texts an embeddings call holds (one text, or a list of texts or of token lists)."""
    if operation is not Operation.EMBEDDINGS:
        return 1
    items = _any(content)
    nested = isinstance(items, list) and bool(items) and not isinstance(items[0], int)
    return len(items) if nested else 1


def _id_in(metadata: msgspec.Raw) -> str:
    members = _any(metadata) if memoryview(metadata).nbytes else None
    value = members.get("request_id", "") if isinstance(members, dict) else ""
    return value if isinstance(value, str) else ""


def _any(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None

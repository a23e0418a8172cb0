"""What the events of a stream mean, by operation: payloads to pass on, facts, and what makes a stream complete.

The rules (readings chosen where standards are silent):

- Chat completions and completions: every event is a JSON object, passed on byte for byte; `[DONE]` ends the stream. It
  is complete when every choice that began has a `finish_reason`, whether `[DONE]` comes or not; `[DONE]` without that
  makes no stream complete. Event names say nothing, except `error`.
- Responses: typed events, whose names are kept (where there is none, or of two only one says that the stream ends, the
  data's `type` is the name).
  `response.completed` and `response.incomplete` (a bound was reached: the model's own end) complete the stream,
  `response.failed` and `error` end it as failed; these two are passed on as well, they are how this protocol tells the
  caller. A `[DONE]`, which some backends add, ends it too and is not passed on.
- An error in any form (`error` object or sentence, `object: error`, an event named `error`) ends the stream, wherever
  it comes, also after a `finish_reason`; outside of the typed forms above it is not passed on: our own event tells it.
- Data that is no JSON object ends the stream.
- Usage is the last that was said, in a chunk of its own or in all of them: never a sum.

Data over several `data` lines becomes one line. That changes white space between JSON tokens only: inside a string a
line end is no JSON.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from dispatch.backend.document import (
    Document,
    ReportedError,
    clean,
    error_in_success,
    finish_reasons_in,
    id_of,
    model_of,
    read_document,
    reported_error,
    truthy,
    usage_in,
    usage_of,
)
from dispatch.backend.events import Event
from dispatch.contract import Call, Operation, Usage

_LINE_END = b"\n"
_BRACE = ord("{")
_DONE = b"[DONE]"
_DONE_MAX_BYTES = 64
_REASONS_MAX = 128
_WORD_LENGTH = 128
_SENTENCE_LENGTH = 2_000
_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class Payload(msgspec.Struct, frozen=True, gc=False):
    """One chunk for the caller: JSON in one line, as the backend wrote it. `event` is "" where events have no names."""

    data: bytes
    event: str = ""


class StreamEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing that follows counts: the end was said, an error was reported, or something came that is no chunk.

    `told`: the error stands in the last payload.
    """

    kind: Literal["done", "error", "unreadable"]
    error: ReportedError | None = None
    told: bool = False


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    """The members of a chunk that are looked at; anything of another type is read patiently instead."""

    choices: list[_Choice] | None = None
    usage: dict[str, Raw] | None = None
    error: Raw | UnsetType = UNSET
    object: str | None = None
    model: str | None = None
    id: str | None = None


class _Typed(msgspec.Struct, gc=False):
    """The members of a typed event that are looked at."""

    type: str | None = None
    response: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_typed = msgspec.json.Decoder(_Typed).decode
_UNREADABLE = StreamEnd(kind="unreadable")


class ChunkReader:
    """Reads one stream's events in order. What it has learned so far can be asked for at any time."""

    __slots__ = ("complete", "end", "model", "response_id")

    wanted = ""
    """What a stream that was cut lacks, in words."""

    def __init__(self) -> None:
        self.complete = False
        """Whether all that the caller needs has come."""
        self.end: StreamEnd | None = None
        self.model: str | None = None
        self.response_id: str | None = None

    def read(self, event: Event) -> Payload | None:
        """Return what the caller gets of an event, None if nothing; sets `end` when it is the last that counts."""
        raise NotImplementedError

    @property
    def usage(self) -> Usage | None:
        """The tokens as last reported."""
        raise NotImplementedError

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """The finish reasons by choice index; "" where one choice of several has none, () where none has one."""
        return ()

    def has_all(self, call: Call) -> bool:
        """Say whether nothing more can be expected of a complete stream, by what `call` asked for."""
        raise NotImplementedError

    def _say_done(self, data: bytes) -> bool:
        if len(data) <= _DONE_MAX_BYTES and data.strip() == _DONE:
            self.end = StreamEnd(kind="done")
            return True
        return False

    def _report(self, data: bytes, *, told: bool = False) -> None:
        """End with the error that `data` tells, whatever it is: an object in any form, or a sentence."""
        document = read_document(data)
        if document is None:
            error = ReportedError(message=clean(data.decode("utf-8", "replace"), _SENTENCE_LENGTH))
        else:
            error = reported_error(document)
        self.end = StreamEnd(kind="error", error=error, told=told)


def chunk_reader(operation: Operation) -> ChunkReader:
    """Return a reader for one stream of an operation.

    Raises:
        ValueError: the operation has no stream form.
    """
    if operation is Operation.RESPONSES:
        return _TypedReader()
    if operation in {Operation.CHAT_COMPLETIONS, Operation.COMPLETIONS}:
        return _ChoiceReader()
    raise ValueError(f"{operation.value} has no stream form; execute it")


class _ChoiceReader(ChunkReader):
    """Chat completions and completions."""

    __slots__ = ("_reasons", "_unfinished", "_usage")

    wanted = "a finish_reason"

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[Any, str] = {}  # by choice index; "" = begun
        self._unfinished = 0
        self._usage: dict[str, Raw] | Usage | None = None

    def read(self, event: Event) -> Payload | None:
        data = event.data
        if data[0] != _BRACE and self._say_done(data):
            return None
        if event.name == b"error":
            self._report(data)
            return None
        try:
            chunk = _decode_chunk(data)
            if not data.isascii():
                data.decode()
        except UnicodeDecodeError:
            self.end = _UNREADABLE
            return None
        except (msgspec.MsgspecError, RecursionError):
            if not self._read_patiently(data):
                return None
        else:
            if (chunk.error is not UNSET and truthy(chunk.error)) or chunk.object == "error":
                self._report(data)
                return None
            if self.response_id is None:
                self.response_id = clean(chunk.id, _WORD_LENGTH) or None
            if self.model is None:
                self.model = clean(chunk.model, _WORD_LENGTH) or None
            for choice in chunk.choices or ():
                self._note(choice.index, choice.finish_reason)
            if chunk.usage:
                self._usage = chunk.usage
        return Payload(_one_line(data) if _LINE_END in data else data)

    def _read_patiently(self, data: bytes) -> bool:
        """Read an object with members of unexpected types; say whether it is one for the caller."""
        document = read_document(data)
        if document is None:
            self.end = _UNREADABLE
            return False
        error = error_in_success(document)
        if error is not None:
            self.end = StreamEnd(kind="error", error=error)
            return False
        self.response_id = self.response_id or id_of(document)
        self.model = self.model or model_of(document)
        for index, reason in finish_reasons_in(document):
            self._note(index, reason)
        self._usage = usage_of(document) or self._usage
        return True

    def _note(self, index: Any, reason: str | None) -> None:
        known = self._reasons.get(index)
        if reason:
            self._reasons[index] = reason
            self._unfinished -= known == ""
        elif known is None:
            self._reasons[index] = ""
            self._unfinished += 1
        else:
            return
        self.complete = self._unfinished == 0

    @property
    def usage(self) -> Usage | None:
        return usage_in(self._usage) if isinstance(self._usage, dict) else self._usage

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        found = list(self._reasons.items())
        if all(type(index) is int for index, _ in found):
            found.sort()
        reasons = tuple(clean(reason, _WORD_LENGTH) for _, reason in found[:_REASONS_MAX])
        return reasons if any(reasons) else ()

    def has_all(self, call: Call) -> bool:
        return len(self._reasons) >= _choices_asked_for(call)


class _TypedReader(ChunkReader):
    """Responses."""

    __slots__ = ("_usage",)

    wanted = "response.completed, response.incomplete or response.failed"

    def __init__(self) -> None:
        super().__init__()
        self._usage: Usage | None = None

    def read(self, event: Event) -> Payload | None:
        data = event.data
        if data[0] != _BRACE and self._say_done(data):
            return None
        try:
            typed = _decode_typed(data)
            if not data.isascii():
                data.decode()
        except UnicodeDecodeError:
            self.end = _UNREADABLE
            return None
        except (msgspec.MsgspecError, RecursionError):
            typed = _Typed()
            if event.name == b"error":
                self._report(data)
                return None
            if read_document(data) is None:
                self.end = _UNREADABLE
                return None
        name = _name(event.name) or clean(typed.type, _WORD_LENGTH)
        kind = typed.type or name
        if (typed.error is not UNSET and truthy(typed.error)) or (name == "error" and kind != name):
            self._report(data)
            return None
        if kind == "error" or kind in _RESPONSE_ENDS or name in _RESPONSE_ENDS:
            name = kind  # some clients go by the name, some by the type: both are told the same end
        if kind == "error":
            self._report(data, told=True)
        elif kind in _RESPONSE_ENDS or self.model is None:
            self._read_response(kind, typed.response)
        return Payload(_one_line(data) if _LINE_END in data else data, name)

    def _read_response(self, kind: str, response: Raw | UnsetType) -> None:
        document = (None if response is UNSET else read_document(bytes(response))) or Document()
        self.model = model_of(document) or self.model
        self.response_id = id_of(document) or self.response_id
        self._usage = usage_of(document) or self._usage
        if kind == "response.failed":
            self.end = StreamEnd(kind="error", error=reported_error(document), told=True)
        elif kind in _RESPONSE_ENDS:
            self.complete = True
            self.end = StreamEnd(kind="done")

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def has_all(self, call: Call) -> bool:  # noqa: ARG002 - one response is all there can be
        return self.complete


class _Asked(msgspec.Struct):
    n: int | None = None
    prompt: Any = None


_decode_asked = msgspec.json.Decoder(_Asked).decode


def _choices_asked_for(call: Call) -> float:
    """Return how many choices `call` wants, infinity where its body does not say so in a form that we know."""
    try:
        asked = _decode_asked(call.body)
    except (msgspec.MsgspecError, RecursionError):
        return float("inf")
    prompts = 1
    if call.operation is Operation.COMPLETIONS and isinstance(asked.prompt, list):
        several = bool(asked.prompt) and not isinstance(asked.prompt[0], int)
        prompts = len(asked.prompt) if several else 1
    return (1 if asked.n is None else asked.n) * prompts


@functools.lru_cache(maxsize=256)
def _name(name: bytes) -> str:
    return clean(name.decode("utf-8", "replace"), _WORD_LENGTH)


def _one_line(data: bytes) -> bytes:
    return data.replace(_LINE_END, b" ").strip()

"""Reading an endpoint's JSON body: is it one, does it report an error, and what facts stand in it.

Only the few members that the runtime needs are decoded; the bytes travel on untouched. Strict as RFC 8259 (no NaN),
but a lone surrogate escape is allowed there, though our decoder refuses it: such a body is read from a copy without
them. Nothing here raises for what a backend wrote.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import msgspec

from dispatch.contract import Usage

_BOM = b"\xef\xbb\xbf"
_ABSENT = msgspec.Raw(b"null")
_UTF8_PIECE_BYTES = 256 * 1024
_MAX_TOKENS = 1_000_000_000_000
_MAX_WORD_LENGTH = 128
_MAX_SENTENCE_LENGTH = 2_000
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
"""A whole surrogate pair, half of one (group 1), or any other escape (so that an escaped backslash hides what
follows)."""

_WORD = re.compile(r"[A-Za-z0-9_.:/-]{1,64}", re.ASCII)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a reply's top level that are looked at, each still as it was written; absent ones are `null`."""

    choices: msgspec.Raw = _ABSENT
    usage: msgspec.Raw = _ABSENT
    error: msgspec.Raw = _ABSENT
    object: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    status: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    code: msgspec.Raw = _ABSENT
    type: msgspec.Raw = _ABSENT
    param: msgspec.Raw = _ABSENT
    detail: msgspec.Raw = _ABSENT


class ReportedError(msgspec.Struct, frozen=True, kw_only=True):
    """An error that a body reports, in whatever form. `message` is the backend's own sentence: for the caller alone."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None

    @property
    def status(self) -> int | None:
        """The HTTP status that `code` names, if it does."""
        return int(self.code) if self.code is not None and re.fullmatch(r"[45][0-9]{2}", self.code, re.ASCII) else None


class _Choice(msgspec.Struct, frozen=True):
    index: Any = None
    finish_reason: Any = None


_decode = msgspec.json.Decoder(Document).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_choices = msgspec.json.Decoder(list[_Choice]).decode


def read_document(body: bytes) -> Document | None:
    """Return the body's top level, or None when it is no JSON object (empty, cut, HTML, a bare value, not UTF-8)."""
    body = body.removeprefix(_BOM)
    if not _is_utf8(body):
        return None
    try:
        return _decode(body)
    except (msgspec.ValidationError, RecursionError):
        return None
    except msgspec.DecodeError:
        pass
    try:
        return _decode(without_lone_surrogates(body))
    except (msgspec.MsgspecError, RecursionError):
        return None


def _is_utf8(body: bytes) -> bool:
    """Check the bytes that the decoder skips; piece by piece, as a text takes up to four times its bytes."""
    if body.isascii():
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(body)
    try:
        for start in range(0, len(view), _UTF8_PIECE_BYTES):
            decoder.decode(view[start : start + _UTF8_PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def without_lone_surrogates(body: bytes) -> bytes:
    """Return a copy for reading in which halves of surrogate pairs are U+FFFD; whole pairs and other escapes stay."""
    return _ESCAPE.sub(lambda found: b"\\ufffd" if found[1] else found[0], body)


def usage_of(document: Document) -> Usage | None:
    """Return the tokens that the body reports: chat (`prompt_tokens`) or responses (`input_tokens`) names.

    A number that cannot be one (negative, beyond 10^12, a string, a fraction) is unknown; None = nothing is known.
    """
    try:
        return usage_in(_decode_members(document.usage))
    except (msgspec.MsgspecError, RecursionError):
        return None


def usage_in(members: dict[str, msgspec.Raw]) -> Usage | None:
    """Return the tokens that the members of a `usage` object report; as `usage_of`."""
    usage = Usage(
        input_tokens=_tokens(members, "prompt_tokens", "input_tokens"),
        output_tokens=_tokens(members, "completion_tokens", "output_tokens"),
        cached_input_tokens=_detail(members, "cached_tokens", "prompt_tokens_details", "input_tokens_details"),
        reasoning_output_tokens=_detail(
            members, "reasoning_tokens", "completion_tokens_details", "output_tokens_details"
        ),
    )
    return None if usage == Usage() else usage


def _tokens(fields: dict[str, msgspec.Raw], *names: str) -> int | None:
    for name in names:
        value = _value(fields.get(name, _ABSENT))
        if type(value) is int and 0 <= value <= _MAX_TOKENS:
            return value
    return None


def _detail(members: dict[str, msgspec.Raw], name: str, *groups: str) -> int | None:
    for group in groups:
        raw = members.get(group)
        if raw is not None:
            try:
                return _tokens(_decode_members(raw), name)
            except (msgspec.MsgspecError, RecursionError):
                return None
    return None


def finish_reasons_of(document: Document) -> tuple[str, ...]:
    """Return the finish reasons by choice index; "" where one choice of several has none, () where none has one."""
    reasons = tuple(reason for _, reason in sorted(finish_reasons_in(document)))
    return reasons if any(reasons) else ()


def finish_reasons_in(document: Document) -> list[tuple[int, str]]:
    """Return index and finish reason ("" = none) of the choices; their place counts where one says no index."""
    try:
        choices = _decode_choices(document.choices)
    except (msgspec.MsgspecError, RecursionError):
        return []
    indexed = all(type(choice.index) is int for choice in choices)
    return [
        (choice.index if indexed else place, clean(choice.finish_reason, _MAX_WORD_LENGTH))
        for place, choice in enumerate(choices)
    ]


def model_of(document: Document) -> str | None:
    """Return the model that answered, cleaned and cut to 128 characters; None when the body names none."""
    return clean(_value(document.model), _MAX_WORD_LENGTH) or None


def id_of(document: Document) -> str | None:
    """Return the answer's own id, cleaned and cut to 128 characters; None when the body names none."""
    return clean(_value(document.id), _MAX_WORD_LENGTH) or None


def error_in_success(document: Document) -> ReportedError | None:
    """Return the error that a body sent with status 200 reports, None when it reports none.

    Forms: `{"error": ...}` (object or sentence), `{"object": "error", ...}` and a Responses object of status `failed`.
    """
    if (
        truthy(document.error)
        or _value(document.object) == "error"
        or (_value(document.object) == "response" and _value(document.status) == "failed")
    ):
        return reported_error(document)
    return None


def reported_error(document: Document) -> ReportedError:
    """Return what an error body says, from the forms in use: OpenAI, flat (older vLLM), a sentence (TGI), `detail`."""
    error = _value(document.error)
    if isinstance(error, dict):
        fields: dict[str, Any] = error
    else:
        fields = {name: _value(getattr(document, name)) for name in ("message", "type", "param", "code")}
        if isinstance(error, str) and error:
            fields["message"] = error
    message = fields.get("message")
    if not isinstance(message, str) or not message:
        detail = _value(document.detail)
        message = detail if isinstance(detail, str) else ""
    return ReportedError(
        message=clean(message, _MAX_SENTENCE_LENGTH),
        type=_word(fields.get("type")),
        param=_word(fields.get("param")),
        code=_word(fields.get("code")),
    )


def truthy(raw: msgspec.Raw) -> bool:
    """Say whether a member is there and says something (not null, false, 0, "", {} or [])."""
    return bool(_value(raw))


def clean(value: Any, length: int) -> str:
    """Return a string without lone surrogates and control characters, cut to `length`; "" if it is no string."""
    if not isinstance(value, str) or not value:
        return ""
    if value.isascii() and value.isprintable():  # nearly all are
        return value[:length].strip()
    text = value[:length].encode("utf-8", "replace").decode("utf-8")
    return "".join(character if character.isprintable() else " " for character in text).strip()


def _word(value: Any) -> str | None:
    text = str(value) if type(value) is int else value
    return text if isinstance(text, str) and _WORD.fullmatch(text) else None


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None

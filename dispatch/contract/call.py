"""Reading a call's body: only what the runtime must know, without changing a byte.

The body goes to the endpoint as the caller sent it, so our view of it must be the one the endpoint's parser will have.
Hence the strictness: RFC 8259 by the letter (UTF-8 without a mark, no NaN, one document), and no member that we read
may stand there twice, because parsers differ in which of the two they take. What we do not read is not judged: numbers
of any size, unknown members and their duplicates pass through, and so do escapes of half a surrogate pair, which the
grammar allows and our decoder does not: such a body is read from a copy without them.
"""

from __future__ import annotations

import re

import msgspec

from dispatch.contract.envelope import Operation
from dispatch.contract.parts import count_messages, first_byte
from dispatch.errors import InvalidRequest

MODEL_MAX_LENGTH = 512
"""Longest model name in characters; it labels records, so it must not be a document."""

MEMBERS_MAX = 65_536
"""Most members at the top of a body; bounds what one body can cost to read."""

_UTF8_PIECE_BYTES = 262_144
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_MISSING = msgspec.Raw()
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_NOT_FINITE = re.compile(rb"NaN|Infinity")
_LONE_HIGH = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_LONE_LOW = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_REPLACEMENT = rb"\\ufffd"  # as a template of re

_MAIN_MEMBER_STARTS = {
    Operation.CHAT_COMPLETIONS: (b"[", "an array"),
    Operation.COMPLETIONS: (b'["n', "a string, an array or null"),
    Operation.EMBEDDINGS: (b'["', "a string or an array"),
    Operation.RESPONSES: (b'["', "a string or an array"),
}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One OpenAI-compatible call: the body as sent, and what was read out of it.

    `message_count` is None where the operation has no messages. `image_count` counts image parts of the content.
    `traceparent` and `tracestate` are the W3C trace context that is sent on with it; None = none is.
    """

    operation: Operation
    body: bytes
    model: str
    stream: bool = False
    message_count: int | None = None
    image_count: int = 0
    traceparent: str | None = None
    tracestate: str | None = None


def read_call(operation: Operation, body: bytes) -> Call:
    """Check `body` and read model, stream mode and counts out of it; the bytes stay as they are.

    Raises:
        InvalidRequest: not JSON, not an object, no usable `model` or main member, duplicate keys among those read,
            non-finite numbers, nesting too deep. Names the member.
    """
    _check_utf8(body)
    main = operation.main_member
    try:
        members = _read_members(body, ("model", "stream", main))
        if members["model"] is _MISSING and members[main] is _MISSING:
            raise InvalidRequest(f"the members 'model' and {main!r} are missing", code="missing_member")
        model = _model(members["model"])
        stream = _stream(members["stream"])
        content = _content(operation, members[main])
        message_count, image_count = count_messages(operation, content, body)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="nested_too_deep") from None
    return Call(
        operation=operation,
        body=body,
        model=model,
        stream=stream,
        message_count=message_count,
        image_count=image_count,
    )


class _Name:
    """A member's name as a dict key that equals itself alone, so that a second member of that name is kept too."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _TooManyMembers(Exception):
    """Stops the decoder."""


class _Names:
    """Makes the keys of one body and stops at the bound."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MEMBERS_MAX

    def take(self, _type: type, text: str) -> _Name:
        self.left -= 1
        if self.left < 0:
            raise _TooManyMembers
        return _Name(text)


def _read_members(body: bytes, wanted: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    """Return the wanted members' raw values (views into `body`); those that are not there are `_MISSING`.

    Names are compared as decoded, so a name spelled with escapes counts.
    """
    try:
        members = _decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("the body must be a JSON object", code="not_an_object") from None
    except msgspec.DecodeError as error:
        members = _decode_surrogates(body, str(error))
    found = dict.fromkeys(wanted, _MISSING)
    for name, value in members.items():
        if name.text in found:
            if found[name.text] is not _MISSING:
                raise InvalidRequest(
                    f"the body has the member {name.text!r} twice; readers differ in which one they take",
                    code="duplicate_member",
                )
            found[name.text] = value
    return found


def _decode(body: bytes) -> dict[_Name, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=_Names().take)
    except _TooManyMembers:
        raise InvalidRequest(f"the body has more than {MEMBERS_MAX} members", code="too_many_members") from None


def _decode_surrogates(body: bytes, found: str) -> dict[_Name, msgspec.Raw]:
    """Decode again what the decoder refused with the words `found`, if that was for half of a surrogate pair.

    Raises:
        InvalidRequest: it is no JSON.
    """
    # "truncated" is what it says of a half at the end: it looks for the other one behind the last byte.
    if "surrogate" in found or "hex escape" in found or ("truncated" in found and b"\\u" in body[-16:]):
        try:
            return _decode(_without_lone_surrogates(body))
        except msgspec.DecodeError as error:
            found = str(error)
    raise _malformed(body, found)


def _without_lone_surrogates(body: bytes) -> bytes:
    """Return a copy of the same length in which halves of surrogate pairs are U+FFFD."""
    # Escaped backslashes step aside for a byte that JSON cannot hold, so that every `\\u` left is an escape. Where it
    # stands in the body, another such byte takes its place, or it would come back as half of an escaped backslash.
    marked = body.replace(b"\x00", b"\x01").replace(b"\\\\", b"\\\x00")
    readable = _LONE_LOW.sub(_REPLACEMENT, _LONE_HIGH.sub(_REPLACEMENT, marked))
    return readable.replace(b"\\\x00", b"\\\\")


def _model(raw: msgspec.Raw) -> str:
    if raw is _MISSING:
        raise InvalidRequest("the member 'model' is missing", param="model", code="missing_member")
    if first_byte(raw) != b'"':
        raise InvalidRequest("'model' must be a string", param="model", code="invalid_type")
    model = msgspec.json.decode(raw, type=str)
    if not model.strip():
        raise InvalidRequest("'model' must not be empty", param="model", code="invalid_value")
    if "\ufffd" in model:  # also what stands for half of a surrogate pair
        raise InvalidRequest("'model' holds characters that are no text", param="model", code="invalid_value")
    if len(model) > MODEL_MAX_LENGTH:
        raise InvalidRequest(
            f"'model' has {len(model)} characters, at most {MODEL_MAX_LENGTH} are allowed",
            param="model",
            code="invalid_value",
        )
    return model


def _stream(raw: msgspec.Raw) -> bool:
    if raw is _MISSING:
        return False
    # The value is a whole JSON token, so its first byte decides between the three words.
    first = first_byte(raw)
    if first not in (b"t", b"f", b"n"):
        raise InvalidRequest("'stream' must be true, false or null", param="stream", code="invalid_type")
    return first == b"t"


def _content(operation: Operation, raw: msgspec.Raw) -> msgspec.Raw:
    main = operation.main_member
    if raw is _MISSING:
        raise InvalidRequest(f"the member {main!r} is missing", param=main, code="missing_member")
    starts, form = _MAIN_MEMBER_STARTS[operation]
    if first_byte(raw) not in starts:
        raise InvalidRequest(f"{main!r} must be {form}", param=main, code="invalid_type")
    return raw


def _check_utf8(body: bytes) -> None:
    """Refuse what is no UTF-8, also inside strings that are skipped later; without a second copy of a large body."""
    if body.startswith(_BYTE_ORDER_MARKS):
        raise InvalidRequest("the body begins with a byte order mark; send UTF-8 without one", code="invalid_json")
    if body.isascii():
        return
    view = memoryview(body)
    at = 0
    while at < len(view):
        end = min(at + _UTF8_PIECE_BYTES, len(view))
        while end < len(view) and view[end] & 0xC0 == 0x80 and end - at > _UTF8_PIECE_BYTES - 4:
            end -= 1  # do not cut a character: step back to its first byte
        try:
            str(view[at:end], "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8 (byte {at + error.start})", code="invalid_utf8") from None
        at = end


def _malformed(body: bytes, found: str) -> InvalidRequest:
    """Say in a sentence why `body` is no JSON; `found` is the decoder's own word."""
    if not body.strip(b" \t\r\n"):
        return InvalidRequest("the body is empty; a JSON object is expected", code="invalid_json")
    reason = found.removeprefix("JSON is malformed: ")
    at = _AT_BYTE.search(found)
    if at is not None and _NOT_FINITE.search(body, max(0, int(at[1]) - 2), int(at[1]) + 9) is not None:
        reason = f"NaN and Infinity are no JSON numbers {at[0]}"
    return InvalidRequest(f"the body is not JSON: {reason}", code="invalid_json")

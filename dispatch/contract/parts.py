"""Counting messages and image parts in a call's main member, for the cost rule.

An image part is an element of a content list whose `type` is `image_url` (chat) or `input_image` (responses), whatever
form its value has. Text that merely looks like one does not count: this walks the structure and never searches bytes.
Shapes that are no message are skipped: the endpoint judges them. A body is only walked after it was read as JSON once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import msgspec

from dispatch.contract.envelope import Operation
from dispatch.errors import InvalidRequest

VALUES_MAX = 100_000
"""Most commas outside strings in a main member that is walked; bounds the time and memory that one body can cost."""

_EMPTY = msgspec.Raw()
# Up to the next comma outside strings. It matches wherever it starts, so that a search never starts again.
_UP_TO_COMMA = re.compile(rb'(?:[^",]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+(?:,|\Z)')

_IMAGE_TYPES = (b'"image_url"', b'"input_image"')
_IMAGE_NAMES = ("image_url", "input_image")
_LARGE_BYTES = 256 * 1024
_FINDS = 4096
_LONGEST_TYPE = 6 * len("input_image") + 2  # every letter written as an escape


class _Part(msgspec.Struct, gc=False):
    type: msgspec.Raw = _EMPTY


class _UsualItem(msgspec.Struct, gc=False):
    """A message of a chat, or an item of a response's input (a tool's output may hold images as well)."""

    content: list[_Part] | str | None = None
    output: list[_Part] | str | None = None
    type: msgspec.Raw = _EMPTY


class _OddItem(msgspec.Struct, gc=False):
    """The same, whatever its members are."""

    content: msgspec.Raw = _EMPTY
    output: msgspec.Raw = _EMPTY
    type: msgspec.Raw = _EMPTY


class _Any(msgspec.Struct, gc=False):
    """An object nothing of which is looked at."""


_USUAL_ITEMS = msgspec.json.Decoder(list[_UsualItem])
_OBJECTS = msgspec.json.Decoder(list[_Any])
_ODD_ITEM = msgspec.json.Decoder(_OddItem)
_PART = msgspec.json.Decoder(_Part)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])


def first_byte(raw: msgspec.Raw) -> bytes:
    """Return the byte that tells what kind of value `raw` holds; empty for an empty one. Copies nothing else."""
    return bytes(memoryview(raw)[:1])


def count_messages(operation: Operation, content: msgspec.Raw, body: bytes) -> tuple[int | None, int]:
    """Return the number of messages (None where the operation has none) and of image parts in `content`.

    `body` is the whole that `content` is a part of: what does not stand in it need not be looked for.

    Raises:
        InvalidRequest: more than `VALUES_MAX` values.
        RecursionError: nested too deeply.
    """
    chat = operation is Operation.CHAT_COMPLETIONS
    if not chat and (operation is not Operation.RESPONSES or first_byte(content) != b"["):
        return None, 0
    if _has_many_commas(body):
        _check_bounded(operation, content)
    if b"image" in body or b"\\u" in body:
        count, images = _look(content, deep=not chat)
    else:
        count, images = _count(content), 0
    return count if chat else None, images


def _has_many_commas(body: bytes) -> bool:
    """Say whether there may be more than `VALUES_MAX` values."""
    if len(body) < _LARGE_BYTES:
        return body.count(b",") > VALUES_MAX
    # Where commas are rare, as in images, finding the next is many times faster than counting.
    at = -1
    for _ in range(_FINDS):
        at = body.find(b",", at + 1)
        if at < 0:
            return False
    return _FINDS + body.count(b",", at + 1) > VALUES_MAX


def _check_bounded(operation: Operation, content: msgspec.Raw) -> None:
    pieces = _UP_TO_COMMA.finditer(memoryview(content))  # two more than commas: the tail, and nothing at its end
    if next(itertools.islice(pieces, VALUES_MAX + 2, None), None) is not None:
        main = operation.main_member
        raise InvalidRequest(f"{main!r} holds more than {VALUES_MAX} values", param=main, code="too_many_values")


def _count(content: msgspec.Raw) -> int:
    try:
        return len(_OBJECTS.decode(content))
    except msgspec.ValidationError:
        return len(_RAWS.decode(content))


def _look(content: msgspec.Raw, *, deep: bool) -> tuple[int, int]:
    """Return the number of elements and of images in them; `deep` = also in what only a response's input has."""
    try:
        usual = _USUAL_ITEMS.decode(content)
    except msgspec.ValidationError:
        raws = _RAWS.decode(content)
        odd = [_ODD_ITEM.decode(raw) for raw in _objects(raws)]
        images = sum(_odd_images(item.content) for item in odd)
        if deep:
            images += sum(_is_image(item.type) + _odd_images(item.output) for item in odd)
        return len(raws), images
    images = sum(_images(item.content) for item in usual)
    if deep:
        images += sum(_is_image(item.type) + _images(item.output) for item in usual)
    return len(usual), images


def _images(content: list[_Part] | str | None) -> int:
    """Count the image parts of one content; only a list has parts."""
    return sum(_is_image(part.type) for part in content) if isinstance(content, list) else 0


def _odd_images(content: msgspec.Raw) -> int:
    """Do the same where not every element is a part."""
    if first_byte(content) != b"[":
        return 0
    return sum(_is_image(_PART.decode(raw).type) for raw in _objects(_RAWS.decode(content)))


def _objects(raws: list[msgspec.Raw]) -> Iterator[msgspec.Raw]:
    return (raw for raw in raws if first_byte(raw) == b"{")


def _is_image(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    if view.nbytes > _LONGEST_TYPE:
        return False
    text = bytes(view)
    if text in _IMAGE_TYPES:
        return True
    return b"\\" in text and text.startswith(b'"') and msgspec.json.decode(text) in _IMAGE_NAMES

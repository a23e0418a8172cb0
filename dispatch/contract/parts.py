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
_LONGEST_TYPE = 6 * len("input_image") + 2  # every letter written as an escape


class _Item(msgspec.Struct, gc=False):
    """A message of a chat, or an item of a response's input (a tool's output may hold images as well)."""

    content: msgspec.Raw = _EMPTY
    output: msgspec.Raw = _EMPTY
    type: msgspec.Raw = _EMPTY


class _Part(msgspec.Struct, gc=False):
    type: msgspec.Raw = _EMPTY


_ITEMS = msgspec.json.Decoder(list[_Item])
_ITEM = msgspec.json.Decoder(_Item)
_PARTS = msgspec.json.Decoder(list[_Part])
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
    _check_bounded(operation, content, body)
    count, items = _items(content)
    images = 0
    if b"image" in body or b"\\u" in body:
        images = sum(_images(item.content) for item in items)
        if not chat:
            images += sum(_is_image(item.type) + _images(item.output) for item in items)
    return count if chat else None, images


def _check_bounded(operation: Operation, content: msgspec.Raw, body: bytes) -> None:
    if body.count(b",") <= VALUES_MAX:
        return
    pieces = _UP_TO_COMMA.finditer(memoryview(content))  # two more than commas: the tail, and nothing at its end
    if next(itertools.islice(pieces, VALUES_MAX + 2, None), None) is not None:
        main = operation.main_member
        raise InvalidRequest(f"{main!r} holds more than {VALUES_MAX} values", param=main, code="too_many_values")


def _items(content: msgspec.Raw) -> tuple[int, list[_Item]]:
    """Return the number of elements, and those that are objects."""
    try:
        items = _ITEMS.decode(content)
    except msgspec.ValidationError:
        raws = _RAWS.decode(content)
        return len(raws), [_ITEM.decode(raw) for raw in _objects(raws)]
    return len(items), items


def _images(content: msgspec.Raw) -> int:
    """Count the image parts of one content; only a list has parts."""
    if first_byte(content) != b"[":
        return 0
    try:
        parts = _PARTS.decode(content)
    except msgspec.ValidationError:
        parts = [_PART.decode(raw) for raw in _objects(_RAWS.decode(content))]
    return sum(_is_image(part.type) for part in parts)


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

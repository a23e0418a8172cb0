"""A whole answer in the form of a stream, for a backend that was asked for a stream and sent one JSON body instead.

A caller that asked for a stream reads a stream; handed the body as one event it would see nothing, or stumble. So the
body's values travel on as they were written, in the fewest events that make a correct stream of the operation: per
choice one chunk with everything and one with its finish_reason, then usage where the caller asked for it; for a
response its typed events, with each text as one delta.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from msgspec import Raw

from dispatch.backend.document import without_lone_surrogates
from dispatch.backend.events import Event
from dispatch.contract import Call, Operation

_BOM = b"\xef\xbb\xbf"
_NULL = Raw(b"null")
_STATUSES = frozenset({"completed", "incomplete", "failed"})

Members = dict[str, Raw]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Asked(msgspec.Struct):
    stream_options: _StreamOptions | None = None


_decode_members = msgspec.json.Decoder(Members).decode
_decode_items = msgspec.json.Decoder(list[Members]).decode
_decode_asked = msgspec.json.Decoder(_Asked).decode
_encode = msgspec.json.encode


def stream_form(call: Call, body: bytes) -> list[Event]:
    """Return the events that say what the whole answer `body` says; none if it is no answer of the operation."""
    body = body.removeprefix(_BOM)
    return _events_of(call, body) or _events_of(call, without_lone_surrogates(body))


def _events_of(call: Call, body: bytes) -> list[Event]:
    try:
        members = _decode_members(body)
        return _typed_events(members) if call.operation is Operation.RESPONSES else _chunks(call, members)
    except (msgspec.MsgspecError, RecursionError):
        return []


def _chunks(call: Call, members: Members) -> list[Event]:
    choices = _decode_items(members.pop("choices", _NULL))
    usage = members.pop("usage", _NULL)
    if call.operation is Operation.CHAT_COMPLETIONS:
        members["object"] = Raw(b'"chat.completion.chunk"')
    events: list[Event] = []
    for place, choice in enumerate(choices):
        index = choice.pop("index", Raw(b"%d" % place))
        reason = choice.pop("finish_reason", _NULL)
        if call.operation is Operation.CHAT_COMPLETIONS:
            first: dict[str, Any] = {"delta": _delta(choice.pop("message", Raw(b"{}")))}
            last: dict[str, Any] = {"delta": {}}
        else:
            first, last = {}, {"text": ""}
        events.append(_event({**members, "choices": [{"index": index, **first, **choice, "finish_reason": None}]}))
        events.append(_event({**members, "choices": [{"index": index, **last, "finish_reason": reason}]}))
    if events and bytes(usage) != b"null" and _wants_usage(call):
        events.append(_event({**members, "choices": [], "usage": usage}))
    return events


def _delta(message: Raw) -> dict[str, Any]:
    """Return a message as a delta: the same members, but tool calls say their place."""
    members: dict[str, Any] = dict(_decode_members(message))
    calls = members.get("tool_calls", _NULL)
    if bytes(calls) != b"null":
        members["tool_calls"] = [{"index": place, **each} for place, each in enumerate(_decode_items(calls))]
    return members


def _wants_usage(call: Call) -> bool:
    try:
        options = _decode_asked(call.body).stream_options
    except (msgspec.MsgspecError, RecursionError):
        return False
    return bool(options and options.include_usage)


def _typed_events(members: Members) -> list[Event]:
    output = _decode_items(members.get("output", _NULL))
    status = msgspec.json.decode(members.get("status", _NULL), type=str | None)
    numbers = itertools.count()

    def event(kind: str, **said: Any) -> Event:
        return _event({"type": kind, "sequence_number": next(numbers), **said}, kind.encode())

    events = [event("response.created", response={**members, "status": "in_progress", "output": [], "usage": None})]
    for place, item in enumerate(output):
        where = {"output_index": place}
        parts = _decode_items(item["content"]) if bytes(item.get("type", _NULL)) == b'"message"' else []
        begun = {**item, "content": []} if parts else item
        events.append(event("response.output_item.added", **where, item=begun))
        for number, part in enumerate(parts):
            inside = {"item_id": item.get("id", _NULL), **where, "content_index": number}
            is_text = bytes(part.get("type", _NULL)) == b'"output_text"'
            empty = {**part, "text": ""} if is_text else part
            events.append(event("response.content_part.added", **inside, part=empty))
            if is_text:
                text = part.get("text", Raw(b'""'))
                events.append(event("response.output_text.delta", **inside, delta=text, logprobs=[]))
                events.append(event("response.output_text.done", **inside, text=text, logprobs=[]))
            events.append(event("response.content_part.done", **inside, part=part))
        events.append(event("response.output_item.done", **where, item=item))
    events.append(event(f"response.{status if status in _STATUSES else 'completed'}", response=members))
    return events


def _event(document: dict[str, Any], name: bytes = b"") -> Event:
    # Line ends can only stand between tokens of what was written; as spaces they leave it in one line.
    return Event(name, _encode(document).replace(b"\n", b" ").replace(b"\r", b" "))

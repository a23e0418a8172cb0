"""What a simulated engine says: deterministic text, in the forms of the OpenAI operations."""

from __future__ import annotations

import base64
import hashlib
import itertools
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dispatch.backend.simulated.calls import SimulatedCall
from dispatch.contract import Operation

_encode = msgspec.json.encode
_TEXT = """The page lists every open claim with its date and amount; two lines carry no stamp and one total differs from
the sum of its rows. Nothing else stands out in this batch, and the next step would be to check the sender by hand."""
_WORDS = tuple(_TEXT.split())

DONE = b"data: [DONE]\n\n"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What one call gets: the tokens of its text (the same for each choice) and why it ended."""

    call: SimulatedCall
    tokens: tuple[str, ...]
    finish_reason: str
    created: int

    @property
    def text(self) -> str:
        """All tokens together."""
        return "".join(self.tokens)

    @property
    def id(self) -> str:
        """An id that stands for the call's body."""
        return f"sim-{self.call.seed:08x}"

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices; none where nothing is generated."""
        return 0 if self.call.operation is Operation.EMBEDDINGS else len(self.tokens) * self.call.choices


def generate(call: SimulatedCall, wanted_tokens: int) -> Generation:
    """Make the text of a call: `wanted_tokens` words, fewer where the caller's bound is lower."""
    echo = call.behaviour.echo
    if echo:
        said = (
            hashlib.sha256(call.body).hexdigest()
            if echo == "sha256"
            else bytes(call.content).decode("utf-8", "replace")
        )
        return Generation(call=call, tokens=(said,), finish_reason="stop", created=int(time.time()))
    count = max(1, wanted_tokens if call.limit is None else min(wanted_tokens, call.limit))
    reason = "length" if call.limit is not None and call.limit < wanted_tokens else "stop"
    start = call.seed % len(_WORDS)
    words = itertools.islice(itertools.cycle(_WORDS), start, start + count)
    tokens = tuple(word if number == 0 else f" {word}" for number, word in enumerate(words))
    return Generation(call=call, tokens=tokens, finish_reason=reason, created=int(time.time()))


def reply_body(generation: Generation) -> bytes:
    """Return the JSON of a whole reply."""
    return _encode(_DOCUMENTS[generation.call.operation](generation))


def _chat(generation: Generation) -> dict[str, Any]:
    message = {"role": "assistant", "content": generation.text}
    choices = [
        {"index": index, "message": message, "logprobs": None, "finish_reason": generation.finish_reason}
        for index in range(generation.call.choices)
    ]
    return {**_base(generation, "chatcmpl", "chat.completion"), "choices": choices, "usage": _usage(generation)}


def _completion(generation: Generation) -> dict[str, Any]:
    choices = [
        {"index": index, "text": generation.text, "logprobs": None, "finish_reason": generation.finish_reason}
        for index in range(generation.call.choices)
    ]
    return {**_base(generation, "cmpl", "text_completion"), "choices": choices, "usage": _usage(generation)}


def _embeddings(generation: Generation) -> dict[str, Any]:
    call = generation.call
    data = [{"object": "embedding", "index": index, "embedding": _vector(call, index)} for index in range(call.items)]
    usage = {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}
    return {"object": "list", "model": call.model, "data": data, "usage": usage}


def _vector(call: SimulatedCall, index: int) -> list[float] | str:
    state = (call.seed + index * 2_654_435_761) & 0xFFFFFFFF
    values = []
    for _ in range(call.dimensions):
        state = (state * 1_664_525 + 1_013_904_223) & 0xFFFFFFFF
        values.append(state / 0xFFFFFFFF * 2 - 1)
    packed = struct.pack(f"<{len(values)}f", *values)
    return base64.b64encode(packed).decode() if call.base64 else list(struct.unpack(f"<{len(values)}f", packed))


def _response(generation: Generation, status: str = "completed") -> dict[str, Any]:
    """Return a Responses object; without output while it is in progress."""
    call = generation.call
    done = status == "completed"
    cut = done and generation.finish_reason == "length"
    usage = {
        "input_tokens": call.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generation.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": call.prompt_tokens + generation.completion_tokens,
    }
    return {
        "id": f"resp_{generation.id}",
        "object": "response",
        "created_at": generation.created,
        "status": "incomplete" if cut else status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": [_message(generation, "completed")] if done else [],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": usage if done else None,
    }


def _message(generation: Generation, status: str) -> dict[str, Any]:
    return {
        "id": f"msg_{generation.id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_part(generation.text)] if status == "completed" else [],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


_DOCUMENTS: dict[Operation, Callable[[Generation], dict[str, Any]]] = {
    Operation.CHAT_COMPLETIONS: _chat,
    Operation.COMPLETIONS: _completion,
    Operation.EMBEDDINGS: _embeddings,
    Operation.RESPONSES: _response,
}


def _base(generation: Generation, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{generation.id}",
        "object": kind,
        "created": generation.created,
        "model": generation.call.model,
    }


def _usage(generation: Generation) -> dict[str, int]:
    prompt, completion = generation.call.prompt_tokens, generation.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Event(msgspec.Struct, frozen=True):
    """One piece of a stream; `token` = a token's time passes before it."""

    data: bytes
    token: bool = False


def stream_events(generation: Generation) -> Iterator[Event]:
    """Yield the events of a stream, framed, from the first to `[DONE]` (which Responses streams do not have)."""
    if generation.call.operation is Operation.RESPONSES:
        yield from _response_events(generation)
        return
    chat = generation.call.operation is Operation.CHAT_COMPLETIONS
    prefix, kind = ("chatcmpl", "chat.completion.chunk") if chat else ("cmpl", "text_completion")
    base = _base(generation, prefix, kind)
    choices = range(generation.call.choices)
    usage = {"usage": None} if generation.call.include_usage else {}

    def chunk(index: int, text: str | None, finish_reason: str | None) -> bytes:
        said: dict[str, Any] = {"text": text or ""}
        if chat:
            said = {"delta": {} if text is None else {"content": text}}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
        return _frame({**base, "choices": [choice], **usage})

    if chat:
        for index in choices:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield Event(_frame({**base, "choices": [choice], **usage}))
    for token in generation.tokens:
        for index in choices:
            yield Event(chunk(index, token, None), token=index == 0)
    for index in choices:
        yield Event(chunk(index, None, generation.finish_reason))
    if generation.call.include_usage:
        yield Event(_frame({**base, "choices": [], "usage": _usage(generation)}))
    yield Event(DONE)


def _response_events(generation: Generation) -> Iterator[Event]:
    numbers = itertools.count()

    def event(kind: str, **members: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": next(numbers), **members})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    where = {"item_id": f"msg_{generation.id}", "output_index": 0, "content_index": 0}
    item = {"output_index": 0}
    yield Event(event("response.created", response=_response(generation, "in_progress")))
    yield Event(event("response.in_progress", response=_response(generation, "in_progress")))
    yield Event(event("response.output_item.added", **item, item=_message(generation, "in_progress")))
    yield Event(event("response.content_part.added", **where, part=_part("")))
    for token in generation.tokens:
        yield Event(event("response.output_text.delta", **where, delta=token, logprobs=[]), token=True)
    yield Event(event("response.output_text.done", **where, text=generation.text, logprobs=[]))
    yield Event(event("response.content_part.done", **where, part=_part(generation.text)))
    yield Event(event("response.output_item.done", **item, item=_message(generation, "completed")))
    final = _response(generation)
    yield Event(event(f"response.{final['status']}", response=final))


def _frame(document: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encode(document)

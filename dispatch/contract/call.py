"""Reading a call's body: only what the runtime must know, without changing a byte."""

from __future__ import annotations

import msgspec

from dispatch.contract.envelope import Operation


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One OpenAI-compatible call: the body as sent, and what was read out of it.

    `message_count` is None where the operation has no messages. `image_count` counts image parts of the content.
    """

    operation: Operation
    body: bytes
    model: str
    stream: bool = False
    message_count: int | None = None
    image_count: int = 0


def read_call(operation: Operation, body: bytes) -> Call:
    """Check `body` and read model, stream mode and counts out of it; the bytes stay as they are.

    Raises:
        InvalidRequest: not JSON, not an object, no usable `model` or main member, duplicate keys among those read,
            non-finite numbers, nesting too deep. Names the member.
    """
    raise NotImplementedError

"""The request envelope: what travels beside a call's body."""

from __future__ import annotations

from enum import StrEnum

import msgspec

CONTRACT_VERSION = 1
"""Equal to `[contract] version` in `lua/schema.toml` (a test holds them together)."""

Scalar = str | int | float | bool | None


class Operation(StrEnum):
    """The OpenAI-compatible operations that can be queued; the value is the name in envelopes and spans."""

    CHAT_COMPLETIONS = "chat.completions"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"

    @property
    def path(self) -> str:
        """The path under an endpoint's base URL, without a leading slash."""
        return self.value.replace(".", "/")

    @property
    def main_member(self) -> str:
        """The body's member that carries the content (`messages`, `prompt` or `input`)."""
        return _MAIN_MEMBER[self]


_MAIN_MEMBER = {
    Operation.CHAT_COMPLETIONS: "messages",
    Operation.COMPLETIONS: "prompt",
    Operation.EMBEDDINGS: "input",
    Operation.RESPONSES: "input",
}


class RequestEnvelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One queued call without its body. Opaque to Lua, which gets the scalars it decides on as arguments.

    Times are milliseconds. `metadata` is the caller's (scalars only); it is never content.
    """

    contract: int
    request_id: str
    producer_id: str
    pool_id: str
    operation: Operation
    model: str
    stream: bool = False
    message_count: int | None = None
    image_count: int = 0
    page_count: int = 0
    estimated_cost_units: int | None = None
    timeout_ms: int | None = None
    fairness_key: str | None = None
    priority: int | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    caller_request_id: str | None = None
    metadata: dict[str, Scalar] = {}

"""Plain calls and endpoints for tests of the adapter and the simulator."""

from __future__ import annotations

import json
from typing import Any

from dispatch.backend import Endpoint
from dispatch.contract import Call, Operation

COMPLETION = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
).encode()
"""A plain chat completion, as an endpoint sends it."""


def chat_call(body: bytes | None = None, **members: Any) -> Call:
    """Return a chat call with exactly this body, or a small one with these members added."""
    content = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **members}
    return Call(
        operation=Operation.CHAT_COMPLETIONS,
        body=json.dumps(content).encode() if body is None else body,
        model="m",
        stream=bool(members.get("stream", False)),
        message_count=1,
    )


def endpoint_at(url: str, **fields: Any) -> Endpoint:
    """Return an endpoint with base URL `url` + /v1 and this test's bounds."""
    return Endpoint(**{"endpoint_id": "stub", "url": f"{url}/v1", **fields})

"""Fabric Dispatch: OpenAI-compatible calls through fair, atomic admission in Valkey.

The public names stand in `__all__`; each is loaded when it is first used, so that a producer does not load a gateway.
`dispatch.sync.DispatchClient` is the blocking client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch import errors
    from dispatch.config import GatewaySettings
    from dispatch.contract import Reply
    from dispatch.gateway import Gateway
    from dispatch.producer.client import DispatchClient
    from dispatch.producer.transport import DispatchTransport

__all__ = ["DispatchClient", "DispatchTransport", "Gateway", "GatewaySettings", "Reply", "errors"]

_HOMES = {
    "DispatchClient": "dispatch.producer.client",
    "DispatchTransport": "dispatch.producer.transport",
    "Gateway": "dispatch.gateway",
    "GatewaySettings": "dispatch.config",
    "Reply": "dispatch.contract",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("dispatch.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

"""Fabric groups for tests."""

from __future__ import annotations

import json
import uuid
from typing import Any

from dispatch.fabric.functions import group_configure
from dispatch.fabric.sync import BlockingConnection

ENDPOINT_URL = "http://127.0.0.1:9/v1"
"""Nothing listens there: tests that call an endpoint configure their own."""


def default_document(endpoint_url: str = ENDPOINT_URL) -> dict[str, Any]:
    """Return the config most tests use: the four default pools and one endpoint."""
    quanta = {"interactive": 4, "document-extract": 2, "backfill": 1, "default": 1}
    return {
        "policy": "drr",
        "total_concurrent_dispatch": 8,
        "pools": [{"pool_id": pool, "quantum": quantum} for pool, quantum in quanta.items()],
        "endpoints": [{"endpoint_id": "default", "url": endpoint_url}],
    }


def unique_group() -> str:
    """Return a group name no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


def configure(url: str, group: str, document: dict[str, Any] | None = None, *, expected: int = 0) -> int:
    """Configure `group` and return its generation. Fails the test when the config is not applied."""
    call = group_configure(
        json.dumps(document or default_document()).encode(),
        expected_generation=expected, actor="test", reason="", nonce=uuid.uuid4().hex,
    )  # fmt: skip
    with BlockingConnection(url) as connection:
        answer = connection.run(group, call)
    assert answer.status == "APPLIED", answer
    return answer.generation

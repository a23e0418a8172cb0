"""Ids of requests: nobody can guess one, and one that was made for an API key tells whose it is."""

from __future__ import annotations

import re
import secrets

_BYTES = 16
_RANDOM = re.compile(r"[0-9a-f]{32}")


def make_request_id(scope: str) -> str:
    """Return a new id for a request of `scope` (the id of an API key, which is no secret; "" = of nobody's)."""
    name = secrets.token_hex(_BYTES)
    return f"{scope}.{name}" if scope else name


def is_made_for(scope: str, request_id: str) -> bool:
    """Say whether `request_id` was made for `scope`. Nothing was made for ""."""
    owner, _, name = request_id.rpartition(".")
    return bool(scope) and owner == scope and _RANDOM.fullmatch(name) is not None

"""Names that travel into Valkey keys."""

from __future__ import annotations

import re

from dispatch.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_name(kind: str, value: str) -> str:
    """Return `value` if it may be a name (group, pool, producer, gateway, endpoint, request id).

    No braces and no colon: they separate keys and mark the hash tag.

    Raises:
        InvalidRequest: names the kind, the value (cut) and the allowed form.
    """
    if _NAME.fullmatch(value) is None:
        shown = value if len(value) <= 40 else value[:40] + "..."
        raise InvalidRequest(
            f"{kind} {shown!r} is not a name: 1 to 128 of letters, digits, '.', '_', '-' are allowed",
            param=kind,
            code="invalid_name",
        )
    return value

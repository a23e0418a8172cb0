"""What makes two submits the same call: the caller's key, and a fingerprint of what it stands for. No I/O.

After draft-ietf-httpapi-idempotency-key-header-07: the same key and call get one execution and one reply; the same key
with another call is a mistake of the caller's. Only digests reach the server.
"""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum

from dispatch.contract import Call
from dispatch.errors import InvalidRequest

KEY_MAX_LENGTH = 255
KEY_FORM = f"1 to {KEY_MAX_LENGTH} visible ASCII characters"

_KEY = re.compile(rf"(?! *\Z)[\x20-\x7e]{{1,{KEY_MAX_LENGTH}}}")
_NUL = b"\0"


class KeyKind(StrEnum):
    """Where a key comes from. Keys of different kinds never meet."""

    HEADER = "key"
    """The header `Idempotency-Key`, or the option of that name."""
    REQUEST_ID = "id"
    """A request id that the caller gave."""


def check_key(key: object) -> None:
    """Make sure that `key` can be an idempotency key.

    Raises:
        InvalidRequest: it is no text of the allowed form.
    """
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"idempotency_key must be {KEY_FORM}", param="idempotency_key", code="invalid_idempotency_key"
        )


def key_hash(scope: str, kind: KeyKind, key: str) -> str:
    """Return the name under which the group remembers `key`; `scope` parts callers that must not share keys."""
    return hashlib.sha256(_NUL.join((scope.encode(), kind.encode(), key.encode()))).hexdigest()


def fingerprint(call: Call, pool_id: str) -> str:
    """Return what two calls have in common exactly if they are the same: operation, pool and every byte of the body."""
    digest = hashlib.sha256(_NUL.join((call.operation.encode(), pool_id.encode(), b"")))
    digest.update(call.body)
    return digest.hexdigest()

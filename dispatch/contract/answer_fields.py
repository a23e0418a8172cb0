"""Header fields of an answer: ids, and only what is safe to write."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from dispatch.contract.answers import Answer

_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VALUE = re.compile(r"[\x20-\x7e]{0,1024}")
_OURS = frozenset({"content-length", "transfer-encoding", "connection", "x-request-id", "x-dispatch-request-id"})

RawFields = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Ids:
    """The caller's own id of a request (echoed as `x-request-id`), and the id the group knows it by, if it got one.

    `x-dispatch-request-id` is always the group's. Without a caller's id that one, or a made-up one, is `x-request-id`.
    """

    caller: str | None = None
    internal: str | None = None

    def fields(self) -> RawFields:
        """Return the header fields."""
        shown = self.caller or self.internal or uuid.uuid4().hex
        fields = [(b"x-request-id", shown.encode("ascii"))]
        if self.internal is not None:
            fields.append((b"x-dispatch-request-id", self.internal.encode("ascii", "replace")))
        return fields


def raw_fields(answer: Answer, ids: Ids) -> RawFields:
    """Return the header fields of `answer` without its length.

    Left out is what could break the head apart or speak for us: replies come through Valkey from any gateway.
    """
    safe = [
        (name.encode("ascii"), value.encode("ascii"))
        for name, value in answer.fields
        if name not in _OURS and _NAME.fullmatch(name) and _VALUE.fullmatch(value)
    ]
    return safe + ids.fields()

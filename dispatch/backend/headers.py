"""Which headers of an endpoint's answer travel to the caller: the one place of that rule.

An allow list, because what is unknown is not harmless: a backend's cookies, CORS and cache rules, `alt-svc`,
`location`, `www-authenticate` or `x-should-retry` speak for another origin or for a hop that ends here. Framing and
encoding (`content-length`, `transfer-encoding`, `content-encoding`) described bytes that have been decoded. Hop-by-hop
fields, and those that `Connection` names, never travel (RFC 9110 section 7.6.1), even where their name is on the list.

`retry-after` and `retry-after-ms` are not relayed as they came: of a 429 or 503 the reading in `retry_after` is given
on in whole seconds, 1 to 30. The backend's `x-request-id` travels as `x-backend-request-id`; the first name is the
runtime's own.
"""

from __future__ import annotations

from collections.abc import Iterable

RELAYED = frozenset({"content-language", "request-id", "x-request-id"})
RELAYED_PREFIXES = ("openai-", "x-ratelimit-", "ratelimit-")
_RENAMED = {"request-id": "x-backend-request-id", "x-request-id": "x-backend-request-id"}

_MAX_FIELDS = 32
_MAX_VALUE_LENGTH = 1024

Fields = tuple[tuple[str, str], ...]


def decode_fields(raw: Iterable[tuple[bytes, bytes]]) -> Fields:
    """Return raw header fields as text with names in lower case; every byte has a Latin-1 reading."""
    return tuple((name.decode("latin-1").lower(), value.decode("latin-1").strip()) for name, value in raw)


def relayed(fields: Fields) -> Fields:
    """Return the fields that may travel to the caller, without `content-type` (it follows from the body).

    Values that are not printable ASCII or longer than 1,024 characters are left out, as is what exceeds 32 fields.
    """
    hop = {
        token.strip().lower()
        for name, value in fields
        if name == "connection"
        for token in value.split(",")
        if token.strip()
    }
    kept = [
        (_RENAMED.get(name, name), value)
        for name, value in fields
        if (name in RELAYED or name.startswith(RELAYED_PREFIXES))
        and name not in hop
        and len(value) <= _MAX_VALUE_LENGTH
        and value.isascii()
        and value.isprintable()
    ]
    return tuple(kept[:_MAX_FIELDS])


def first(fields: Fields, name: str) -> str:
    """Return the first value of `name` (lower case), or ""."""
    return next((value for key, value in fields if key == name), "")


def is_json_type(value: str) -> bool:
    """Say whether a content type is JSON (`application/json` or `+json`, any parameters)."""
    media = value.partition(";")[0].strip().lower()
    return media == "application/json" or media.endswith("+json")

"""What may be shown of addresses: never user, password or query."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(?<=://)([^\s?]*)\?\S*")


def address_of(url: str | None) -> str | None:
    """Return host and port of a URL, without anything secret."""
    if not url:
        return url
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an unreadable address"
    host = parts.hostname or ""
    return f"[{host}]{port}" if ":" in host else f"{host}{port}"


def without_secrets(text: str) -> str:
    """Return a text with the user information and queries of all URLs in it taken out."""
    return _QUERY.sub(r"\1", _USER_INFO.sub("", text))

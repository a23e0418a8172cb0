"""Host and port of a backend's address, as the conventions name a server."""

from __future__ import annotations

import functools
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


@functools.lru_cache(maxsize=1024)
def server_of(address: str) -> tuple[str, int | None]:
    """Return host and port of an endpoint's address; ("", None) of none. There are as many as endpoints, ever."""
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme)

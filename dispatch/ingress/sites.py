"""Keeping pages of other sites out, where keys do not: a browser sends what any page asks for, from inside.

A page can send a request without a body (or with a form) to any address its reader's machine can reach, and by a name
that it lets point there (DNS rebinding) it can read the answers, too. Where a bearer key is asked for, neither helps.
Where none is, what a browser says about itself is enough: `Sec-Fetch-Site` and `Origin` cannot be set by a page, and a
front that listens on loopback is only ever meant by a loopback name. Calls (`/v1`) need no such check: their JSON body
is nothing that a browser sends to another site unasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from dispatch.config.loopback import is_loopback_name
from dispatch.errors import NotAllowed
from dispatch.producer.call_headers import Headers

_OWN = frozenset({b"same-origin", b"none"})


def require_own_site(headers: Headers, server: Sequence[object] | None) -> None:
    """Refuse a request that a page of another site made. `server` is where it arrived (ASGI's `server`).

    Raises:
        NotAllowed: a browser says so, or the name it used for this machine is none of loopback's.
    """
    host = headers.get(b"host", (b"",))[0].decode("latin-1")
    origins = headers.get(b"origin", ())
    sites = headers.get(b"sec-fetch-site", ())
    if any(site not in _OWN for site in sites) or any(_authority(origin) != host for origin in origins):
        raise NotAllowed("pages of other sites are not let in where no key is asked for", code="cross_site")
    if (
        server
        and is_loopback_name(str(server[0]))
        and host
        and not is_loopback_name(urlsplit(f"//{host}").hostname or "")
    ):
        message = f"this gateway listens on loopback and is not known as {host[:100]!r}; behind a proxy it needs keys"
        raise NotAllowed(message, code="unknown_host")


def _authority(origin: bytes) -> str:
    return urlsplit(origin.decode("latin-1")).netloc

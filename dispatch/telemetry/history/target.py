"""Where the history is: its URL, read once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from dispatch.errors import ConfigurationError

FORMS = "clickhouse://[user@]host[:port][/database], clickhouses:// with TLS, http(s)://..., or chdb:///path"
_PLAIN_PORT, _TLS_PORT = 8123, 8443
_TLS = {"clickhouse": False, "http": False, "clickhouses": True, "https": True}
_EMBEDDED = "chdb"
_DATABASE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Target:
    """A history that can be opened. `address` may be shown; `options` (for the client) may hold a password."""

    address: str
    embedded: bool
    options: Mapping[str, Any] = field(repr=False)


def target_of(url: str, password_env: str = "", environ: Mapping[str, str] = os.environ) -> Target:
    """Read the URL of a history. Opens nothing.

    A password stands in the variable that `password_env` names, never in the URL: URLs are shown and logged.

    Raises:
        ConfigurationError: it is none of the accepted forms, or the variable is not set.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigurationError(f"the history's URL is none: {FORMS} is expected") from None
    if parts.password is not None:
        message = "the history's URL holds a password, which would be shown: name the variable that holds it instead"
        raise ConfigurationError(f"{message} (DISPATCH_HISTORY_PASSWORD_ENV)")
    if parts.query or parts.fragment:
        raise ConfigurationError(f"the history's URL has parts that mean nothing here ('?', '#'): {FORMS} is expected")
    if parts.scheme == _EMBEDDED:
        return _embedded(parts, url)
    if parts.scheme not in _TLS or not parts.hostname or "/" in parts.path.strip("/"):
        raise ConfigurationError(f"the history's URL has another form than expected: {FORMS}")
    tls = _TLS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = port or (_TLS_PORT if tls else _PLAIN_PORT)
    database = parts.path.strip("/") or "default"
    if _DATABASE.fullmatch(database) is None:
        raise ConfigurationError(f"the history's database {database[:60]!r} is no name of letters, digits and '_'")
    options = {
        "interface": "https" if tls else "http", "host": parts.hostname, "port": port, "database": database,
        "username": unquote(parts.username or "") or "default", "password": _password(password_env, environ),
    }  # fmt: skip
    return Target(f"{parts.scheme}://{host}:{port}/{database}", embedded=False, options=options)


def _embedded(parts: SplitResult, url: str) -> Target:
    if not (parts.path.startswith("/") and len(parts.path) > 1 and not parts.netloc):
        raise ConfigurationError("an embedded history needs an absolute path: chdb:///path")
    return Target(url, embedded=True, options={"interface": _EMBEDDED, "path": unquote(parts.path)})


def _password(name: str, environ: Mapping[str, str]) -> str:
    if not name:
        return ""
    if not environ.get(name):
        raise ConfigurationError(
            f"the environment variable {name}, which is to hold the history's password, is not set"
        )
    return environ[name]

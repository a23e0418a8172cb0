"""An endpoint: one OpenAI-compatible base URL with its key and its bounds.

Accepted forms of a URL, normalised once when the record is made:

- `http://host`, `https://host`, either with `:port` and with a path (`http://10.0.0.7:8000/v1`);
- with or without slashes at the end (`.../v1/` is `.../v1`): an operation's path is appended after exactly one;
- host and scheme in any case, international host names, IPv6 in brackets;
- with `user:password@`: sent as Basic authorization where no API key is configured, and in no shown address.

Refused: another scheme, no host, a query or fragment (an operation's path could not be appended), and a URL that
already ends in an operation (`.../chat/completions`): the base is wanted.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote_to_bytes

import httpx

from dispatch.contract import Operation
from dispatch.errors import ConfigurationError

MAX_RESPONSE_BYTES = 64 * 1024 * 1024
"""Default bound of one decoded answer."""

_MAX_KEY_FILE_BYTES = 16 * 1024
_PORTS = {"http": 80, "https": 443}
_FIELDS = ("connect_timeout_ms", "first_byte_timeout_ms", "idle_timeout_ms", "max_response_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where calls go. `url` may be given in any accepted form and is kept normalised, without credentials.

    `connect_timeout_ms` covers name look-up, TCP and TLS; `first_byte_timeout_ms` the wait for the answer's head from
    the start of the call, of a stream for its first chunk; `idle_timeout_ms` each pause inside the body, of a stream
    between its chunks. `use_proxy` False: proxy variables of the environment are ignored.

    Raises:
        ConfigurationError: a field is wrong; names the endpoint and the field, never a secret.
    """

    endpoint_id: str
    url: str = field(repr=False)
    api_key: str = field(default="", repr=False)
    connect_timeout_ms: int = 5_000
    first_byte_timeout_ms: int = 600_000
    idle_timeout_ms: int = 120_000
    max_response_bytes: int = MAX_RESPONSE_BYTES
    use_proxy: bool = False
    address: str = field(init=False)
    """`scheme://host:port/path` without credentials: what people, spans and replies are shown."""
    authorization: str = field(init=False, repr=False)
    """Value of the Authorization header; "" = none is sent."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self._wrong(name, "must be a whole number above 0")
        parsed = self._parse()
        key = self.api_key.strip()
        if not (key.isascii() and key.isprintable()):
            raise self._wrong("api_key", "holds characters that a header cannot carry")
        userinfo = unquote_to_bytes(parsed.userinfo)
        if key and userinfo:
            raise self._wrong("url", "carries credentials and an API key is configured too: give one of them")
        bare = parsed.copy_with(username=None, password=None, path=parsed.path.rstrip("/") or "/")
        port = parsed.port or _PORTS[parsed.scheme]
        host = parsed.raw_host.decode("ascii")
        shown_host = f"[{host}]" if ":" in host else host
        path = bare.raw_path.decode("ascii").rstrip("/")
        basic = "Basic " + base64.b64encode(userinfo).decode() if userinfo else ""
        for name, value in (
            ("api_key", key),
            ("url", str(bare).rstrip("/")),
            ("address", f"{parsed.scheme}://{shown_host}:{port}{path}"),
            ("authorization", f"Bearer {key}" if key else basic),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def from_config(cls, document: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Self:
        """Make an endpoint of one item of a config document's `endpoints`, reading its key now.

        The key comes from the environment variable named by `api_key_env`, or is the content of the file `api_key_file`
        (surrounding white space goes). Members that other parts own (`max_concurrent`, breaker, gate) are not looked
        at. `environ` is the process's environment unless given. Blocks for the read of the key file.

        Raises:
            ConfigurationError: a member is wrong, the variable is not set or empty, or the file cannot be read; names
            it.
        """
        endpoint_id = str(document.get("endpoint_id", ""))
        url = document.get("url")
        if not isinstance(url, str):
            raise ConfigurationError(f"endpoint {endpoint_id!r}: url is missing")
        use_proxy = document.get("use_proxy", False)
        if not isinstance(use_proxy, bool):
            raise ConfigurationError(f"endpoint {endpoint_id!r}: use_proxy must be true or false")
        bounds = {name: document[name] for name in _FIELDS if document.get(name) is not None}
        key = _read_key(endpoint_id, document, os.environ if environ is None else environ)
        return cls(endpoint_id=endpoint_id, url=url, api_key=key, use_proxy=use_proxy, **bounds)

    def url_of(self, path: str) -> str:
        """Return the URL of `path` (an operation's, or `models`; without a leading slash)."""
        return f"{self.url}/{path}"

    def _parse(self) -> httpx.URL:
        text = self.url.strip()
        try:
            parsed = httpx.URL(text)
        except (httpx.InvalidURL, UnicodeError):
            # Not chained: the parser's text may quote a password.
            raise self._wrong("url", "cannot be read; expected http(s)://host[:port][/path]") from None
        if parsed.scheme not in _PORTS or not parsed.host:
            raise self._wrong("url", "must be http(s)://host[:port][/path]")
        if parsed.port is not None and not 0 < parsed.port < 65_536:
            raise self._wrong("url", "names a port outside 1 to 65535")
        if parsed.query or parsed.fragment or "?" in text or "#" in text:
            raise self._wrong("url", "must not carry a query or fragment: the operation's path is appended to it")
        for operation in Operation:
            if parsed.path.rstrip("/").endswith(f"/{operation.path}"):
                raise self._wrong("url", f"ends in /{operation.path}; give the base URL before that")
        return parsed

    def _wrong(self, name: str, what: str) -> ConfigurationError:
        return ConfigurationError(f"endpoint {self.endpoint_id!r}: {name} {what}")


def _read_key(endpoint_id: str, document: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    variable = document.get("api_key_env") or ""
    file = document.get("api_key_file") or ""
    if variable and file:
        raise ConfigurationError(
            f"endpoint {endpoint_id!r}: api_key_env and api_key_file are both set; give one of them"
        )
    if variable:
        key = environ.get(variable, "").strip()
        if not key:
            raise ConfigurationError(
                f"endpoint {endpoint_id!r}: environment variable {variable} (api_key_env) is not set or empty"
            )
        return key
    if file:
        try:
            with Path(file).open("rb") as opened:
                content = opened.read(_MAX_KEY_FILE_BYTES + 1)
            key = content.decode("ascii").strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no plain text"
            raise ConfigurationError(
                f"endpoint {endpoint_id!r}: api_key_file {file} cannot be read: {reason}"
            ) from error
        if not key or len(content) > _MAX_KEY_FILE_BYTES:
            what = "is too large for a key" if key else "is empty"
            raise ConfigurationError(f"endpoint {endpoint_id!r}: api_key_file {file} {what}")
        return key
    return ""

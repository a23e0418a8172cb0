"""Valkey URLs: which forms are accepted, read once into one record.

    valkey://[[user]:password@]host[:port][,host[:port]...][/db][?cluster=true][&ca_file=/path/ca.pem]

`redis://` means the same; `valkeys://` and `rediss://` speak TLS. User and password are percent-encoded where they
hold special characters. Several hosts are starting points of one cluster. Defaults: port 6379, database 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from dispatch.errors import ConfigurationError

_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_OPTIONS = ("cluster", "ca_file")
_DEFAULT_PORT = 6379
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a fabric's Valkey is and how to speak to it. Its text never shows the password."""

    nodes: tuple[tuple[str, int], ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    tls: bool = False
    cluster: bool = False
    ca_file: Path | None = None

    def __str__(self) -> str:
        scheme = "valkeys" if self.tls else "valkey"
        login = f"{self.username or ''}:***@" if self.password is not None else ""
        return f"{scheme}://{login}{','.join(self.hosts())}/{self.database}" + ("?cluster=true" if self.cluster else "")

    def hosts(self) -> list[str]:
        """Return each node as `host:port`."""
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes]

    def ca_pem(self) -> bytes | None:
        """Return the content of `ca_file`, None when none is named.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        if self.ca_file is None:
            return None
        try:
            return self.ca_file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"ca_file {self.ca_file} of the Valkey URL: {error.strerror}") from error


def redacted(url: str) -> str:
    """Return `url` without login and options, also when it is malformed: fit for logs and messages."""
    return re.sub(r"^([a-z]*://)?.*@", r"\1***@", url.partition("?")[0], flags=re.DOTALL)


def is_valkey(url: str) -> bool:
    """Say whether `url` begins as the address of a Valkey does."""
    scheme, colon, _ = url.partition("://")
    return bool(colon) and scheme in _SCHEMES


def parse_url(url: str) -> Address:
    """Read a Valkey URL.

    Raises:
        ConfigurationError: not one of the accepted forms; says what is wrong, never the password.
    """
    try:
        split = urlsplit(url)
    except ValueError as error:
        raise _malformed(url, str(error)) from None
    if not is_valkey(url):
        raise _malformed(url, "it has to begin with valkey://, valkeys://, redis:// or rediss://")
    login, _, hosts = split.netloc.rpartition("@")
    user, colon, password = login.partition(":")
    if user and not colon:
        raise _malformed(url, "a user needs a password: user:password@host")
    nodes = tuple(_node(url, host) for host in hosts.split(","))
    options = _options(url, split)
    cluster = _flag(url, "cluster", options.get("cluster", "false"))
    database = _database(url, split.path)
    if len(nodes) > 1 and not cluster:
        raise _malformed(url, "several hosts are the nodes of a cluster and need ?cluster=true")
    if cluster and database:
        raise _malformed(url, "a cluster has only database 0")
    if "ca_file" in options and not _SCHEMES[split.scheme]:
        raise _malformed(url, "ca_file needs TLS: valkeys:// or rediss://")
    return Address(
        nodes=nodes,
        username=unquote(user) or None,
        password=unquote(password) if password else None,
        database=database,
        tls=_SCHEMES[split.scheme],
        cluster=cluster,
        ca_file=Path(options["ca_file"]) if "ca_file" in options else None,
    )


def _malformed(url: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"Valkey URL {redacted(url)!r}: {problem}")


def _node(url: str, text: str) -> tuple[str, int]:
    try:
        node = urlsplit(f"//{text}")
        host, port = node.hostname, node.port
    except ValueError:
        raise _malformed(
            url, "host or port is not readable (special characters in a password: percent-encode)"
        ) from None
    if not host:
        raise _malformed(url, "the host is missing")
    return host, _DEFAULT_PORT if port is None else port


def _database(url: str, path: str) -> int:
    text = path.strip("/")
    if text and not (text.isascii() and text.isdigit()):
        raise _malformed(url, "after the host only a database number may follow, such as /0")
    return int(text or 0)


def _options(url: str, split: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise _malformed(url, f"option {unknown[0]!r} is unknown; known: {', '.join(_OPTIONS)}")
    if split.fragment:
        raise _malformed(url, "'#' has to be percent-encoded")
    return options


def _flag(url: str, name: str, text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise _malformed(url, f"{name} is true or false")
    return text.lower() in _TRUE

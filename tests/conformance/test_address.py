"""Which Valkey URLs are understood, and how the others are refused."""

from __future__ import annotations

import pytest

from dispatch.errors import ConfigurationError
from dispatch.fabric.address import Address, parse_url, redacted

GOOD = {
    "valkey://localhost": Address((("localhost", 6379),)),
    "redis://localhost:7000/": Address((("localhost", 7000),)),
    "redis://10.0.0.1:7000/5": Address((("10.0.0.1", 7000),), database=5),
    "valkeys://v.example": Address((("v.example", 6379),), tls=True),
    "rediss://v.example:6380": Address((("v.example", 6380),), tls=True),
    "valkey://:secret@v": Address((("v", 6379),), password="secret"),
    "valkey://user:s%3A%2F%40@v": Address((("v", 6379),), username="user", password="s:/@"),
    "valkey://[::1]:7000": Address((("::1", 7000),)),
    "valkey://v?cluster=true": Address((("v", 6379),), cluster=True),
    "valkey://v/0?cluster=yes": Address((("v", 6379),), cluster=True),
    "valkey://v?cluster=false": Address((("v", 6379),)),
    "valkey://:p@a:7000,b:7001,c?cluster=1": Address(
        (("a", 7000), ("b", 7001), ("c", 6379)), password="p", cluster=True
    ),
}

BAD = {
    "": "has to begin with valkey://",
    "localhost:6379": "has to begin with valkey://",
    "http://localhost": "has to begin with valkey://",
    "valkey:localhost": "has to begin with valkey://",
    "valkey://": "the host is missing",
    "valkey://:secret@": "the host is missing",
    "valkey://v:port": "host or port is not readable",
    "valkey://v:70000": "host or port is not readable",
    "valkey://:se/cret@v": "host or port is not readable",
    "valkey://user@v": "a user needs a password",
    "valkey://v/two": "only a database number",
    "valkey://v/-1": "only a database number",
    "valkey://a,b": "need ?cluster=true",
    "valkey://a/1?cluster=true": "a cluster has only database 0",
    "valkey://v?cluster=maybe": "cluster is true or false",
    "valkey://v?timeout=5": "option 'timeout' is unknown; known: cluster, ca_file",
    "valkey://v?ca_file=/ca.pem": "ca_file needs TLS",
    "valkey://:se#cret@v": "host or port is not readable",
    "valkey://[::1": "Invalid IPv6 URL",
}


@pytest.mark.parametrize("url", GOOD)
def test_accepted_forms(url: str) -> None:
    assert parse_url(url) == GOOD[url]


@pytest.mark.parametrize("url", BAD)
def test_refused_forms_say_why_and_keep_the_secret(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_url(url)
    assert BAD[url] in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "cret" not in str(caught.value).replace("characters", "")


def test_text_of_an_address_keeps_the_secret() -> None:
    address = parse_url("rediss://user:secret@a:1,b:2?cluster=true")
    assert str(address) == "valkeys://user:***@a:1,b:2/0?cluster=true"
    assert "secret" not in repr(address)
    assert str(parse_url("redis://[::1]/3")) == "valkey://[::1]:6379/3"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("valkey://user:secret@host:1/0?x=y", "valkey://***@host:1/0"),
        ("user:secret@host", "***@host"),
        ("valkey://a:se@cret@host", "valkey://***@host"),
        ("nonsense", "nonsense"),
    ],
)
def test_redaction_also_works_on_nonsense(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_a_ca_file_is_read_when_connecting(tmp_path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(b"pem")
    assert parse_url(f"valkeys://v?ca_file={file}").ca_pem() == b"pem"
    with pytest.raises(ConfigurationError, match=r"missing\.pem of the Valkey URL: No such file"):
        parse_url(f"valkeys://v?ca_file={tmp_path}/missing.pem").ca_pem()

"""URL forms, keys and bounds of an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispatch.backend import Endpoint
from dispatch.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "url", "address"),
    [
        ("http://127.0.0.1:9000/v1", "http://127.0.0.1:9000/v1", "http://127.0.0.1:9000/v1"),
        ("http://127.0.0.1:9000/v1/", "http://127.0.0.1:9000/v1", "http://127.0.0.1:9000/v1"),
        ("http://h/v1//", "http://h/v1", "http://h:80/v1"),
        ("http://h", "http://h", "http://h:80"),
        ("http://h/", "http://h", "http://h:80"),
        ("HTTPS://API.Example.COM:443/v1", "https://api.example.com/v1", "https://api.example.com:443/v1"),
        ("https://user:pass@h:8443/v1", "https://h:8443/v1", "https://h:8443/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("http://bücher.example/v1", "http://xn--bcher-kva.example/v1", "http://xn--bcher-kva.example:80/v1"),
        (" http://h/a b/v1\n", "http://h/a%20b/v1", "http://h:80/a%20b/v1"),
    ],
)
def test_url_is_normalised_once(given: str, url: str, address: str) -> None:
    endpoint = Endpoint(endpoint_id="e", url=given)
    assert endpoint.url == url
    assert endpoint.address == address
    assert endpoint.url_of("chat/completions") == f"{url}/chat/completions"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "http(s)://"),
        ("127.0.0.1:9000/v1", "http(s)://"),
        ("ftp://h/v1", "http(s)://"),
        ("http://", "http(s)://"),
        ("http:///v1", "http(s)://"),
        ("http://h:0/v1", "port"),
        ("http://h:65536/v1", "port"),
        ("http://h:x/v1", "http(s)://"),
        ("http://h/v1?key=s3cret", "query"),
        ("http://h/v1?", "query"),
        ("http://h/v1#s3cret", "query or fragment"),
        ("http://h/v1/chat/completions", "base URL"),
        ("http://h/v1/responses/", "base URL"),
        ("http://u:s3cret@h:port/v1", "http(s)://"),
    ],
)
def test_other_urls_are_refused_without_showing_them(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Endpoint(endpoint_id="mine", url=url)
    assert says in str(caught.value)
    assert "mine" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_secrets_are_in_no_repr() -> None:
    endpoint = Endpoint(endpoint_id="e", url="http://h/v1", api_key="sk-s3cret")
    other = Endpoint(endpoint_id="e", url="http://u:s3cret@h/v1")
    assert "s3cret" not in f"{endpoint!r}{endpoint}{other!r}{other.url}{other.address}"
    assert endpoint.authorization == "Bearer sk-s3cret"
    assert other.authorization == "Basic dTpzM2NyZXQ="
    assert Endpoint(endpoint_id="e", url="http://h/v1").authorization == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"connect_timeout_ms": 0}, "connect_timeout_ms"),
        ({"first_byte_timeout_ms": -1}, "first_byte_timeout_ms"),
        ({"idle_timeout_ms": 1.5}, "idle_timeout_ms"),
        ({"idle_timeout_ms": True}, "idle_timeout_ms"),
        ({"max_response_bytes": "9"}, "max_response_bytes"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"api_key": "ключ"}, "api_key"),
        ({"api_key": "k", "url": "http://u:p@h/v1"}, "one of them"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        Endpoint(**{"endpoint_id": "e", "url": "http://h/v1", **fields})
    assert "ключ" not in str(caught.value)


def test_config_gives_bounds_and_the_key_of_the_environment() -> None:
    document = {
        "endpoint_id": "gpu",
        "url": "http://h/v1/",
        "api_key_env": "GPU_KEY",
        "api_key_file": "",
        "max_concurrent": None,
        "connect_timeout_ms": 7,
        "first_byte_timeout_ms": 8,
        "idle_timeout_ms": 9,
        "use_proxy": True,
        "breaker_failures": 5,
    }
    endpoint = Endpoint.from_config(document, {"GPU_KEY": " sk-1\n"})
    assert endpoint == Endpoint(
        endpoint_id="gpu",
        url="http://h/v1",
        api_key="sk-1",
        connect_timeout_ms=7,
        first_byte_timeout_ms=8,
        idle_timeout_ms=9,
        use_proxy=True,
    )


def test_config_reads_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-2\n")
    endpoint = Endpoint.from_config({"endpoint_id": "e", "url": "http://h", "api_key_file": str(file)}, {})
    assert endpoint.api_key == "sk-2"


def test_config_without_a_key_uses_defaults() -> None:
    endpoint = Endpoint.from_config({"endpoint_id": "e", "url": "http://h"}, {})
    assert endpoint == Endpoint(endpoint_id="e", url="http://h")
    assert (endpoint.connect_timeout_ms, endpoint.max_response_bytes) == (5_000, 64 * 1024 * 1024)
    assert endpoint.use_proxy is False


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"url": "http://h", "api_key_env": "NO_KEY"}, "NO_KEY"),
        ({"url": "http://h", "api_key_env": "EMPTY_KEY"}, "EMPTY_KEY"),
        ({"url": "http://h", "api_key_file": "/nowhere/key"}, "/nowhere/key"),
        ({"url": "http://h", "api_key_env": "A", "api_key_file": "b"}, "both"),
        ({"url": "http://h", "use_proxy": "yes"}, "use_proxy"),
        ({"url": None}, "url"),
        ({}, "url"),
        ({"url": "http://h", "connect_timeout_ms": "5"}, "connect_timeout_ms"),
    ],
)
def test_wrong_config_is_named(document: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Endpoint.from_config({"endpoint_id": "e", **document}, {"EMPTY_KEY": " "})


@pytest.mark.parametrize(("content", "says"), [(b"", "empty"), (b"k" * 20_000, "large"), (b"\xff\xfe", "plain text")])
def test_unusable_key_files_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=says) as caught:
        Endpoint.from_config({"endpoint_id": "e", "url": "http://h", "api_key_file": str(file)}, {})
    assert str(file) in str(caught.value)

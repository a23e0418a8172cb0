"""The URL of a history: its forms, and what is wrong with others."""

from __future__ import annotations

import pytest

from dispatch.errors import ConfigurationError
from dispatch.telemetry.history.target import target_of

SECRET = "open-sesame"


@pytest.mark.parametrize(
    ("url", "address", "options"),
    [
        ("clickhouse://ch", "clickhouse://ch:8123/default", {"interface": "http", "host": "ch", "port": 8123}),
        ("clickhouses://ch/db", "clickhouses://ch:8443/db", {"interface": "https", "port": 8443, "database": "db"}),
        ("http://u@ch:99/", "http://ch:99/default", {"interface": "http", "port": 99, "username": "u"}),
        ("https://a%40b@ch/x_1", "https://ch:8443/x_1", {"username": "a@b", "database": "x_1"}),
        ("clickhouse://[::1]:1", "clickhouse://[::1]:1/default", {"host": "::1", "username": "default"}),
        ("chdb:///var/lib/h", "chdb:///var/lib/h", {"interface": "chdb", "path": "/var/lib/h"}),
    ],
)
def test_every_form_is_read(url: str, address: str, options: dict[str, object]) -> None:
    target = target_of(url)
    assert target.address == address
    assert options.items() <= target.options.items()
    assert target.embedded is url.startswith("chdb")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "another form than expected: clickhouse://"),
        ("clickhouse://", "another form"),
        ("postgres://h/db", "another form"),
        ("clickhouse://h/a/b", "another form"),
        ("clickhouse://h:port", "is none"),
        ("clickhouse://h/d-b", "database 'd-b' is no name"),
        ("clickhouse://h?secure=1", "mean nothing here"),
        ("clickhouse://h#x", "mean nothing here"),
        ("chdb://memory", "needs an absolute path"),
        ("chdb://", "needs an absolute path"),
        (f"clickhouse://u:{SECRET}@h", "holds a password, which would be shown"),
    ],
)
def test_what_is_wrong_is_said_without_secrets(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        target_of(url)
    assert SECRET not in str(caught.value)


def test_the_password_comes_from_the_environment_and_is_never_shown() -> None:
    target = target_of("clickhouse://u@h", "CH_PASSWORD", {"CH_PASSWORD": SECRET})
    assert target.options["password"] == SECRET
    assert SECRET not in repr(target)
    for empty in ({}, {"CH_PASSWORD": ""}):
        with pytest.raises(ConfigurationError, match=r"variable CH_PASSWORD, which is to hold .* is not set"):
            target_of("clickhouse://u@h", "CH_PASSWORD", empty)

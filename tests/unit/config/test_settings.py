"""Gateway settings: sources, errors a person can read, secrets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dispatch.config import GatewaySettings
from dispatch.config.settings import SLOTS_MAX
from dispatch.errors import ConfigurationError
from dispatch.fabric.schema import LIMITS


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:

    for name in os.environ:
        if name.startswith("DISPATCH_"):
            monkeypatch.delenv(name)


def test_the_defaults_need_nothing() -> None:
    settings = GatewaySettings()
    assert (settings.enabled, settings.fabric_group, settings.host, settings.port) == (
        True,
        "default",
        "127.0.0.1",
        8080,
    )
    assert (settings.slots, settings.drain_timeout_ms, settings.valkey_client) == (64, 30_000, "glide")


def test_the_bound_of_slots_is_what_one_heartbeat_may_name() -> None:
    assert SLOTS_MAX + 2 * LIMITS["claim_max"] <= LIMITS["renew_max"]


def test_a_made_up_gateway_id_is_a_name_and_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "höst {1}:x" + "y" * 200)
    first, second = GatewaySettings().gateway_id, GatewaySettings().gateway_id
    assert first != second
    assert first.startswith("h-st-1-")


def test_arguments_win_over_the_environment_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("slots: 1\nport: 1\nhost: 0.0.0.0\nfabric_group: file\n")
    monkeypatch.setenv("DISPATCH_CONFIG_FILE", str(file))
    monkeypatch.setenv("DISPATCH_SLOTS", "2")
    monkeypatch.setenv("DISPATCH_PORT", "2")
    settings = GatewaySettings(slots=3)
    assert (settings.slots, settings.port, settings.host, settings.fabric_group) == (3, 2, "0.0.0.0", "file")


def test_the_file_named_by_an_argument_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("slots = 5\n")
    monkeypatch.setenv("DISPATCH_CONFIG_FILE", str(tmp_path / "absent.toml"))
    assert GatewaySettings(config_file=tmp_path / "a.toml").slots == 5


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("slots", "many", "a whole number from 1 to 2048"),
        ("slots", "0", "a whole number from 1 to 2048"),
        ("port", "65536", "a port from 0"),
        ("enabled", "perhaps", "true or false"),
        ("drain_timeout_ms", "-1", "milliseconds from 0"),
        ("valkey_client", "jedis", "glide or redis"),
        ("fabric_group", "a{b}", "letters, digits"),
        ("gateway_id", "", "letters, digits"),
        ("endpoint_url", "localhost:8000", "a URL like http://"),
        ("endpoint_api_key_env", "sk-1234", "the name of an environment variable"),
        ("log_level", "loud", "debug, info"),
        ("keys", "maybe", "auto, required or off"),
        ("http_max_connections", "0", "a whole number from 1"),
        ("http_trusted_proxies", "10.0.0.0/8,proxy.internal", "addresses or networks separated by commas"),
        ("http_trusted_proxies", "10.0.0.1/8", "addresses or networks separated by commas"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(f"DISPATCH_{name.upper()}", value)
    with pytest.raises(ConfigurationError) as caught:
        GatewaySettings()
    text = str(caught.value)
    assert f"DISPATCH_{name.upper()} (--{name.replace('_', '-')}): " in text
    assert value in text
    assert allowed in text
    assert "\n" not in text


def test_every_wrong_value_has_a_line_of_its_own() -> None:
    with pytest.raises(ConfigurationError) as caught:
        GatewaySettings(slots=0, port=-1)
    assert [line.split(" ")[0] for line in str(caught.value).splitlines()] == ["DISPATCH_PORT", "DISPATCH_SLOTS"]


@pytest.mark.parametrize(
    "url",
    [
        "valkey://user:hunter2@host:6379/0",
        "http://user:hunter2@host",
        "user:hunter2@host",
        "ftp://u:hunter2/x@host",
        "ftp://u:hunter2@a@host",
        "ftp://[hunter2@",
    ],
)
def test_a_password_never_shows(url: str) -> None:
    for name in ("valkey_url", "endpoint_url"):
        try:
            text = repr(GatewaySettings(**{name: url})) + str(GatewaySettings(**{name: url}))
        except ConfigurationError as error:
            text = f"{error} {error!r} {error.__cause__!r}"
        assert "hunter2" not in text


def test_an_unknown_setting_in_a_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("slotz: 4\n")
    with pytest.raises(ConfigurationError, match=r"gateway\.yaml: 'slotz' .* did you mean 'slots'"):
        GatewaySettings(config_file=file)


@pytest.mark.parametrize("more", [{"slotz": 4}, {"zzz": 1}])
def test_an_unknown_argument_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="is no setting of a gateway"):
        GatewaySettings(**more)


def test_what_is_missing_is_named_when_it_is_needed() -> None:
    settings = GatewaySettings()
    with pytest.raises(ConfigurationError, match=r"DISPATCH_VALKEY_URL \(--valkey-url\) is missing"):
        settings.require_valkey_url()
    with pytest.raises(ConfigurationError, match=r"DISPATCH_ENDPOINT_URL \(--endpoint-url\) is missing"):
        settings.require_endpoint_url()

"""Settings of one gateway process: flags, then `DISPATCH_*` variables, then a file, then defaults."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dispatch.config.files import read_mapping
from dispatch.contract.names import check_name
from dispatch.errors import ConfigurationError, InvalidRequest

SLOTS_MAX = 2048
"""One heartbeat names every held lease, and those it finds out about: well below `[limits] renew_max` of the schema."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_PREFIX = "DISPATCH_"
VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?$"
"""What the name of an environment variable looks like, or none."""

_HISTORY_SCHEMES = ("clickhouse", "clickhouses", "http", "https", "chdb")
_VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")


def made_up_gateway_id() -> str:
    """Return a new gateway id: host name (as far as it may be a name), process id, random part."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname())[:80] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


class GatewaySettings(BaseSettings):
    """What one gateway process is told. Times are milliseconds unless the name says `_s`.

    Values come from keyword arguments, else `DISPATCH_<NAME>` variables, else the file named by `config_file`
    (`DISPATCH_CONFIG_FILE`; .yaml, .toml or .json), else the defaults here. URLs may hold passwords, so they never
    stand in `repr` and never in an error's text.

    Raises:
        ConfigurationError: one line for each wrong setting, with its name, the value and what is allowed.
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    config_file: Path | None = Field(None, description="a .yaml, .toml or .json file")
    enabled: bool = Field(True, description="true or false")
    valkey_url: str = Field("", repr=False, description="a URL like valkey://user:password@host:6379/0")
    valkey_client: Literal["glide", "redis"] = Field("glide", description="glide or redis")
    fabric_group: str = Field("default", description="1 to 128 of letters, digits, '.', '_', '-'")
    gateway_id: str = Field(
        default_factory=made_up_gateway_id, description="1 to 128 of letters, digits, '.', '_', '-'"
    )
    host: str = Field("127.0.0.1", min_length=1, description="an address to listen on, like 127.0.0.1 or 0.0.0.0")
    port: int = Field(8080, ge=0, le=65535, description="a port from 0 (any free one) to 65535")
    slots: int = Field(64, ge=1, le=SLOTS_MAX, description=f"a whole number from 1 to {SLOTS_MAX}")
    drain_timeout_ms: int = Field(30_000, ge=0, le=86_400_000, description="milliseconds from 0 to 86400000 (a day)")
    endpoint_url: str = Field("", repr=False, description="a URL like http://host:8000/v1")
    endpoint_api_key_env: str = Field(
        "", pattern=VARIABLE, description="the name of an environment variable, not the key"
    )
    keys: Literal["auto", "required", "off"] = Field("auto", description="auto, required or off")
    insecure: bool = Field(False, description="true or false")
    http_keep_alive_s: int = Field(75, ge=0, le=3600, description="seconds from 0 to 3600")
    http_max_connections: int = Field(8192, ge=1, le=1_000_000, description="a whole number from 1 to 1000000")
    http_max_connections_per_address: int = Field(
        2048, ge=1, le=1_000_000, description="a whole number from 1 to 1000000"
    )
    http_trusted_proxies: str = Field(
        "", description="addresses or networks separated by commas, like 10.0.0.5,10.1.0.0/16"
    )
    metrics: Literal["keys", "open", "off"] = Field("keys", description="keys, open or off")
    history_url: str = Field(
        "", repr=False, description="a URL like clickhouse://user@host:8123/database, http(s)://... or chdb:///path"
    )
    history_password_env: str = Field(
        "", pattern=VARIABLE, description="the name of an environment variable, not the password"
    )
    history_ttl_days: int = Field(90, ge=1, le=36_500, description="days from 1 to 36500")
    history_batch_rows: int = Field(2_000, ge=1, le=100_000, description="a whole number from 1 to 100000")
    log_format: Literal["auto", "console", "json"] = Field("auto", description="auto, console or json")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # "from None": pydantic's own text would repeat the input, which may hold a password.
            problems = [_problem(type(self), item) for item in error.errors(include_url=False)]
            raise ConfigurationError("\n".join(problems)) from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *args: PydanticBaseSettingsSource, **sources: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, file."""
        given = dict(zip(("init_settings", "env_settings"), args, strict=False)) | sources
        arguments, environment = given["init_settings"], given["env_settings"]
        return arguments, environment, _FileSource(settings_cls, arguments, environment)

    @field_validator("fabric_group", "gateway_id")
    @classmethod
    def _is_name(cls, value: str) -> str:
        try:
            return check_name("it", value)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error

    @field_validator("valkey_url")
    @classmethod
    def _is_valkey_url(cls, value: str) -> str:
        # Only the scheme: the fabric reads the rest when it connects, and knows the forms for clusters.
        if value and urlsplit(value).scheme not in _VALKEY_SCHEMES:
            raise ValueError("no Valkey URL")
        return value

    @field_validator("endpoint_url")
    @classmethod
    def _is_endpoint_url(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0):
            raise ValueError("no HTTP URL")
        return value

    @field_validator("history_url")
    @classmethod
    def _is_history_url(cls, value: str) -> str:
        # Only the scheme: the history reads the rest when it connects.
        if value and urlsplit(value).scheme not in _HISTORY_SCHEMES:
            raise ValueError("no history URL")
        return value

    @field_validator("http_trusted_proxies")
    @classmethod
    def _is_networks(cls, value: str) -> str:
        read_networks(value)
        return value

    def require_valkey_url(self) -> str:
        """Return `valkey_url`.

        Raises:
            ConfigurationError: it is not set; says how to set it.
        """
        if not self.valkey_url:
            raise ConfigurationError(missing("valkey_url", type(self).model_fields["valkey_url"]))
        return self.valkey_url

    def require_endpoint_url(self) -> str:
        """Return `endpoint_url`, which a group that was never configured needs.

        Raises:
            ConfigurationError: it is not set; says how to set it.
        """
        if not self.endpoint_url:
            raise ConfigurationError(
                f"{missing('endpoint_url', type(self).model_fields['endpoint_url'])} (the fabric group "
                f"{self.fabric_group!r} has no configuration yet, so the gateway needs an endpoint to make one)"
            )
        return self.endpoint_url


class _FileSource(PydanticBaseSettingsSource):
    """The settings file, if one is named by an argument or the environment."""

    def __init__(self, settings_cls: type[BaseSettings], *before: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._before = before

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - the base's
        """Unused: the file is read as a whole."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        named = next((path for source in self._before if (path := source().get("config_file"))), None)
        if named is None:
            return {}
        values = read_mapping(Path(named))
        known = [name for name in self.settings_cls.model_fields if name != "config_file"]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigurationError(f"{named}: {name!r} is no setting of a gateway{hint}")
        return values


def read_networks(text: str) -> tuple[Network, ...]:
    """Read addresses and networks separated by commas.

    Raises:
        ValueError: one of them is none.
    """
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def setting_name(name: str) -> str:
    """Return how people name a setting: its flag and its variable."""
    return f"{_PREFIX}{name.upper()} (--{name.replace('_', '-')})"


def missing(name: str, field: FieldInfo) -> str:
    """Return the sentence for a setting that must be given."""
    return f"{setting_name(name)} is missing: {field.description} is needed"


def _problem(settings_cls: type[BaseSettings], item: ErrorDetails) -> str:
    name = str(item["loc"][0]) if item["loc"] else "?"
    field = settings_cls.model_fields.get(name)
    if field is None:
        near = difflib.get_close_matches(name, list(settings_cls.model_fields), 1)
        return f"{name!r} is no setting of a gateway" + (f"; did you mean {near[0]!r}?" if near else "")
    shown = repr(item["input"])[:80] if field.repr else _without_password(str(item["input"]))
    return f"{setting_name(name)}: {shown} is not allowed; {field.description} is"


def _without_password(url: str) -> str:
    """Return a URL as it may be shown, or a stand-in when it is too odd to tell where a password would stand."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the value (not shown)"
    if url.count("@") > 1 or ("@" in url and "@" not in parts.netloc):
        return "the value (not shown)"
    return repr(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else url)[:80]

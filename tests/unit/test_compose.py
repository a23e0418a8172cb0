"""compose.yaml names real commands, options, settings and files; every service that stays says when it is well."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from dispatch.cli import main as root
from dispatch.config import GatewaySettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
ONE_SHOT = {"library"}


def test_the_services_are_those_of_the_issue() -> None:
    assert set(SERVICES) == {"valkey", "library", "backend", "gateway-1", "gateway-2"}
    assert set(OURS) == set(SERVICES) - {"valkey"}


@pytest.mark.parametrize("name", OURS)
def test_a_command_is_one_of_ours_with_options_it_has(name: str) -> None:
    command: Any = get_command(root.app)
    words = list(OURS[name]["command"])
    while getattr(command, "commands", None):
        command = command.get_command(None, words.pop(0))
        assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("name", OURS)
def test_a_variable_is_a_setting_that_exists(name: str) -> None:
    settings = {f"DISPATCH_{field.upper()}" for field in GatewaySettings.model_fields}
    assert set(OURS[name].get("environment", {})) <= settings


@pytest.mark.parametrize("name", sorted(set(SERVICES) - ONE_SHOT))
def test_a_service_that_stays_has_a_health_check_and_restarts(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", OURS)
def test_what_a_service_waits_for_can_come_true(name: str) -> None:
    for other, how in OURS[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if other in ONE_SHOT else "service_healthy"
        assert how["condition"] == expected


def test_the_gateways_differ_in_name_and_port_only_and_listen_on_this_machine_only() -> None:
    first, second = (dict(SERVICES[name]) for name in ("gateway-1", "gateway-2"))
    assert first.pop("ports") == ["127.0.0.1:8080:8080"]
    assert second.pop("ports") == ["127.0.0.1:8081:8080"]
    assert first["environment"].pop("DISPATCH_GATEWAY_ID") != second["environment"].pop("DISPATCH_GATEWAY_ID")
    assert first == second
    assert not any("ports" in SERVICES[name] for name in ("valkey", "backend", "library"))


def test_valkey_keeps_requests_over_a_restart_and_throws_none_out() -> None:
    command = SERVICES["valkey"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert SERVICES["valkey"]["volumes"] == ["valkey:/data"]
    assert "valkey" in DOCUMENT["volumes"]


def test_the_image_is_built_from_files_that_exist_and_are_not_ignored() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    wanted = re.search(r"python:3\.(\d+)", "\n".join(lines))
    assert wanted is not None
    assert int(wanted[1]) >= 11


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is not installed",
)
def test_compose_itself_accepts_the_file() -> None:
    subprocess.run(["docker", "compose", "--file", str(ROOT / "compose.yaml"), "config", "--quiet"], check=True)

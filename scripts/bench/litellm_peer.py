"""The peer: LiteLLM's proxy, in an environment of its own that is made once and kept in the cache folder."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.bench.children import Child, Children, Failed

VERSION = "1.106.12"
"""The newest all of whose `proxy` packages the package index has (1.108 to 1.110 pin some that are not there)."""

ALIVE = "/health/liveliness"
"""A path that it answers when it serves, at little cost."""

_INSTALL_S = 1200.0
_START_S = 120.0


class NotThere(Exception):
    """It cannot be installed or started here; says why."""


def cache_folder() -> Path:
    """Return where the environment is kept: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "fabric-dispatch" / f"litellm-{VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"


def install(folder: Path) -> Path:
    """Make the environment unless it is there; returns its Python. Several at once take turns.

    Raises:
        NotThere: it cannot be made; says what the installer said last.
    """
    python, made = folder / "bin" / "python", folder / "made"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([*pip, f"litellm[proxy]=={VERSION}"])
        made.touch()
    return python


def start(children: Children, python: Path, backend_url: str, port: int) -> Child:
    """Start the proxy with one worker in front of the backend; it is not ready yet (see `wait_ready`)."""
    model = {"model": "openai/bench", "api_base": backend_url, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "bench", "litellm_params": model}],
        "litellm_settings": {"telemetry": False, "num_retries": 0, "set_verbose": False},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        # It asks for no key, as a gateway on loopback asks for none.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }  # fmt: skip
    quiet = {"version": 1, "disable_existing_loggers": False, "loggers": {"uvicorn.access": {"level": "CRITICAL"}}}
    for name, document in (("litellm.yaml", config), ("litellm-log.json", quiet)):
        (children.folder / name).write_text(json.dumps(document))  # JSON is YAML
    environment = {
        "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False", "NO_DOCS": "True", "NO_REDOC": "True", "DISABLE_ADMIN_UI": "True",
        "PYTHONPATH": "",
    }  # fmt: skip
    command = [
        str(python.with_name("litellm")), "--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port),
        "--num_workers", "1", "--telemetry", "False", "--log_config", "litellm-log.json",
    ]  # fmt: skip
    return children.start("litellm", command, environment=environment)


def wait_ready(child: Child, port: int) -> None:
    """Wait until it serves.

    Raises:
        NotThere: it does not.
    """
    try:
        child.wait_for(f"http://127.0.0.1:{port}{ALIVE}", _START_S)
    except Failed as error:
        raise NotThere(str(error)) from error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_INSTALL_S, stdin=subprocess.DEVNULL
        )
    except subprocess.CalledProcessError as error:
        said = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
        raise NotThere(f"installing it failed: {said[-1] if said else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotThere(f"installing it failed: {error}") from error

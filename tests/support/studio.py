"""The operators' page as a process, and a group that it shows, filled by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Self

from dispatch.fabric import functions as f
from dispatch.fabric.api_keys import Grant, NewKey, Role, new_key
from dispatch.fabric.records import Submission
from dispatch.fabric.sync import BlockingConnection

_STOP_S = 10.0


class Process:
    """A command of ours that says where it listens in the first line of its standard output."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None, log: Path | None = None) -> None:
        self._words = words
        self._environment = environment or {}
        self._log = log
        self.first_line = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCH_")}
        with Path(self._log or os.devnull).open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dispatch", *self._words], env=clean | self._environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self.first_line = self._process.stdout.readline().strip()
        assert self.first_line, "it did not start" if self._log is None else self._log.read_text("utf-8")
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code. Repeatable."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode


def studio(url: str, *groups: str, **options: Any) -> Process:
    """Return `dispatch studio` for these groups, not started yet. `environment` and `log` are of the process."""
    words = ["studio", "--url", url, "--port", str(options.pop("port", 0)), "--json", "--log-format", "json"]
    environment, log = options.pop("environment", None), options.pop("log", None)
    for group in groups:
        words += ["--group", group]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return Process(*words, environment=environment, log=log)


def address_of(process: Process) -> str:
    """Return where a started Studio listens."""
    return str(json.loads(process.first_line)["url"])


class Hand:
    """Fills a group and looks at it, straight on Valkey."""

    def __init__(self, url: str, group: str) -> None:
        self.url = url
        self.group = group

    def run(self, call: Any) -> Any:
        """Run one function for the group."""
        with BlockingConnection(self.url) as connection:
            return connection.run(self.group, call)

    def section(self, name: str, **more: Any) -> Any:
        """Read a section of the group's snapshot."""
        return self.run(f.fabric_snapshot(name, **more))

    def pool(self, name: str) -> dict[str, Any]:
        """Return one pool's row."""
        [row] = self.section("pools", subject=name)["rows"]
        found: dict[str, Any] = row
        return found

    def document(self) -> dict[str, Any]:
        """Return the config in force."""
        found: dict[str, Any] = self.section("config")["document"]
        return found

    def generation(self) -> int:
        """Return the generation in force."""
        return int(self.section("config")["generation"])

    def submit(self, pool: str, count: int = 1, **facts: Any) -> list[str]:
        """Queue requests; returns their ids."""
        ids = [facts.pop("request_id", "") or uuid.uuid4().hex for _ in range(count)]
        calls = [f.request_submit(_submission(pool, request_id, facts)) for request_id in ids]
        with BlockingConnection(self.url) as connection:
            for at in range(0, len(calls), 128):
                for answer in connection.run(self.group, f.submit_together(calls[at : at + 128])):
                    assert not isinstance(answer, Exception), answer
        return ids

    def claim(self, want: int, gateway: str = "gw-1") -> list[str]:
        """Run requests on a gateway that only says so; returns their ids."""
        self.run(f.lease_renew(_beat(gateway)))
        claim = self.run(f.lease_claim(gateway, f"{gateway}/d", nonce=uuid.uuid4().hex, want=want))
        return [lease.request_id for lease in claim.leases]

    def key(self, name: str, *roles: Role) -> NewKey:
        """Make a key of the group."""
        key = new_key(Grant(name=name, roles=roles))
        assert self.run(f.key_change("create", key.key_id, key.record, actor="test")) == "CREATED"
        return key


def _beat(gateway: str) -> Any:
    from dispatch.fabric.records import Heartbeat  # noqa: PLC0415 - beside its only use

    return Heartbeat(
        gateway_id=gateway, host="host-1", pid=1, version="0.1.0", slots=64, started_ms=1, draining=False, nonces=(),
        held=(),
    )  # fmt: skip


def _submission(pool: str, request_id: str, facts: dict[str, Any]) -> Submission:
    usual: dict[str, Any] = {
        "request_id": request_id, "pool_id": pool, "producer_id": "worker-11", "session": "s", "nonce": "n",
        "model": "qwen3", "message_count": 2, "images": 0, "pages": 0, "estimated_cost_units": 1, "timeout_ms": None,
        "envelope": b"{}", "body_bytes": 2, "body": b"{}", "liveness_ms": 600_000, "fairness_key": "",
        "priority": None,
    }  # fmt: skip
    return Submission(**usual | facts)

"""A gateway as a process of its own, for tests that signal and kill it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.support.producing import until


class GatewayProcess:
    """`dispatch gateway` with these settings (as `DISPATCH_*` variables), on any free port, logging JSON."""

    def __init__(self, valkey_url: str, group: str, **settings: Any) -> None:
        values = {"valkey_url": valkey_url, "fabric_group": group, "port": 0, "log_format": "json"} | settings
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCH_")}
        self._environment = clean | {f"DISPATCH_{name.upper()}": str(value) for name, value in values.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(tempfile.mkstemp(prefix="gateway-", suffix=".log")[1])

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            self.close()
            raise

    async def __aexit__(self, *_exception: object) -> None:
        self.close()

    def launch(self) -> Self:
        """Start it and do not wait."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dispatch", "gateway"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        return self

    async def start(self) -> Self:
        """Start it and wait until it listens."""
        self.launch()
        await until(lambda: self.event("listening") is not None or self.code is not None, within_s=40)
        assert self.code is None, self.stderr
        return self

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def url(self) -> str:
        """Where it listens."""
        event = self.event("listening")
        assert event is not None
        return str(event["url"])

    @property
    def stderr(self) -> str:
        """Everything it has said."""
        return self._log.read_text("utf-8", "replace")

    def event(self, name: str) -> dict[str, Any] | None:
        """Return its first log event of this name."""
        for line in self.stderr.splitlines():
            with contextlib.suppress(ValueError):
                event: dict[str, Any] = json.loads(line)
                if event.get("event") == name:
                    return event
        return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self, within_s: float) -> int:
        """Wait for its end and return the exit code."""
        await until(lambda: self.code is not None, within_s=within_s)
        code = self.code
        assert code is not None
        return code

    def close(self) -> None:
        """End it at once, if it runs still, and remove its log."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)

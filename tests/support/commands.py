"""The `dispatch` command inside the test's own process: what it said on which stream, and its exit code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from dispatch.cli import main as root


@dataclass(frozen=True)
class Done:
    """One run."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    """Runs commands for one group of one server."""

    def __init__(self, url: str, group: str) -> None:
        self._environment = {"DISPATCH_VALKEY_URL": url, "DISPATCH_FABRIC_GROUP": group}

    def __call__(self, *words: str, typed: str = "") -> Done:
        result = CliRunner().invoke(root.app, list(words), env=self._environment, input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

"""The corpus rows as tests read them: a manifest line with its bytes.

`DISPATCH_TEST_CORPUS` names another folder of the same form, so that other cases of the same kinds run through the same
tests. Large bodies are made from their recipe when first asked for and kept in `<folder>/big/`, which git ignores.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(os.environ.get("DISPATCH_TEST_CORPUS") or Path(__file__).resolve().parents[1] / "corpus")


@dataclass(frozen=True)
class Case:
    """One manifest row; `data` are the bytes of its body."""

    folder: str
    row: dict[str, Any]

    @property
    def id(self) -> str:
        return self.row["id"]

    @property
    def data(self) -> bytes:
        return _data(self.folder, self.id)

    def __str__(self) -> str:
        return self.id


def cases(folder: str) -> list[Case]:
    """Return all rows of `requests`, `bad_requests`, `replies` or `streams`."""
    return list(_rows(folder).values())


def callers() -> dict[str, Any]:
    """Return the calls that trigger a reply or a stream, by name."""
    return json.loads((ROOT / "callers.json").read_text("utf-8"))


def tool(name: str) -> ModuleType:
    """Import one of the corpus' own tools (`jsonsame`, `sse_ref`) or `make_big`."""
    path = ROOT / f"{name}.py" if name == "make_big" else ROOT / "tools" / f"{name}.py"
    return _module(path)


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _rows(folder: str) -> dict[str, Case]:
    manifest = ROOT / folder / "manifest.jsonl"
    lines = manifest.read_text("utf-8").splitlines() if manifest.is_file() else []
    return {row["id"]: Case(folder, row) for row in map(json.loads, lines)}


@functools.lru_cache(maxsize=4)
def _data(folder: str, case_id: str) -> bytes:
    row = _rows(folder)[case_id].row
    if not row.get("file"):
        return b""
    path = ROOT / folder / row["file"]
    if path.is_file():
        data = path.read_bytes()
        if _fits(row, data):
            return data
        assert row.get("big"), f"{case_id}: {path} is not the file its row describes"
    data = tool("make_big").build(row["big"])
    assert _fits(row, data), f"{case_id}: the recipe made other bytes than its row describes"
    _keep(path, data)
    return data


def _fits(row: dict[str, Any], data: bytes) -> bool:
    return len(data) == row["bytes"] and hashlib.sha256(data).hexdigest() == row["sha256"]


def _keep(path: Path, data: bytes) -> None:
    """Store a made body for the next run; whole or not at all, and a folder that cannot be written is no fault."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        return

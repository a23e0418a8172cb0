"""The function library with a rule broken on purpose, to see that a test would notice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import redis

from dispatch.fabric.library import join_library
from dispatch.fabric.schema import lua_root
from tests.support.valkey import ValkeyProcess

Rules = Mapping[str, list[tuple[str, str]]]
"""By file: lines that stand there once, and what to put in their place."""


def load_broken(server: ValkeyProcess, folder: Path, rules: Rules) -> None:
    """Load the library with `rules` broken into a server that has none; `folder` is for the copy."""
    for source in lua_root().rglob("*"):
        if source.suffix in {".lua", ".toml"}:
            copy = folder / source.relative_to(lua_root())
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text("utf-8"), "utf-8")
    for file, changes in rules.items():
        text = (folder / file).read_text("utf-8")
        for right, wrong in changes:
            assert text.count(right) == 1, f"{file} reads otherwise now: {right!r}"
            text = text.replace(right, wrong)
        (folder / file).write_text(text, "utf-8")
    with redis.Redis(host="127.0.0.1", port=server.port) as client:
        client.function_load(join_library(folder).text)

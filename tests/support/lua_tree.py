"""Small Lua libraries in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path

SCHEMA = """
[contract]
version = 7
pattern = "^[a-z]+\\"$"

[keys]
thing = { key = "key:llm:thing:<id>", type = "string", owner = "state/things.lua", holds = "a thing" }

[limits]
most = 3
"""

HEADER = """--- {name}: a function of a test.
-- Keys:    group root
-- Args:    (none)
-- Answers: whatever it returns
-- Errors:  (none)
-- Moves:   (none)
-- Touches: (none)
-- Flags:   {flags}
-- Cost:    constant
-- Twice:   same answer
"""


class LuaTree:
    """A folder laid out like `lua/`, its files written by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "schema.toml").write_text(SCHEMA, "utf-8")

    def module(self, name: str, *lines: str) -> None:
        """Write the module `lib.x` or `state.x` from its lines."""
        layer, _, stem = name.partition(".")
        path = self.folder / layer / f"{stem}.lua"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", "utf-8")

    def function(self, name: str, *lines: str, flags: str = "(none)") -> None:
        """Write a function file: a header of ten lines, then the lines."""
        self.module(f"functions.{name}", HEADER.format(name=name, flags=flags).rstrip("\n"), *lines)

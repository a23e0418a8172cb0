"""The header of a Lua function file: its interface, written once, read by the joiner and by tests.

--- request_submit: admit a request or say why not.
-- Keys:    group root
-- Args:    contract, request_id, ...
--          more of the same field
-- Flags:   (none)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dispatch.errors import ScriptFault

FIELDS = ("Keys", "Args", "Answers", "Errors", "Moves", "Touches", "Flags", "Cost", "Twice")
"""Every field of a header, in the order they have to stand in (the purpose line comes before them)."""

FLAGS = frozenset({"no-writes", "allow-oom"})
"""The function flags that this library uses."""

_PURPOSE = re.compile(r"--- (?P<name>[a-z][a-z0-9_]*): (?P<purpose>\S.*)")
_FIELD = re.compile(r"-- (?P<field>[A-Z][a-z]+):\s*(?P<text>.*)")
_MORE = re.compile(r"-- {2,}(?P<text>\S.*)")


@dataclass(frozen=True, slots=True)
class Header:
    """One header. `fields` keeps the order of the file; a field's text is one line, however it was wrapped."""

    name: str
    purpose: str
    fields: dict[str, str]

    @property
    def flags(self) -> tuple[str, ...]:
        """The function's flags; empty for `(none)`."""
        return tuple(word for word in self.words("Flags") if word != "(none)")

    def words(self, field: str) -> tuple[str, ...]:
        """Return a field's text divided at commas, bars and blanks; empty when the field is absent."""
        return tuple(word for word in re.split(r"[\s,|]+", self.fields.get(field, "")) if word)


def read_header(path: Path) -> Header:
    """Read the header of the function file `path`.

    Raises:
        ScriptFault: there is none, a line of it has another form, or a flag is unknown; names file and line.
    """
    where = f"lua/{path.parent.name}/{path.name}"
    lines = path.read_text("utf-8").splitlines()
    first = _PURPOSE.fullmatch(lines[0]) if lines else None
    if first is None:
        raise ScriptFault(f"{where}:1: the file has to begin with '--- {path.stem}: <purpose>.'")
    if first["name"] != path.stem:
        raise ScriptFault(f"{where}:1: the header names {first['name']!r}, the file {path.stem!r}")
    header = Header(first["name"], first["purpose"], _fields(where, lines))
    if unknown := sorted(set(header.flags) - FLAGS):
        raise ScriptFault(f"{where}: flag {unknown[0]!r} is unknown; known: {', '.join(sorted(FLAGS))}")
    return header


def _fields(where: str, lines: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    name = ""
    for number, line in enumerate(lines[1:], start=2):
        if not line.startswith("--"):
            break
        if found := _FIELD.fullmatch(line):
            name = found["field"]
            if name in fields:
                raise ScriptFault(f"{where}:{number}: field {name!r} stands twice")
            fields[name] = found["text"].strip()
        elif name and (more := _MORE.fullmatch(line)):
            fields[name] = f"{fields[name]} {more['text'].strip()}".lstrip()
        else:
            raise ScriptFault(f"{where}:{number}: a header line is '-- Field: text' or an indented continuation")
    return fields

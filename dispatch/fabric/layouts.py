"""How the library packs its hot records (`[records]` of the schema): the Lua that does it, and a reader for tools.

A MessagePack map with all fields under their names costs two to six times as much, both ways, because Lua grows a table
field by field as it is read. Such a map is still read wherever a packed record is: an older library wrote it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dispatch.fabric.luatable import lua_value
from dispatch.fabric.schema import document

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """The named fields of one kind of record; see the schema for what each list means."""

    marker: int
    numbers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    rows: dict[str, int] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    optional_texts: tuple[str, ...] = ()

    @property
    def doubles(self) -> int:
        """How many numbers stand behind the marker."""
        return len(self.numbers) + len(self.optional) + len(self.flags) + sum(self.rows.values())

    @property
    def least(self) -> dict[str, Any]:
        """What a record has that is told of nothing: its numbers, texts and tables are always there."""
        return dict.fromkeys(self.numbers, 0) | dict.fromkeys(self.texts, "") | {name: {} for name in self.tables}

    @property
    def _cells(self) -> list[tuple[str, str]]:
        """Name of a local variable for each field, and the Lua that makes the field of it."""
        return [
            *((name, name) for name in self.numbers),
            *((name, f"{name} ~= {_ABSENT} and {name} or nil") for name in self.optional),
            *((name, f"{name} == 1") for name in self.flags),
            *((name, "{ " + ", ".join(self._row(name, count)) + " }") for name, count in self.rows.items()),
            *((name, name) for name in self.texts),
            *((name, f'{name} ~= "" and {name} or nil') for name in self.optional_texts),
        ]

    @staticmethod
    def _row(name: str, count: int) -> list[str]:
        return [f"{name}_{at}" for at in range(1, count + 1)]

    @property
    def _variables(self) -> list[str]:
        rows = [one for name, count in self.rows.items() for one in self._row(name, count)]
        return [*self.numbers, *self.optional, *self.flags, *rows, *self.texts, *self.optional_texts]

    def _values(self) -> list[str]:
        rows = [f"record.{name}[{at}]" for name, count in self.rows.items() for at in range(1, count + 1)]
        return [
            *(f"record.{name}" for name in self.numbers),
            *(f"record.{name} or {_ABSENT}" for name in self.optional),
            *(f"record.{name} and 1 or 0" for name in self.flags),
            *rows,
            *(f"#record.{name}, record.{name}" for name in self.texts),
            *(f'#(record.{name} or ""), record.{name} or ""' for name in self.optional_texts),
        ]

    def lua_lines(self, name: str) -> Iterator[str]:
        """Yield the functions for records of this kind."""
        form = "d" * self.doubles + "Hc0" * (len(self.texts) + len(self.optional_texts))
        named = [*self.numbers, *self.optional, *self.flags, *self.rows, *self.texts, *self.optional_texts]
        yield f"  {name} = {{"
        yield f"    texts_at = {2 + 8 * self.doubles},"
        yield "    decode = function(text)"
        yield f"      if string.byte(text) ~= {self.marker} then return filled(map(text), {name}_least) end"
        yield f'      local {", ".join(self._variables)}, at = struct.unpack("<x{form}", text)'
        yield f"      local record = {{ {', '.join(f'{name} = {cell}' for name, cell in self._cells)} }}"
        yield "      if at <= #text then"
        yield "        for name, value in pairs(cmsgpack.unpack(string.sub(text, at))) do record[name] = value end"
        yield "      end"
        for one in self.tables:
            yield f"      record.{one} = record.{one} or {{}}"
        yield "      return record"
        yield "    end,"
        yield "    encode = function(record, rest)"
        yield f'      local head = struct.pack("<B{form}", {self.marker}, {", ".join(self._values())})'
        yield "      if not rest then"
        yield "        rest = record"
        for one in self.tables:
            yield f"        if next(record.{one}) == nil then record.{one} = nil end"
        for one in named:
            yield f"        record.{one} = nil"
        yield "      end"
        yield "      return next(rest) and head .. cmsgpack.pack(rest) or head"
        yield "    end,"
        yield "  },"

    def read(self, raw: bytes) -> dict[str, Any]:
        """Read a packed record; numbers that are whole are ints, what is absent is left out."""
        record = self.least
        if raw[0] != self.marker:
            stored: dict[str, Any] = msgspec.msgpack.decode(raw)
            return record | stored
        at = 1 + 8 * self.doubles
        values: list[Any] = [_whole(value) for value in struct.unpack_from(f"<{self.doubles}d", raw, 1)]
        texts = [*self.texts, *self.optional_texts]
        for _ in texts:
            (length,) = struct.unpack_from("<H", raw, at)
            values.append(raw[at + 2 : at + 2 + length].decode("utf-8", "surrogateescape"))
            at += 2 + length
        cells = dict(zip(self._variables, values, strict=True))
        record |= {name: cells[name] for name in [*self.numbers, *self.texts]}
        record |= {name: cells[name] for name in self.optional if cells[name] != _ABSENT}
        record |= {name: cells[name] == 1 for name in self.flags}
        record |= {name: [cells[one] for one in self._row(name, count)] for name, count in self.rows.items()}
        record |= {name: cells[name] for name in self.optional_texts if cells[name]}
        return record | (msgspec.msgpack.decode(raw[at:]) if at < len(raw) else {})


def layouts(schema: dict[str, Any]) -> dict[str, Layout]:
    """Return the layouts of a schema."""
    return {name: msgspec.convert(members, Layout) for name, members in schema.get("records", {}).items()}


def lua_lines(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the module `records`: `encode` and `decode` for each kind, and where its texts begin.

    `encode` uses the record up, unless it is told what the `rest` is that has no place of its own.
    """
    yield "local function map(text)"
    yield "  local found = cmsgpack.unpack(text)"
    yield "  return type(found) == 'table' and next(found) ~= nil and found or nil"
    yield "end"
    yield "local function filled(record, least)"
    yield "  for name, value in pairs(record and least or {}) do"
    yield "    if record[name] == nil then record[name] = type(value) == 'table' and {} or value end"
    yield "  end"
    yield "  return record"
    yield "end"
    for name, layout in layouts(schema).items():
        yield f"local {name}_least = {lua_value(layout.least)}"
    yield 'modules["records"] = {'
    yield "  map = map,"
    for name, layout in layouts(schema).items():
        yield from layout.lua_lines(name)
    yield "}"


def read_record(key: str, raw: bytes) -> dict[str, Any]:
    """Read the `record` of a hash whose key has this name in the schema (pool, request, group, endpoint)."""
    layout = layouts(document()).get(key)
    if layout:
        return layout.read(raw)
    found: dict[str, Any] = msgspec.msgpack.decode(raw)
    return found


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value

"""The joiner: makes one function library out of the small Lua files.

The server compiles a library as one text, so every file becomes a function of its own inside it, filed under its
module name, and a local `require` hands the results out. Files stand in dependency order, hence cycles cannot work
and are refused, as is a file that reaches upwards: `functions` > `state` > `lib`. Three modules are made here: `schema`
and `records` (from `schema.toml`), and `build` (version, contract and digest of this very text).

A line table leads from a line of the joined text, which is what the server's errors name, back to file and line.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dispatch.errors import ScriptFault
from dispatch.fabric import layouts
from dispatch.fabric.calls import FUNCTION_PREFIX
from dispatch.fabric.headers import Header, read_header
from dispatch.fabric.luatable import lua_member, lua_string, lua_value
from dispatch.fabric.schema import lua_root

LIBRARY_NAME = "fabric_dispatch"

_LAYERS = ("lib", "state", "functions")
_MAY_REQUIRE = {"lib": ("lib",), "state": ("lib", "state"), "functions": ("lib", "state")}
_GENERATED = ("schema", "build", "records")
_PRELUDE = (
    f"#!lua name={LIBRARY_NAME}",
    "local modules = {}",
    "local function require(name) return modules[name] end",
)
_BUILD = 'modules["build"] = '
_VERSION = re.compile(rf'^{re.escape(_BUILD)}.*\bversion = "(?P<version>[^"]*)"', re.MULTILINE)

# Comments and strings are matched first, so that a `require` inside one is not taken for a dependency.
_TOKEN = re.compile(
    r"""
    --\[(?P<level>=*)\[.*?\](?P=level)\] | --[^\n]*
    | (?<![\w.:])require\s*\(?\s*(?P<quote>["'])(?P<name>[^"'\n]*)(?P=quote)
    | (?<![\w.:])(?P<dynamic>require)\b
    | \[(?P<level2>=*)\[.*?\](?P=level2)\]
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    """,
    re.VERBOSE | re.DOTALL,
)
_RETURNS = re.compile(r"^return\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a Lua file; `file` is relative to the library's folder."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"lua/{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Library:
    """The joined library. `functions` are the server's names; `places` has one entry per line of `text`."""

    text: str
    digest: str
    version: str
    contract: int
    functions: tuple[str, ...]
    places: tuple[Place | None, ...]

    def place(self, line: int) -> Place | None:
        """Return where line `line` (from 1) of the joined text comes from; None for the joiner's own lines."""
        return self.places[line - 1] if 0 < line <= len(self.places) else None


@dataclass(frozen=True, slots=True)
class _Module:
    name: str
    file: str
    source: str
    requires: tuple[tuple[str, int], ...]

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]


@functools.cache
def package_version() -> str:
    """Return this package's version."""
    return metadata.version("fabric-dispatch")


@functools.cache
def current_library() -> Library:
    """Return this version's library; joined once per process.

    Raises:
        ScriptFault: the Lua files cannot be joined (see `join_library`).
        ConfigurationError: the Lua files are missing (a broken installation).
    """
    return join_library(lua_root())


def join_library(folder: Path, *, version: str | None = None) -> Library:
    """Join the Lua files under `folder` into one library; the same files give the same text.

    The digest leaves the package version out: two versions with equal Lua are equal to each other.

    Raises:
        ScriptFault: a cycle, an unknown module, a require that points upwards or is no literal, a file without a
            `return` or a function file without a header; names file and line.
    """
    schema = tomllib.loads((folder / "schema.toml").read_text("utf-8"))
    modules = _in_dependency_order({module.name: module for module in _read_modules(folder)})
    functions = sorted((module for module in modules if module.layer == "functions"), key=lambda module: module.name)
    content = [
        *((line, None) for line in _schema_lines(schema)),
        *((line, None) for line in layouts.lua_lines(schema)),
        *(row for module in modules for row in _module_lines(module)),
        *((_registration(module, read_header(folder / module.file)), Place(module.file, 1)) for module in functions),
    ]
    prelude: list[tuple[str, Place | None]] = [(line, None) for line in _PRELUDE]
    build = {
        "digest": digest_of(_text(prelude + content)),
        "version": package_version() if version is None else version,
        "contract": schema["contract"]["version"],
    }
    rows = [*prelude, (_BUILD + lua_value(build), None), *content]
    return Library(
        text=_text(rows),
        **build,
        functions=tuple(_server_name(module) for module in functions),
        places=tuple(place for _, place in rows),
    )


def digest_of(text: str) -> str:
    """Return the digest of a joined text, whoever made it: over all of it but the line that holds the digest."""
    kept = (line for line in text.splitlines(keepends=True) if not line.startswith(_BUILD))
    return hashlib.sha256("".join(kept).encode()).hexdigest()


def version_of(text: str) -> str:
    """Return the package version that a joined text names, "" if it names none."""
    found = _VERSION.search(text)
    return found["version"] if found else ""


def _text(rows: Sequence[tuple[str, Place | None]]) -> str:
    return "".join(f"{line}\n" for line, _ in rows)


def _server_name(module: _Module) -> str:
    return FUNCTION_PREFIX + module.name.partition(".")[2]


def _module_lines(module: _Module) -> Iterator[tuple[str, Place]]:
    """Yield a file wrapped into a function of its own; the wrapping counts to the file's first and last line."""
    source = module.source.removesuffix("\n").split("\n")
    yield f"modules[{lua_string(module.name)}] = (function()", Place(module.file, 1)
    for number, line in enumerate(source, start=1):
        yield line, Place(module.file, number)
    yield "end)()", Place(module.file, len(source))


def _registration(module: _Module, header: Header) -> str:
    return (
        f"server.register_function{{function_name={lua_string(_server_name(module))}, "
        f"callback=modules[{lua_string(module.name)}].run, "
        f"flags={lua_value(header.flags)}, description={lua_string(header.purpose)}}}"
    )


def _schema_lines(schema: dict[str, Any]) -> Iterator[str]:
    yield 'modules["schema"] = {'
    for section, members in schema.items():
        if section == "records":
            continue
        yield f"  {section} = {{"
        for name, value in members.items():
            yield f"    {lua_member(name, value)},"
        yield "  },"
    yield "}"


def _read_modules(folder: Path) -> Iterator[_Module]:
    for layer in _LAYERS:
        for path in sorted((folder / layer).glob("*.lua")):
            file = f"{layer}/{path.name}"
            source = path.read_text("utf-8")
            if _RETURNS.search(source) is None:
                raise ScriptFault(f"lua/{file}: a module ends with 'return <table>'; none is there")
            yield _Module(f"{layer}.{path.stem}", file, source, tuple(_requires(file, source)))


def _requires(file: str, source: str) -> Iterator[tuple[str, int]]:
    for token in _TOKEN.finditer(source):
        line = source.count("\n", 0, token.start()) + 1
        if token["dynamic"]:
            raise ScriptFault(f"{Place(file, line)}: require takes the module's name as a literal")
        if token["quote"]:
            yield token["name"], line


def _in_dependency_order(modules: dict[str, _Module]) -> list[_Module]:
    ordered: list[_Module] = []
    finished: set[str] = set()
    open_: list[str] = []

    def visit(module: _Module) -> None:
        open_.append(module.name)
        for name, line in module.requires:
            if name in _GENERATED:
                continue
            place = Place(module.file, line)
            if name in open_:
                circle = " > ".join([*open_[open_.index(name) :], name])
                raise ScriptFault(f"{place}: modules require each other in a circle: {circle}")
            if name not in modules:
                raise ScriptFault(f"{place}: there is no module {name!r}")
            if modules[name].layer not in _MAY_REQUIRE[module.layer]:
                allowed = ", ".join((*_MAY_REQUIRE[module.layer], *_GENERATED))
                raise ScriptFault(f"{place}: {module.name} may not require {name!r}; allowed: {allowed}")
            if name not in finished:
                visit(modules[name])
        open_.pop()
        finished.add(module.name)
        ordered.append(module)

    for module in modules.values():
        if module.name not in finished:
            visit(module)
    return ordered

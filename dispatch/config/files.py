"""Reading a YAML, TOML or JSON file into a mapping, with errors that name file, line and reason."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from dispatch.errors import ConfigurationError


def read_mapping(path: Path) -> dict[str, Any]:
    """Read `path`; its ending says the format (.yaml, .yml, .toml, .json).

    A key that stands twice in one mapping is refused: which of the two was meant cannot be known.

    Raises:
        ConfigurationError: unreadable, another format, a syntax error (with its line), or no mapping at the top.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise ConfigurationError(f"{path}: the file's ending {path.suffix!r} is none of {', '.join(_PARSERS)}")
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8 (byte {error.start})") from error
    document = parse(path, text)
    if not isinstance(document, dict):
        found = "nothing" if document is None else f"a {type(document).__name__}"
        raise ConfigurationError(f"{path}: line 1: a mapping of names to values is expected at the top, found {found}")
    return document


def _yaml(path: Path, text: str) -> Any:
    try:
        # _Loader is a SafeLoader: it makes plain values only, no Python objects.
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - see above
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigurationError(f"{path}: {line}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its text ends with "(at line 3, column 5)"
        raise ConfigurationError(f"{path}: {error}") from error


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except _DuplicateKey as error:
        raise ConfigurationError(f"{path}: {error}") from error


_PARSERS: dict[str, Callable[[Path, str], Any]] = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}


class _DuplicateKey(ValueError):
    """A JSON object names one key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateKey(f"the key {twice!r} stands twice in one object")
    return mapping


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (the stock one keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping of unique keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            name = getattr(key, "value", None)
            if isinstance(name, str) and key.tag != "tag:yaml.org,2002:merge":
                if name in seen:
                    raise yaml.MarkedYAMLError(None, None, f"the key {name!r} stands twice", key.start_mark)
                seen.add(name)
        return super().construct_mapping(node, deep=deep)

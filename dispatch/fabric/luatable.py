"""Writing plain values as Lua source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# fmt: off
_KEYWORDS = frozenset({
    "and", "break", "do", "else", "elseif", "end", "false", "for", "function", "if", "in", "local", "nil", "not", "or",
    "repeat", "return", "then", "true", "until", "while",
})
# fmt: on


def lua_value(value: Any) -> str:
    """Return `value` (scalar, list or mapping with string keys) as one line of Lua source, in its own order.

    Raises:
        TypeError: a value of another kind.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return lua_string(value)
    if isinstance(value, list | tuple):
        return "{ " + ", ".join(lua_value(item) for item in value) + " }" if value else "{}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(lua_member(name, item) for name, item in value.items()) + " }" if value else "{}"
    raise TypeError(f"{type(value).__name__} has no form in Lua source")


def lua_member(name: str, value: Any) -> str:
    """Return one member of a table constructor: `name = value`, or `["a-b"] = value` where the name needs it."""
    plain = _NAME.fullmatch(name) is not None and name not in _KEYWORDS
    return f"{name if plain else '[' + lua_string(name) + ']'} = {lua_value(value)}"


def lua_string(text: str) -> str:
    """Return `text` as a quoted Lua string on one line."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\{ord(found[0]):03d}", quoted) + '"'

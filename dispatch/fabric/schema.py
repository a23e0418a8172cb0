"""The schema both languages read (`lua/schema.toml`): keys, states, endings, answer words and limits."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from dispatch.contract.names import check_name
from dispatch.errors import ConfigurationError


@functools.cache
def lua_root() -> Path:
    """Return the folder of the Lua library: inside the installed package, or beside it in a checkout.

    Raises:
        ConfigurationError: neither is there (a broken installation).
    """
    package = Path(str(resources.files("dispatch")))
    for folder in (package / "_lua", package.parent / "lua"):
        if (folder / "schema.toml").is_file():
            return folder
    raise ConfigurationError(f"the Lua library is missing: neither {package / '_lua'} nor {package.parent / 'lua'}")


@functools.cache
def document() -> dict[str, Any]:
    """Return the schema as parsed from TOML."""
    return tomllib.loads((lua_root() / "schema.toml").read_text("utf-8"))


ENDINGS: tuple[str, ...] = tuple(document()["endings"])
LIMITS: dict[str, int] = document()["limits"]


def root(group: str) -> str:
    """Return KEYS[1] of every function: the group's root with its hash tag."""
    return "{" + group + "}"


def key(group: str, name: str, **parts: str) -> str:
    """Return the full key `name` of the schema for `group`, its `<parts>` filled in.

    Raises:
        KeyError: the schema has no such key, or a part is missing.
    """
    template: str = document()["keys"][name]["key"]
    for part, value in parts.items():
        template = template.replace(f"<{part}>", value)
    if "<" in template:
        raise KeyError(f"{name}: {template} still has a part to fill in")
    return f"{root(group)}:{template}"


def check_group(group: str) -> str:
    """Return `group` if it may be a fabric group's name.

    Raises:
        InvalidRequest: it may not.
    """
    return check_name("fabric group", group)

"""Changing single fields of a group's config document by paths that people write (`pools.interactive.quantum=6`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dispatch.errors import ConfigurationError

_ID_FIELDS = {"pools": "pool_id", "endpoints": "endpoint_id"}

_FILLED_IN = {"endpoint": "endpoint_url", "endpoint_url": "endpoint", "delivery": "max_attempts"}
"""Who sets the first no longer means what was filled in, or said earlier, for the second."""


def edited(document: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `document` after `assignments`, each `PATH=VALUE`, in order.

    Paths are `FIELD`, `pools.ID.FIELD` and `endpoints.ID.FIELD`; an ID that is not there yet is added, `pools.ID=null`
    removes one. Values are JSON scalars (6, true, null); what is no JSON is text. A new `default_endpoint` takes along
    the pools that stood on the old one. Whether the result is a config, `group_configure` judges.

    Raises:
        ConfigurationError: an assignment has another form; names it.
    """
    changed = copy.deepcopy(dict(document))
    pairs = [_pair(assignment) for assignment in assignments]
    given = {path for path, _ in pairs}
    for path, value in pairs:
        head, _, rest = path.partition(".")
        if head in _ID_FIELDS:
            _set_in_list(changed, path, value, given)
        elif rest:
            raise ConfigurationError(f"{path!r}: a path is FIELD, pools.ID.FIELD or endpoints.ID.FIELD")
        else:
            if head == "default_endpoint":
                _follow_default(changed)
            changed[head] = value
    return changed


def _pair(assignment: str) -> tuple[str, Any]:
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ConfigurationError(f"{assignment!r} is no PATH=VALUE, such as pools.interactive.quantum=6")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return path, text
    if isinstance(value, dict | list):
        raise ConfigurationError(f"{path!r}: one number, text, true, false or null is expected; a file can say more")
    return path, value


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def _set_in_list(document: dict[str, Any], path: str, value: Any, given: set[str]) -> None:
    head, _, rest = path.partition(".")
    id_field = _ID_FIELDS[head]
    items = document.setdefault(head, [])
    if value is None and any(item[id_field] == rest for item in items):
        document[head] = [item for item in items if item[id_field] != rest]
        return
    name, _, field = rest.rpartition(".")  # names may hold dots, fields do not
    if not name or not field:
        raise ConfigurationError(
            f"{path!r}: {head}.ID.FIELD=VALUE is expected, or {head}.ID=null to remove what is there"
        )
    item = next((item for item in items if item[id_field] == name), None)
    if item is None:
        item = {id_field: name}
        items.append(item)
    filled_in = _FILLED_IN.get(field)
    if filled_in is not None and f"{head}.{name}.{filled_in}" not in given:
        item.pop(filled_in, None)
    item[field] = value


def _follow_default(document: dict[str, Any]) -> None:
    old = document.get("default_endpoint")
    for pool in document.get("pools", []):
        if pool.get("endpoint") == old:
            pool.pop("endpoint", None)

"""What a page is told when something changes: only the changed fields of changed rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
Table = Mapping[str, Row]
Tables = Mapping[str, Table]
"""Rows by table and id."""


def patch_between(old: Tables, new: Tables) -> dict[str, Any]:
    """Return `{"set": {table: {id: fields}}, "del": {table: [ids]}}` that turns `old` into `new`; empty if equal.

    A field that a row no longer has is set to None, so that a page need not tell the two apart.
    """
    put: dict[str, dict[str, dict[str, Any]]] = {}
    gone: dict[str, list[str]] = {}
    for name, table in new.items():
        before = old.get(name, {})
        rows = {key: fields for key, row in table.items() if (fields := _changed(before.get(key), row))}
        if rows:
            put[name] = rows
        if missing := [key for key in before if key not in table]:
            gone[name] = missing
    patch: dict[str, Any] = {}
    if put:
        patch["set"] = put
    if gone:
        patch["del"] = gone
    return patch


def _changed(before: Row | None, row: Row) -> dict[str, Any]:
    if before is None:
        return dict(row)
    if before is row:
        return {}
    fields = {key: value for key, value in row.items() if key not in before or before[key] != value}
    fields.update((key, None) for key in before if key not in row and before[key] is not None)
    return fields

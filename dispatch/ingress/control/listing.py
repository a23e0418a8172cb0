"""The list of requests that run and wait, over all pools, as one list in parts.

First those that run, then those that wait for their next attempt, then those that wait for their turn, pool by pool in
the order of the config. The cursor says where to go on: `running:`, `delayed:` or `queued:<pool>:` and the cursor of
that section. Claims move requests while somebody pages, so one may be met twice or not at all.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field

from dispatch.errors import InvalidRequest, PoolUnknown
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import LIMITS
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import allowed_pools, allows_all_pools
from dispatch.ingress.control.group import Group
from dispatch.ingress.control.paging import NAME, Limited

_NAME_OR_NONE = NAME.replace("{1,128}", "{0,128}")
_CURSOR = re.compile(
    r"(?P<state>running|delayed):(?P<at>[0-9]{0,12})|queued:(?P<pool>[A-Za-z0-9._-]{1,128}):"
    r"(?P<waiting>[0-9]{1,12}|[0-9]{1,12}\.[0-3]\.[0-9]{1,12}|)"
)
_LOOKS_MAX = 10
"""Parts of sections read for one answer: filters may leave nothing of many of them."""

_SECTIONS = {"running": "leases", "delayed": "delayed"}
_NEXT = {"running": "delayed", "delayed": "queued"}

State = Literal["running", "delayed", "queued"]


class Filter(Limited):
    """Which requests are wanted."""

    state: State | None = Field(None, description="running, delayed (until the next attempt) or queued; none = all")
    pool: str = Field("", pattern=_NAME_OR_NONE)
    gateway_id: str = Field("", pattern=_NAME_OR_NONE)
    endpoint_id: str = Field("", pattern=_NAME_OR_NONE)
    producer_id: str = Field("", pattern=_NAME_OR_NONE)
    fairness_key: str = Field("", pattern=_NAME_OR_NONE)
    model: str = Field("", max_length=512)
    cursor: str = Field("", max_length=200, description='the cursor of the answer before; "" = from the start')


_EQUAL = ("gateway_id", "endpoint_id", "producer_id", "fairness_key", "model")


class Listing:
    """One answer in the making."""

    def __init__(self, group: Group, principal: Principal, wanted: Filter) -> None:
        self._group = group
        self._principal = principal
        self._wanted = wanted
        self._equal = {name: value for name in _EQUAL if (value := getattr(wanted, name))}
        self._looks = 0
        self._server_ms = 0
        self._rows: list[dict[str, Any]] = []

    async def page(self) -> dict[str, Any]:
        """Read until there are as many rows as wanted, all is read, or enough was looked at for one answer.

        Raises:
            InvalidRequest: the cursor is none.
            DispatchError: what the connection says.
        """
        cursor = await self._read()
        return {"server_ms": self._server_ms, "rows": self._rows, "cursor": cursor, "truncated": cursor != ""}

    async def _read(self) -> str:
        state, pool, cursor = self._start()
        for part, section in _SECTIONS.items():
            if state == part:
                after = await self._section(section, self._wanted.pool, cursor)
                if after is not None:
                    return f"{part}:{after}"
                if self._wanted.state == part:
                    return ""
                state, cursor = _NEXT[part], ""
        for name in await self._pools(pool):
            after = await self._section("waiting", name, cursor if name == pool else "")
            if after is not None:
                return f"queued:{name}:{after}"
        return ""

    def _start(self) -> tuple[str, str, str]:
        """Return the state to begin with, the pool ("" = the first) and where in it."""
        text, wanted = self._wanted.cursor, self._wanted.state
        if not text:
            return wanted or "running", "", ""
        found = _CURSOR.fullmatch(text)
        state = "queued" if found is None else found["state"] or "queued"
        if found is None or wanted not in {None, state}:
            message = f"cursor {text[:60]!r} is none of this list: take it from the answer before"
            raise InvalidRequest(message, param="cursor", code="invalid_value")
        return state, found["pool"] or "", found["at"] or found["waiting"] or ""

    async def _section(self, section: str, subject: str, cursor: str) -> str | None:
        """Read on in a section; returns where to go on with the next answer, None = it is read through."""
        while True:
            room = self._wanted.limit - len(self._rows)
            if room <= 0 or self._looks >= _LOOKS_MAX:
                return cursor
            page = await self._group.run(fabric_snapshot(section, cursor=cursor, limit=room, subject=subject))
            self._looks += 1
            self._server_ms = page["server_ms"]
            self._rows += [row for row in page["rows"] if self._fits(row)]
            cursor = page["cursor"]
            if not cursor:
                return None

    def _fits(self, row: dict[str, Any]) -> bool:
        pool = self._wanted.pool or row["pool_id"]
        if row["pool_id"] != pool or not self._principal.pool_allowed(pool):
            return False
        return all(row.get(name) == value for name, value in self._equal.items())

    async def _pools(self, first: str) -> list[str]:
        """Return the pools in which something waits, in order and from `first` on, as far as they are wanted."""
        rows = await self._pool_rows()
        names = [row["pool_id"] for row in rows]
        begin = names.index(first) if first in names else 0
        return [row["pool_id"] for row in rows[begin:] if row["pending"] > 0]

    async def _pool_rows(self) -> list[dict[str, Any]]:
        if self._wanted.pool:
            page = await self._group.run(fabric_snapshot("pools", subject=self._wanted.pool))
            if not page["rows"]:
                raise PoolUnknown(f"pool {self._wanted.pool!r} is not configured in group {self._group.name}")
            return self._note(page)
        if not allows_all_pools(self._principal):
            calls = [fabric_snapshot("pools", subject=pool) for pool in allowed_pools(self._principal)]
            return [row for page in await self._group.run_many(calls) for row in self._note(page)]
        rows: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = await self._group.run(fabric_snapshot("pools", cursor=cursor, limit=LIMITS["snapshot_page_max"]))
            rows += self._note(page)
            cursor = page["cursor"]
            if not cursor:
                return rows

    def _note(self, page: dict[str, Any]) -> list[dict[str, Any]]:
        self._server_ms = page["server_ms"]
        rows: list[dict[str, Any]] = page["rows"]
        return rows

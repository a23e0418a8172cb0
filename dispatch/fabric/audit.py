"""Auditing a fabric group: every counter held against what is there, and the repair of what differs.

The server compares what it can in one step (`fabric_audit`); what needs several pages (the entries of a pool, the
leases) is summed up here. Pages are not one instant, so under traffic an audit sees differences that are none:
`confirmed_differences` counts only what two audits in a row find with the same numbers. A group that is never still can
so hide a drift; audit it when it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dispatch.errors import PoolUnknown
from dispatch.fabric.functions import fabric_audit, fabric_repair
from dispatch.fabric.records import Repair
from dispatch.fabric.schema import LIMITS
from dispatch.fabric.sync import BlockingConnection

Value = int | str | bool

_PAGE = 100  # about 2 ms of the server's time each
_LEVELS = tuple(f"level_{level}" for level in range(LIMITS["priority_levels"]))
_OF_THE_PLACE = ("standing", "awake")
_JUDGED_ANEW = {
    ("pool", "standing"): "placement", ("pool", "awake"): "placement", ("endpoint", "holder"): "holder",
    ("endpoint", "probe"): "probe", ("endpoint", "look"): "look", ("endpoint", "asked"): "chores",
    ("endpoint", "sampled"): "chores", ("timer", "subject"): "timer", ("chore", "subject"): "chore",
    ("request", "timer"): "retry", ("dead", "request"): "dead", ("group", "next_timer"): "clock",
    ("group", "next_chore"): "clock",
}  # fmt: skip
"""Kind and field of differences that are no counters, and the kind of repair that puts them right."""
_LAST = (*_OF_THE_PLACE, "holder", "look", "next_timer", "next_chore")
"""Fields that are repaired after all others: they follow from what those say."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is stored otherwise than counted: its kind, its name and the field.

    Kinds and fields: `group`, `pool` and `endpoint` have counters. Besides, a group has `next_timer` and `next_chore`
    (when time has something to do); a pool `standing` and `awake` (where it stands, and that it does if anything waits
    in it) and `record` (lost); an endpoint `holder` (whose turn it is), `probe` (a request that is none), `look` (when
    it is looked at again), `asked` and `sampled` (chores it should have, or not). `lease` and `dead` have a `request`
    that is not there, `timer` and `chore` a `subject` that is not, `request` a `timer` that it lacks.
    """

    kind: str
    name: str
    field: str
    stored: Value
    counted: Value

    @property
    def repair(self) -> Repair | None:
        """What puts it right; None = no repair does: a lease goes when it ends, a lost pool comes with a config."""
        if self.kind == "lease" or self.field == "record":
            return None
        if kind := _JUDGED_ANEW.get((self.kind, self.field)):
            return Repair(kind, self.name)
        return Repair(self.kind, self.name, self.field, int(self.stored), int(self.counted))

    def __str__(self) -> str:
        where = self.kind if self.kind == "group" else f"{self.kind} {self.name}"
        return f"{where}: {self.field} is stored as {_word(self.stored)}, counted {_word(self.counted)}"


@dataclass(slots=True)
class _Waiting:
    """What waits for a time, summed over all pages. `delayed`: pool by request that waits for its next attempt."""

    delayed: dict[str, str] = field(default_factory=dict)
    untimed: list[str] = field(default_factory=list)
    stray: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Leases:
    """What the leases hold, summed over all pages."""

    pools: Counter[str] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def differences(connection: BlockingConnection, group: str) -> list[Difference]:
    """Audit `group` once. Under traffic some of what is found are moments between two pages.

    Raises:
        FabricError: the group cannot be read.
    """
    return list(_differences(connection, group))


def confirmed_differences(connection: BlockingConnection, group: str) -> list[Difference]:
    """Audit `group`, and once more if anything differs: what both found with the same numbers.

    Raises:
        FabricError: the group cannot be read.
    """
    first = differences(connection, group)
    if not first:
        return []
    again = set(differences(connection, group))
    return [difference for difference in first if difference in again]


def repair(connection: BlockingConnection, group: str, found: Iterable[Difference], *, actor: str) -> list[Difference]:
    """Repair differences, counters before places; returns those that were. Each is a compare-and-set of what was seen.

    A repaired counter may bring a pool to another place, and so uncover or settle other differences: audit again.

    Raises:
        FabricError: the group cannot be reached; what was repaired until then stays so.
    """
    done: list[Difference] = []
    for difference in sorted(found, key=lambda each: each.field in _LAST):
        wanted = difference.repair
        try:
            if wanted is not None and connection.run(group, fabric_repair(wanted, actor=actor)):
                done.append(difference)
        except PoolUnknown:  # it was removed meanwhile
            continue
    return done


def _differences(connection: BlockingConnection, group: str) -> Iterator[Difference]:
    leases = _leases(connection, group)
    timed = _timed(connection, group)
    delayed = Counter(timed.delayed.values())
    waiting = 0
    for row in _rows(connection, group, "pools"):
        counted = row["counted"] | _entries(connection, group, row["name"])
        counted |= {"in_flight": leases.pools[row["name"]], "delayed": delayed[row["name"]]}
        waiting += counted["depth"]
        yield from _compare("pool", row["name"], row["stored"], counted)
    for row in _rows(connection, group, "endpoints"):
        counted = row["counted"] | {"in_flight": leases.endpoints[row["name"]]}
        yield from _compare("endpoint", row["name"], row["stored"], counted)
    for row in _rows(connection, group, "group"):
        counted = row["counted"] | {"queued": waiting, "in_flight": leases.pools.total(), "delayed": delayed.total()}
        yield from _compare("group", "", row["stored"], counted)
    for request_id in leases.broken:
        yield Difference("lease", request_id, "request", "running", "not there")
    for kind, member in timed.stray:
        yield Difference(kind, member, "subject", "due", "not there")
    for request_id in timed.untimed:
        yield Difference("request", request_id, "timer", "set", "not there")
    for page in _pages(connection, group, "dead"):
        for request_id in page.get("broken") or []:
            yield Difference("dead", request_id, "request", "kept", "not there")


def _compare(kind: str, name: str, stored: dict[str, Value], counted: dict[str, Value]) -> Iterator[Difference]:
    for member, value in stored.items():
        if member in counted and counted[member] != value:
            yield Difference(kind, name, member, value, counted[member])


def _leases(connection: BlockingConnection, group: str) -> _Leases:
    found = _Leases()
    for page in _pages(connection, group, "leases"):
        found.pools.update(page.get("pools") or {})
        found.endpoints.update(page.get("endpoints") or {})
        found.broken += page.get("broken") or []
    return found


def _timed(connection: BlockingConnection, group: str) -> _Waiting:
    found = _Waiting()
    for page in _pages(connection, group, "requests"):
        found.delayed |= page.get("delayed") or {}
        found.untimed += page.get("untimed") or []
    for page in _pages(connection, group, "timers"):
        found.delayed |= page.get("delayed") or {}
        found.stray += [("timer", member) for member in page.get("stray") or []]
    for page in _pages(connection, group, "chores"):
        found.stray += [("chore", member) for member in page.get("stray") or []]
    return found


def _entries(connection: BlockingConnection, group: str, pool: str) -> dict[str, Value]:
    """Count a pool's entries: what its record should say."""
    total: Counter[str] = Counter()
    for page in _pages(connection, group, "entries", pool):
        total.update({name: page[name] for name in ("live", "bytes", "tombstones", *_LEVELS)})
    levels = {name: total[name] for name in _LEVELS}
    return {"depth": total["live"], "bytes": total["bytes"], "tombstones": total["tombstones"], **levels}


def _rows(connection: BlockingConnection, group: str, part: str) -> Iterator[dict[str, Any]]:
    for page in _pages(connection, group, part):
        # "entries" puts two counters beside two others: each of them is compared by itself.
        for row in page["rows"]:
            row["counted"].pop("entries", None)
            yield row


def _pages(connection: BlockingConnection, group: str, part: str, subject: str = "") -> Iterator[dict[str, Any]]:
    cursor = ""
    while True:
        page = connection.run(group, fabric_audit(part, cursor=cursor, limit=_PAGE, subject=subject))
        yield page
        cursor = page["cursor"]
        if not cursor:
            return


def _word(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)

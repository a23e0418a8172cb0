"""The attention strip: what the verdict finds, steady enough to be read.

A finding appears when it has been true for 5 s, and stays 10 s after it cleared, marked so: nothing blinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dispatch.fabric.view import FabricView
from dispatch.studio.board import Memory
from dispatch.studio.findings import ORDER, Finding, HistoryFacts, Situation
from dispatch.studio.verdict import findings, signals

APPEARS_MS = 5_000
STAYS_MS = 10_000


@dataclass(slots=True)
class _Seen:
    finding: Finding
    first_ms: int
    last_ms: int
    rank: int


class Strip:
    """Remembers findings of one group from view to view."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._last: tuple[Situation, list[Finding]] | None = None

    def rows(self, view: FabricView, memory: Memory, history: HistoryFacts | None = None) -> dict[str, dict[str, Any]]:
        """Return the rows of the strip as of this view, by id."""
        now = view.server_ms
        situation = Situation(view=view, trend=memory.short, history=history)
        found = [finding for finding in findings(situation) if finding.kind != "note"]
        self._last = (situation, found)
        for rank, finding in enumerate(found):
            key = f"{finding.rule}|{finding.subject}"
            seen = self._seen.get(key)
            first = now if seen is None else seen.first_ms
            self._seen[key] = _Seen(finding, first, now, rank)
        for key in [key for key, seen in self._seen.items() if now - seen.last_ms > STAYS_MS]:
            del self._seen[key]
        return {key: _row(seen, now) for key, seen in self._seen.items() if _is_steady(seen)}

    def signals(self) -> list[dict[str, Any]]:
        """Return the table of symptoms with what may cause each now; empty before the first view."""
        if self._last is None:
            return []
        return [
            {
                "slug": state.signal.slug,
                "symptom": state.signal.symptom,
                "look_first": state.look_first,
                "hint": state.signal.hint,
                "seen": state.seen,
                "causes": [cause.sentence for cause in state.causes],
            }
            for state in signals(*self._last)
        ]


def _since(seen: _Seen) -> int:
    """Return since when it is so: what holds a pool may let go for a moment and hold it again."""
    return seen.first_ms if seen.finding.since_ms is None else min(seen.first_ms, seen.finding.since_ms)


def _is_steady(seen: _Seen) -> bool:
    return seen.last_ms - _since(seen) >= APPEARS_MS


def _row(seen: _Seen, now: int) -> dict[str, Any]:
    finding = seen.finding
    cleared = seen.last_ms < now
    return {
        "rule": finding.rule,
        "kind": finding.kind,
        "subject": finding.subject,
        "sentence": finding.sentence,
        "since_ms": _since(seen),
        "act": None
        if finding.act is None
        else {"label": finding.act.label, "target": finding.act.target, "name": finding.act.name},
        "cleared": cleared,
        "rank": ORDER.index(finding.kind) * 1_000 + seen.rank,
    }

"""Verdicts: from a moment of a group to what wants attention, each with its cause in one sentence. Pure.

The rules are those of the operator page's attention strip. They are asked in order, and of those about one pool or one
endpoint only the first that fits speaks. Used by the page, `dispatch top` and `dispatch doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from dispatch.studio import rules_of_flow, rules_of_group, rules_of_requests
from dispatch.studio.findings import ORDER, SIGNALS, Finding, Signal, Situation

Rule = Callable[[Situation], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    rules_of_flow.breaker_open,
    rules_of_group.no_gateway,
    rules_of_group.gateway_silent,
    rules_of_flow.endpoint_fails,
    rules_of_flow.endpoint_held,
    rules_of_flow.gate_stale,
    rules_of_flow.pool_capped,
    rules_of_group.group_capped,
    rules_of_group.gateways_full,
    rules_of_flow.queue_filling,
    rules_of_requests.running_long,
    rules_of_requests.ended_badly,
    rules_of_requests.refused_by_endpoint,
    rules_of_flow.stopped_by_person,
    rules_of_flow.pool_grows,
    rules_of_group.sharing_off,
    rules_of_requests.history_behind,
    rules_of_group.versions_differ,
    rules_of_group.clock_off,
    rules_of_group.counters_differ,
    rules_of_group.not_read,
)
"""In the order in which they are asked."""

ONE_EACH: frozenset[Rule] = frozenset(
    {
        rules_of_flow.breaker_open,
        rules_of_flow.endpoint_fails,
        rules_of_flow.endpoint_held,
        rules_of_flow.gate_stale,
        rules_of_flow.pool_capped,
        rules_of_flow.queue_filling,
        rules_of_flow.stopped_by_person,
        rules_of_flow.pool_grows,
        rules_of_group.sharing_off,
    }
)
"""Of these, only the first that fits a pool or an endpoint speaks of it."""


def findings(situation: Situation) -> list[Finding]:
    """Return what wants attention: broken, held, capped, by a person, unknown; within each what lasts longest first."""
    found: list[Finding] = []
    spoken: set[str] = set()
    for rule in RULES:
        for finding in rule(situation):
            if rule in ONE_EACH:
                if finding.subject in spoken:
                    continue
                spoken.update((finding.subject, *finding.covers))
            found.append(finding)
    return sorted(found, key=_rank)


class SignalState(msgspec.Struct, frozen=True, kw_only=True):
    """A symptom of the table and what may cause it now; `seen` None = what would show it could not be read."""

    signal: Signal
    seen: bool | None
    causes: tuple[Finding, ...] = ()

    @property
    def look_first(self) -> str:
        """The first place to look."""
        return next((each.look_first for each in self.causes if each.look_first), self.signal.look_first)


_SHOWN_BY = {
    "pending-grows": ("pools", "endpoints", "gateways", "group"),
    "in-flight-sticks": ("running", "gateways"),
    "requests-vanish": ("endings",),
    "backend-errors": ("endpoints",),
    "fallback-missing": ("endings",),
    "history-missing": ("readers",),
}
"""By symptom: the sections of a view without which nothing can be said."""


def signals(situation: Situation, found: Sequence[Finding]) -> list[SignalState]:
    """Return the seed's table with what `found` says about each symptom."""
    states = []
    for signal in SIGNALS:
        causes = tuple(
            sorted((each for each in found if signal.slug in each.signals), key=lambda each: _fit(each, signal))
        )
        known = all(_is_known(situation, section) for section in _SHOWN_BY[signal.slug])
        states.append(SignalState(signal=signal, seen=True if causes else (False if known else None), causes=causes))
    return states


def _is_known(situation: Situation, section: str) -> bool:
    if section == "readers":
        return situation.view.group is not None and situation.view.group.readers is not None
    return getattr(situation.view, section) is not None


def _fit(finding: Finding, signal: Signal) -> tuple[int, int]:
    return finding.signals.index(signal.slug), ORDER.index(finding.kind)


def _rank(finding: Finding) -> tuple[int, float, str]:
    since = float("inf") if finding.since_ms is None else finding.since_ms
    return ORDER.index(finding.kind), since, finding.subject


def attention(found: Sequence[Finding], most: int = 5) -> tuple[list[Finding], int]:
    """Return the first `most` findings that are more than notes, and how many more there are."""
    rows = [each for each in found if each.kind != "note"]
    return rows[:most], max(0, len(rows) - most)


def pool_names(found: Iterable[Finding]) -> Iterator[str]:
    """Names of the pools that findings speak of."""
    for each in found:
        for subject in (each.subject, *each.covers):
            kind, _, name = subject.partition(":")
            if kind == "pool":
                yield name

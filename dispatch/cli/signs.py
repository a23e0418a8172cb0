"""Looking at a group for symptoms, as `dispatch doctor` does: two looks, and what they say of the seed's table."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import typer

from dispatch.cli.operating import one_line
from dispatch.cli.past import Past
from dispatch.cli.remote import RemoteConnection
from dispatch.fabric.sync import BlockingConnection
from dispatch.fabric.view import read_view_blocking
from dispatch.studio.findings import Finding, Situation
from dispatch.studio.trend import trend_of
from dispatch.studio.verdict import SignalState, findings, signals
from dispatch.studio.words import duration

_COVERED_MAX = 20
_AUDITED = "counters_differ"  # the audit has said each of them


@dataclass(frozen=True, slots=True)
class Signs:
    """What was found. Empty when nothing was looked at."""

    server_ms: int = 0
    found: list[Finding] = field(default_factory=list)
    states: list[SignalState] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        """Whether something does not work."""
        return any(each.kind == "broken" for each in self.found)

    def document(self) -> dict[str, Any]:
        """Return what was found, for programs."""
        return {
            "signals": [
                {
                    "signal": state.signal.slug,
                    "symptom": state.signal.symptom,
                    "seen": state.seen,
                    "look_first": state.look_first,
                    "hint": state.signal.hint,
                    "causes": [row(each) for each in state.causes],
                }
                for state in self.states
            ],
            "findings": [row(each) for each in self.found],
        }

    def say(self) -> None:
        """Print each symptom that is seen, with its causes, and in one line each what is not."""
        for state in self.states:
            if not state.seen:
                continue
            typer.echo(f"{state.signal.symptom}:")
            for cause in state.causes:
                lasts = "" if cause.since_ms is None else f" (for {duration(max(1, self.server_ms - cause.since_ms))})"
                typer.echo(f"  {one_line(cause.sentence)}{lasts}")
                typer.echo(f"    look first: {one_line(cause.look_first)}")
        rest = [each for each in self.found if not each.signals and each.kind != "note" and each.rule != _AUDITED]
        for each in rest:
            typer.echo(f"{one_line(each.sentence)}\n    look first: {one_line(each.look_first)}")
        unknown = [state.signal.symptom.lower() for state in self.states if state.seen is None]
        if unknown:
            typer.echo(f"not known, since it could not be read: {', '.join(unknown)}")
        if self.states and not rest and not any(state.seen for state in self.states):
            typer.echo("no symptom is seen" if not unknown else "no other symptom is seen")


def look_twice(
    connection: BlockingConnection | RemoteConnection,
    group: str,
    past: Past,
    *,
    window_s: float,
    differences: int | None = None,
) -> Signs:
    """Look at the group, and again after `window_s`: what grows is seen in the difference.

    Raises:
        FabricError: the group cannot be read.
    """
    first = read_view_blocking(connection.run_many, group)
    time.sleep(window_s)
    view = read_view_blocking(connection.run_many, group)
    situation = Situation(
        view=view,
        trend=trend_of((first, view)),
        history=past.facts(view.server_ms),
        differences=differences,
        compare_clocks=isinstance(connection, BlockingConnection),
    )
    found = findings(situation)
    return Signs(view.server_ms, found, signals(situation, found))


def row(finding: Finding) -> dict[str, Any]:
    """Return a finding for programs, with as many of the subjects it covers as fit a screen."""
    found: dict[str, Any] = msgspec.to_builtins(finding)
    return found | {"covers": list(finding.covers[:_COVERED_MAX]), "covers_count": len(finding.covers)}

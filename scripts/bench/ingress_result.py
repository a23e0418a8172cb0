"""What the rounds of the ingress benchmark come to: figures with their spread, ratios, and a table for people.

A figure is the median of its rounds, with the least and the greatest. A ratio is taken within each round, of runs that
stood next to each other, and then the median; so the machine's drift does not get in.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scripts.bench.ingress_run import Outcome, cpu_us, per_second

Round = dict[str, Outcome]
"""The runs of one round of a cell, by target."""

GOALS = {
    "rps_per_core_over_litellm": (">=", 3.0),
    "added_p50_over_litellm": ("<=", 0.5),
    "rate_over_bare_client": (">=", 0.6),
}

SERVERS = {"gateway": ("gateway", "valkey"), "litellm": ("litellm",), "bare_client": ("load",)}
"""The processes whose CPU time a request through this target costs, beside the backend's."""


@dataclass(frozen=True)
class Cell:
    """A number of connections in one mode, and its rounds; not every target need have run in each."""

    connections: int
    stream: bool
    rounds: list[Round]

    @property
    def name(self) -> str:
        """How it is named in the result."""
        return f"{'stream' if self.stream else 'whole'}_{self.connections}"

    def targets(self) -> list[str]:
        """Return the targets that were measured."""
        return list(self.rounds[0])

    def each(self, target: str, measure: Callable[[Round], float]) -> list[float]:
        """Return a measure of each round that has `target`."""
        return [measure(one) for one in self.rounds if target in one]


def rps_per_core(one: Round, target: str, names: tuple[str, ...] = ()) -> float:
    """Return how many requests a second one core of CPU time serves."""
    cost = cpu_us(one[target], names or SERVERS[target])
    return 1e6 / cost if cost else 0.0


def added_ms(one: Round, target: str, percentile: str = "p50_ms") -> float:
    """Return by how much a request takes longer through `target` than straight to the backend."""
    return float(getattr(one[target], percentile) - getattr(one["direct"], percentile))


def ratios_of(cell: Cell) -> dict[str, list[float]]:
    """Return the ratios of each round; those with LiteLLM only of rounds with it."""
    bare = cell.each("bare_client", lambda r: per_second(r["gateway"]) / per_second(r["bare_client"]))
    cores = cell.each("litellm", lambda r: rps_per_core(r, "gateway") / (rps_per_core(r, "litellm") or 1.0))
    added = cell.each("litellm", lambda r: added_ms(r, "gateway") / added_ms(r, "litellm"))
    return {name: values for name, values in zip(GOALS, (cores, added, bare), strict=True) if values}


def figures_of(cell: Cell) -> dict[str, dict[str, Any]]:
    """Return the figures of each target."""
    return {target: _figures(cell, target) for target in cell.targets()}


def _figures(cell: Cell, target: str) -> dict[str, Any]:
    def told(measure: Callable[[Round], float]) -> dict[str, Any]:
        return figure(cell.each(target, measure))

    figures = {
        "rate": told(lambda r: per_second(r[target])),
        "p50_ms": told(lambda r: r[target].p50_ms),
        "p99_ms": told(lambda r: r[target].p99_ms),
    }
    if cell.stream:
        figures["first_chunk_p50_ms"] = told(lambda r: r[target].first_p50_ms)
    if target in ("gateway", "litellm"):
        figures["added_p50_ms"] = told(lambda r: added_ms(r, target))
        figures["added_p99_ms"] = told(lambda r: added_ms(r, target, "p99_ms"))
        if cell.stream:
            figures["added_first_chunk_p50_ms"] = told(lambda r: added_ms(r, target, "first_p50_ms"))
    if target in SERVERS:
        figures["rps_per_core"] = told(lambda r: rps_per_core(r, target))
    if target == "gateway":
        figures["rps_per_core_without_valkey"] = told(lambda r: rps_per_core(r, target, ("gateway",)))
    names = cell.rounds[0][target].cpu_s
    figures["cpu_us_per_request"] = {name: told(lambda r, name=name: cpu_us(r[target], (name,))) for name in names}
    figures["requests"] = sum(one[target].count for one in cell.rounds if target in one)
    return figures


def figure(values: list[float]) -> dict[str, Any]:
    """Return the median, the least and the greatest."""
    return {"median": _short(statistics.median(values)), "spread": [_short(min(values)), _short(max(values))]}


def result_of(cells: Iterable[Cell]) -> dict[str, Any]:
    """Return the result's document, without what was run and how."""
    cells = list(cells)
    ratios: dict[str, dict[str, float]] = {name: {} for name in GOALS}
    spread: dict[str, dict[str, list[float]]] = {name: {} for name in GOALS}
    for cell in cells:
        for name, values in ratios_of(cell).items():
            told = figure(values)
            ratios[name][cell.name], spread[name][cell.name] = told["median"], told["spread"]
    return {
        "ratios": {name: values for name, values in ratios.items() if values},
        "spread": {name: values for name, values in spread.items() if values},
        "goals": {name: f"{sign} {value:g}" for name, (sign, value) in GOALS.items()},
        "missed": missed(ratios),
        "cells": {cell.name: figures_of(cell) for cell in cells},
    }


def missed(ratios: dict[str, dict[str, float]]) -> list[str]:
    """Return the ratios that miss their goal."""
    return [
        f"{name}.{cell}"
        for name, values in ratios.items()
        for cell, value in values.items()
        if not (value >= GOALS[name][1] if GOALS[name][0] == ">=" else value <= GOALS[name][1])
    ]


def report(result: dict[str, Any]) -> str:
    """Return the result for a person."""
    named = " ".join(f"{name:>8}" for name in ("req/s", "p50 ms", "p99 ms", "+p50", "+p99"))
    lines = [f"{'':25} {named} {'req/s/core':>11}  CPU us each"]
    for cell, targets in result["cells"].items():
        for target, told in targets.items():
            shown = [_median(told, name) for name in ("rate", "p50_ms", "p99_ms", "added_p50_ms", "added_p99_ms")]
            spent = ", ".join(f"{name} {cost['median']:.0f}" for name, cost in told["cpu_us_per_request"].items())
            columns = " ".join(f"{text:>8}" for text in shown)
            lines.append(f"{cell:12} {target:12} {columns} {_median(told, 'rps_per_core'):>11}  {spent}")
    lines.append("")
    for name, values in result["ratios"].items():
        for cell, value in values.items():
            low, high = result["spread"][name][cell]
            lines.append(f"{name:28} {cell:12} {value:8.2f}  ({low:g} to {high:g})   goal {result['goals'][name]}")
    return "\n".join([*lines, *(f"note: {note}" for note in result.get("notes", []))])


def _median(told: dict[str, Any], name: str) -> str:
    value = told.get(name)
    return "" if value is None else f"{value['median']:.4g}"


def _short(value: float) -> float:
    return round(value, 3 if abs(value) < 100 else 1)

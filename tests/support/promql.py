"""As much of PromQL as our own rules use, over made-up samples: enough to see when a rule fires.

A range is two moments, `before` and `now`; `increase` is their difference, `rate` the same by its seconds. Not here:
staleness, extrapolation, `for`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import promql_parser

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@dataclass
class Samples:
    """What a server has scraped: values by name and labels, now and before."""

    now: dict[tuple[str, Labels], float] = field(default_factory=dict)
    before: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def put(self, name: str, value: float, before: float = 0.0, **labels: str) -> Samples:
        """Add a sample; `before` is what it was a range ago."""
        key = (name, frozenset(labels.items()))
        self.now[key], self.before[key] = value, before
        return self


def nodes(expression: Any) -> Iterator[Any]:
    """Walk through an expression."""
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        child = getattr(expression, name, None)
        if child is not None and type(child).__module__ == type(expression).__module__:
            yield from nodes(child)
    for child in getattr(expression, "args", None) or ():
        yield from nodes(child)


def selectors(text: str) -> list[Any]:
    """Return the vector selectors of an expression.

    Raises:
        ValueError: it is no PromQL.
    """
    return [node for node in nodes(promql_parser.parse(text)) if isinstance(node, promql_parser.VectorSelector)]


def evaluate(text: str, samples: Samples) -> Vector:
    """Return what an expression comes to."""
    found = _value(promql_parser.parse(text), samples)
    assert isinstance(found, dict), "a rule is about series"
    return found


def _value(node: Any, samples: Samples) -> Vector | float:
    match type(node).__name__:
        case "NumberLiteral":
            return float(node.val)
        case "ParenExpr":
            return _value(node.expr, samples)
        case "VectorSelector":
            return _select(node, samples.now)
        case "AggregateExpr":
            return _aggregate(node, _vector(node.expr, samples))
        case "BinaryExpr":
            return _binary(node, samples)
        case "Call":
            return _call(node, samples)
    raise NotImplementedError(type(node).__name__)


def _vector(node: Any, samples: Samples) -> Vector:
    found = _value(node, samples)
    assert isinstance(found, dict)
    return found


def _select(node: Any, values: dict[tuple[str, Labels], float]) -> Vector:
    return {
        labels: value for (name, labels), value in values.items() if name == node.name and _fits(node, dict(labels))
    }


def _fits(node: Any, labels: dict[str, str]) -> bool:
    for one in node.matchers.matchers:
        kind, has = str(one.op).rpartition(".")[2], labels.get(one.name, "")
        equal = re.fullmatch(one.value, has) is not None if kind in ("Re", "NotRe") else has == one.value
        if equal is kind.startswith("Not"):
            return False
    return True


def _call(node: Any, samples: Samples) -> Vector:
    name = node.func.name
    if name in ("increase", "rate"):
        [matrix] = node.args
        now, before = (_select(matrix.vector_selector, one) for one in (samples.now, samples.before))
        by = matrix.range.total_seconds() if name == "rate" else 1.0
        return {labels: (value - before[labels]) / by for labels, value in now.items()}
    if name == "absent":
        return {} if _vector(node.args[0], samples) else {frozenset(): 1.0}
    assert name == "histogram_quantile", name
    return _quantile(float(node.args[0].val), _vector(node.args[1], samples))


def _quantile(share: float, buckets: Vector) -> Vector:
    """Return the upper bound of the bucket in which the quantile lies."""
    found: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        found.setdefault(frozenset(one for one in labels if one[0] != "le"), []).append((bound, value))
    result = {}
    for labels, rows in found.items():
        rows.sort()
        result[labels] = next(
            (bound for bound, value in rows if rows[-1][1] and value >= share * rows[-1][1]), math.nan
        )
    return result


def _aggregate(node: Any, vector: Vector) -> Vector:
    names, without = set(node.modifier.labels), "without" in str(node.modifier.type).lower()
    groups: dict[Labels, list[float]] = {}
    for labels, value in vector.items():
        groups.setdefault(frozenset(one for one in labels if (one[0] in names) is not without), []).append(value)
    how = {"sum": sum, "max": max, "min": min, "count": len}[str(node.op)]
    return {labels: float(how(values)) for labels, values in groups.items()}


def _binary(node: Any, samples: Samples) -> Vector:
    operator, left, right = str(node.op), _vector(node.lhs, samples), _value(node.rhs, samples)
    if isinstance(right, float):
        if operator in _COMPARE:
            return {labels: value for labels, value in left.items() if _COMPARE[operator](value, right)}
        raise NotImplementedError(operator)
    if operator == "or":
        return right | left
    both = left.keys() & right.keys()
    if operator == "and":
        return {labels: left[labels] for labels in both}
    if operator == "/":
        return {labels: left[labels] / right[labels] if right[labels] else math.nan for labels in both}
    return {labels: left[labels] for labels in both if _COMPARE[operator](left[labels], right[labels])}

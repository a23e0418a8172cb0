"""Scripted behaviour of single calls: what a call asks for itself, and rules set from outside for the calls to come."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from dispatch.contract import Operation

Place = Literal["start", "head", "body"]
"""Where in the answer something happens: before it, after its head, in the middle of its body or stream."""


class Behaviour(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body member `simulate` of a call, and the behaviour of a rule.

    Shape: `id` is counted in the statistics; `ttft_ms`, `token_ms` and `output_tokens` replace what would be drawn;
    `echo` makes the text the SHA-256 of the request's body, or the prompt's JSON.

    Faults: `delay_ms` waits before anything else, outside of any slot. `status` answers with an OpenAI error (with
    `retry_after` alone: 429). `garbage` answers 200 with something that is no JSON; in a stream a line of it stands in
    the middle. `error_in_200` answers 200 with an error in it; in a stream in the middle. `content_type` labels the
    answer with it. `hang` sends nothing more from there on. `cut` ends the connection there, with RST if `reset`.
    """

    id: str = ""
    ttft_ms: float | None = None
    token_ms: float | None = None
    output_tokens: int | None = None
    echo: Literal["", "sha256", "prompt"] = ""
    delay_ms: float = 0
    status: int | None = None
    retry_after: str | None = None
    garbage: Literal["html", "json", "text", "bytes", "empty"] | None = None
    error_in_200: bool = False
    content_type: str | None = None
    hang: Place | None = None
    cut: Place | None = None
    reset: bool = False

    @property
    def error_status(self) -> int | None:
        """The status of an error answer, None when there is to be none."""
        return 429 if self.status is None and self.retry_after is not None else self.status

    @property
    def has_fault(self) -> bool:
        """Whether anything of it is a fault."""
        return any(getattr(self, name) != getattr(PLAIN, name) for name in _FAULTS)

    @property
    def takes_time(self) -> bool:
        """Whether it asks for times of its own."""
        return bool(self.ttft_ms or self.token_ms)

    def with_shape_of(self, other: Behaviour) -> Behaviour:
        """Return these faults with `other`'s shape where it says something."""
        said = {name: getattr(other, name) for name in _SHAPE if getattr(other, name) != getattr(PLAIN, name)}
        return msgspec.structs.replace(self, **said)


PLAIN = Behaviour()
_SHAPE = ("id", "ttft_ms", "token_ms", "output_tokens", "echo")
_FAULTS = tuple(name for name in Behaviour.__struct_fields__ if name not in _SHAPE)


class Rule(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Behaviour of calls to come: of `operation` and `model` if given, the next `count`, each with `probability`."""

    simulate: Behaviour
    count: int | None = None
    probability: float = 1.0
    operation: Operation | None = None
    model: str | None = None


class Rules:
    """The rules in force, in the order they were set; the first that fits a call decides."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chance = Random(seed)  # noqa: S311 - repeatable on purpose
        self.active: list[Rule] = []

    def add(self, rule: Rule) -> None:
        """Put a rule in force."""
        self.active.append(rule)

    def clear(self) -> None:
        """Drop all rules; what chance decides begins anew."""
        self.active.clear()
        self._chance = Random(self._seed)  # noqa: S311 - repeatable on purpose

    def behaviour_of(self, operation: Operation, model: str, own: Behaviour) -> Behaviour:
        """Return how a call behaves: by its own faults, else by the first rule that fits, else plainly."""
        if not self.active or own.has_fault:
            return own
        for rule in self.active:
            if rule.operation not in {None, operation} or rule.model not in {None, model}:
                continue
            if rule.probability < 1 and self._chance.random() >= rule.probability:
                continue
            if rule.count is not None:
                rule.count -= 1
                if rule.count <= 0:
                    self.active.remove(rule)
            return rule.simulate.with_shape_of(own)
        return own

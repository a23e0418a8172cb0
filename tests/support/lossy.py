"""A connection that loses answers: the server has done the call, or has not, and the caller cannot know."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dispatch.errors import FabricUnavailable
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.connection import Connection


class LossyConnection:
    """Passes everything on to `inner`, but loses a `part` of what `loses` names: half before, half after it was done.

    Nothing is lost until `on` is set.
    """

    def __init__(self, inner: Connection, *, loses: frozenset[str], seed: int, part: float = 0.3) -> None:
        self._inner = inner
        self._loses = loses
        self._part = part
        self._chance = random.Random(seed)
        self.on = False
        self.lost: Counter[str] = Counter()

    async def run(self, group: str, call: FunctionCall[Any]) -> Any:
        dice = self._chance.random()
        if self.on and call.function in self._loses and dice < self._part:
            self.lost[call.function] += 1
            if dice < self._part / 2:
                await self._inner.run(group, call)
            raise FabricUnavailable("the answer was lost")
        return await self._inner.run(group, call)

    async def run_many(self, group: str, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        """Lose the answer of the whole batch, if any of its calls may be lost."""
        dice = self._chance.random()
        if self.on and dice < self._part and (lost := self._loses.intersection(call.function for call in calls)):
            self.lost.update(lost)
            if dice < self._part / 2:
                await self._inner.run_many(group, calls)
            raise FabricUnavailable("the answer was lost")
        return list(await self._inner.run_many(group, calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

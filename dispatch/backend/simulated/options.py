"""How a simulated engine behaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Self

from dispatch.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Spread:
    """A lognormal distribution by its median; `sigma` 0 = always the median. Durations of engines look like that."""

    median: float
    sigma: float = 0.0

    def draw(self, chance: Random) -> float:
        """Return one value."""
        if self.sigma == 0 or self.median == 0:
            return self.median
        return chance.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorOptions:
    """A batching engine: `slots` sequences run at once, `queue_limit` more wait (0 = any number), the rest is refused.

    Times are ms: `ttft_ms` to the first token, `token_ms` for each further one. With more sequences in the batch each
    is slower: a token takes `slowdown` times longer for each other one that runs. `output_tokens` is how much a reply
    wants to say. `seed` makes equal requests get equal text and times, in whatever order they come. `api_key` is asked
    for when set. `strict_models`: only `models` are served, else any name is.

    Raises:
        ConfigurationError: a value is out of its range; names it.
    """

    models: tuple[str, ...] = ("simulated",)
    strict_models: bool = False
    slots: int = 8
    queue_limit: int = 1_000
    ttft_ms: Spread = Spread(150, 0.3)
    token_ms: Spread = Spread(15, 0.2)
    output_tokens: Spread = Spread(64, 0.5)
    slowdown: float = 0.02
    seed: int = 0
    api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.models or not all(self.models):
            raise ConfigurationError("models: at least one name is needed")
        if self.slots < 1:
            raise ConfigurationError(f"slots is {self.slots}, at least 1 is needed")
        if self.queue_limit < 0 or self.slowdown < 0:
            raise ConfigurationError("queue_limit and slowdown must not be negative")
        for name in ("ttft_ms", "token_ms", "output_tokens"):
            spread = getattr(self, name)
            if spread.median < 0 or spread.sigma < 0:
                raise ConfigurationError(f"{name}: median and sigma must not be negative")

    @classmethod
    def fast(cls, *, slots: int = 1_000, output_tokens: int = 8) -> Self:
        """Return an engine that takes no time and always says the same number of tokens: for tests and benchmarks."""
        return cls(
            slots=slots,
            queue_limit=0,
            ttft_ms=Spread(0),
            token_ms=Spread(0),
            output_tokens=Spread(output_tokens),
            slowdown=0,
        )

    @property
    def instant(self) -> bool:
        """Whether a call takes no time at all."""
        return self.ttft_ms.median == 0 and self.token_ms.median == 0

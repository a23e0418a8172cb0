"""The simulated engine: slots, queue, times, and the numbers that say what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
import msgspec

from dispatch.backend.simulated.calls import CallRefused, SimulatedCall
from dispatch.backend.simulated.options import SimulatorOptions
from dispatch.contract import Operation

IDS_MAX = 200_000
"""Request ids that are counted one by one; further new ones are not."""

_CONTEXT_TOKENS = 8_192
_NO_CHANCE = Random(0)  # noqa: S311 - nothing is drawn from it


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one call will take: seconds to the first token, for each further one in an empty batch, and its length."""

    first_s: float
    token_s: float
    tokens: int


class Stats(msgspec.Struct, kw_only=True):
    """What happened since the start or the last reset. `calls` counts what came in, whatever its end.

    `output_tokens` counts tokens of streams as they go out, of whole answers when they are finished.
    """

    calls: int = 0
    finished: int = 0
    refused: int = 0
    faults: int = 0
    disconnects: int = 0
    running_max: int = 0
    waiting_max: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    by_operation: Counter[str] = msgspec.field(default_factory=Counter)
    requests: Counter[str] = msgspec.field(default_factory=Counter)

    def note_call(self, call: SimulatedCall) -> None:
        """Count a call that came in."""
        self.calls += 1
        self.by_operation[call.operation.value] += 1
        if call.request_id and (call.request_id in self.requests or len(self.requests) < IDS_MAX):
            self.requests[call.request_id] += 1

    def note_finished(self, call: SimulatedCall, output_tokens: int) -> None:
        """Count a call that got its whole answer, with the tokens that are not counted yet."""
        self.finished += 1
        self.prompt_tokens += call.prompt_tokens
        self.output_tokens += output_tokens


class Engine:
    """Runs at most `slots` sequences at once, the others wait in order of arrival."""

    def __init__(self, options: SimulatorOptions) -> None:
        self._options = options
        self._slots = anyio.Semaphore(options.slots, fast_acquire=True)
        # Making a generator costs more than a whole call of an engine that takes no time.
        self._draws = any(spread.sigma > 0 for spread in (options.ttft_ms, options.token_ms, options.output_tokens))
        self._held_tokens = 0
        self.running = 0
        self.stats = Stats()

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return self._slots.statistics().tasks_waiting

    @property
    def cache_usage(self) -> float:
        """Share of the token cache in use, 0 to 1, as if each slot had room for one context."""
        return min(1.0, self._held_tokens / (self._options.slots * _CONTEXT_TOKENS))

    def reset_stats(self) -> None:
        """Begin counting anew; what runs and waits goes on."""
        self.stats = Stats(running_max=self.running, waiting_max=self.waiting)

    def plan(self, call: SimulatedCall) -> Plan:
        """Draw what a call will take; the same for the same body and seed."""
        options, behaviour = self._options, call.behaviour
        chance = Random(f"{options.seed}:{call.seed}") if self._draws else _NO_CHANCE  # noqa: S311 - repeatable on purpose
        first, token = options.ttft_ms.draw(chance), options.token_ms.draw(chance)
        tokens = max(1, round(options.output_tokens.draw(chance)))
        if call.operation is Operation.EMBEDDINGS:
            token = 0
        return Plan(
            first_s=(first if behaviour.ttft_ms is None else behaviour.ttft_ms) / 1000,
            token_s=(token if behaviour.token_ms is None else behaviour.token_ms) / 1000,
            tokens=tokens if behaviour.output_tokens is None else behaviour.output_tokens,
        )

    @asynccontextmanager
    async def slot(self, call: SimulatedCall) -> AsyncIterator[None]:
        """Hold a slot; waits for one in order. Cancelled while waiting or running, it is free at once.

        Raises:
            CallRefused: 503, the queue is full.
        """
        limit = self._options.queue_limit
        if limit and self.running >= self._options.slots and self.waiting >= limit:
            raise CallRefused(503, f"the queue is full: {limit} requests wait", code="queue_full")
        self.stats.waiting_max = max(self.stats.waiting_max, self.waiting + (self.running >= self._options.slots))
        async with self._slots:
            self.running += 1
            self._held_tokens += call.prompt_tokens
            self.stats.running_max = max(self.stats.running_max, self.running)
            try:
                yield
            finally:
                self.running -= 1
                self._held_tokens -= call.prompt_tokens

    def token_s(self, plan: Plan) -> float:
        """Return what one token takes now, with what else runs in the batch."""
        return plan.token_s * (1 + self._options.slowdown * max(0, self.running - 1))

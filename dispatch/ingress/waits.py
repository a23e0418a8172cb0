"""When callers that were queued in vain may come back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from dispatch.contract.answers import EXPIRED_IN_QUEUE, MAX_WAIT, Answer, retry_after
from dispatch.errors import DispatchError
from dispatch.fabric.records import Estimate

_IN_VAIN = frozenset({EXPIRED_IN_QUEUE.reason, MAX_WAIT.reason})
_GOOD_FOR_S = 1.0  # many are told at once when a pool stands still
_ANSWER_S = 0.2


class Waits:
    """Asks how long pools make new requests wait. Without `estimate`, nobody knows."""

    def __init__(self, estimate: Callable[[str], Awaitable[Estimate]] | None = None) -> None:
        self._estimate = estimate
        self._found: dict[str, tuple[float, int | None]] = {}

    async def tell(self, answer: Answer) -> None:
        """Add `Retry-After` to the answer to a call that was queued in vain, if the pool's wait is known."""
        fields = dict(answer.fields)
        if fields.get("x-dispatch-reason") not in _IN_VAIN or "retry-after" in fields:
            return
        wait_ms = await self._wait_ms(fields.get("x-dispatch-pool", ""))
        if wait_ms is not None:
            answer.fields.extend(retry_after(wait_ms))

    async def _wait_ms(self, pool_id: str) -> int | None:
        now = anyio.current_time()
        asked_at, wait_ms = self._found.get(pool_id, (float("-inf"), None))
        if self._estimate is None or now - asked_at < _GOOD_FOR_S:
            return wait_ms
        self._found[pool_id] = (now, wait_ms)  # who comes meanwhile takes the last one
        wait_ms = None
        try:
            with anyio.move_on_after(_ANSWER_S):
                wait_ms = (await self._estimate(pool_id)).wait_ms
        except DispatchError:
            pass
        self._found[pool_id] = (now, wait_ms)
        return wait_ms

"""Refusals for want of room: what they say, and how long to wait before the next try. No I/O; both clients use it."""

from __future__ import annotations

import random

from dispatch.errors import RequestRefused
from dispatch.fabric.records import Refused
from dispatch.fabric.schema import document

NO_ROOM = frozenset({"pool_full", "pool_bytes_full", "group_full", "memory_full"})
"""Refusals that pass by themselves, as what waits is launched."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0
_SPREAD = 0.25
"""Those who were refused together do not come back together."""

_FACTS = {
    "pool_full": "{value} requests wait in pool {pool!r}, {limit} are allowed (max_queue_depth)",
    "pool_bytes_full": "{value} bytes of bodies wait in pool {pool!r}, {limit} are allowed (max_queue_bytes)",
    "group_full": "{value} requests wait in the group of pool {pool!r}, {limit} are allowed (max_queued)",
    "body_too_large": "the body for pool {pool!r} has {value} bytes, {limit} are allowed (max_payload_bytes)",
    "pool_disabled": "pool {pool!r} takes no requests",
    "pool_draining": "pool {pool!r} is being drained and takes no new requests; {value} still wait",
    "endpoint_open": "the endpoint of pool {pool!r} is not available, and the pool does not wait for it "
    "(on_open: reject)",
    "body_missing": "the body for pool {pool!r} had expired before it was submitted",
}
_ADVICE = {
    "pool_full": "{again}, or use another pool",
    "pool_bytes_full": "{again}, send less at once, or use another pool",
    "group_full": "{again}",
    "body_too_large": "send less at once",
    "pool_disabled": "use another pool, or have this one enabled",
    "pool_draining": "use another pool, or wait until this one is resumed",
    "endpoint_open": "try again when it has recovered, or use another pool",
    "body_missing": "try again",
}


def refused(pool_id: str, answer: Refused) -> RequestRefused:
    """Make the error for a submit to `pool_id` that was refused: pool, what is there, what is allowed, what to do."""
    reason, wait_ms = answer.reason, answer.retry_after_ms
    again = "try again later" if wait_ms is None else f"try again in {-(-wait_ms // 1000)} s"
    meaning = document()["refusals"].get(reason, "refused")
    fact = _FACTS.get(reason, meaning + " (pool {pool!r}: {value}, allowed {limit})")
    told = fact.format(pool=pool_id, value=answer.value, limit=answer.limit)
    advice = _ADVICE.get(reason, "{again}").format(again=again)
    return RequestRefused(
        reason,
        pool_id=pool_id,
        value=answer.value,
        limit=answer.limit,
        retry_after_ms=wait_ms,
        message=f"refused ({reason}): {told}; nothing was queued: {advice}",
    )


def pause_s(refusal: RequestRefused, refusals: int) -> float:
    """Return how long to wait after the `refusals`-th refusal: as long as it says, else longer each time."""
    if refusal.retry_after is not None:
        return refusal.retry_after * random.uniform(1, 1 + _SPREAD)  # noqa: S311 - no secret
    longest: float = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(refusals - 1, 8))
    return longest * random.uniform(0.5, 1)  # noqa: S311 - no secret

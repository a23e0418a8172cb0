"""Whether and when a failed attempt is followed by another one: DESIGN section 5.

A retry is explicit: the attempt's outcome has a word in the pool's `retry_on`, attempts are left, nobody asked the
request to stop, somebody waits for its reply, it comes due before the deadline, and the group's budget allows it. The
budget keeps an endpoint that fails from being flooded by its own failures: retries of the last ten seconds are at most
a share of the first attempts of that time, but so many a second are always allowed. Both are counted in windows of ten
seconds, and what the last window still weighs is estimated by how much of it lies within ten seconds.

The delay doubles with each attempt, with full jitter (Brooker, "Exponential Backoff And Jitter"), but is never shorter
than what the endpoint asked for. Chance comes from the request's id and fence, so that the same call does the same.
"""

from __future__ import annotations

from fractions import Fraction
from hashlib import sha1

from dispatch.contract import Attempt
from dispatch.fabric.records import Outcome, Settlement
from tests.model.endings import awaited
from tests.model.records import Group, Request
from tests.model.settings import PoolSettings

WINDOW_MS = 10_000
WORDS = {
    "endpoint_unreachable": "unreachable",
    "endpoint_disconnected": "disconnected",
    "endpoint_overloaded": "overloaded",
}
"""Words of `retry_on` by error type. Whether such an attempt may be repeated is its gateway's to say: not if the caller
has had a chunk of it."""
STATUSES = (502, 504)


def due_ms(group: Group, request: Request, item: Settlement) -> int | None:
    """Return when a lease that is settled is to wait again, and take that out of the budget; None if it ends."""
    now, config = group.now, group.pools[request.pool_id].settings
    if item.outcome != Outcome.FAILED or request.cancelled_by or request.chunks:
        return None
    if request.attempt >= config.max_attempts or word(item) not in config.retry_on:
        return None
    if not awaited(group, request, now):
        return None
    due = now + delay_ms(group, config, request, item.hold_ms)
    return due if due < request.deadline_ms and _spend(group) else None


def word(item: Settlement) -> str:
    """Return the word of `retry_on` that stands for how an attempt went; "" if none does."""
    if item.retryable and item.error_type in WORDS:
        return WORDS[item.error_type]
    return str(item.status) if item.status in STATUSES else ""


def delay_ms(group: Group, config: PoolSettings, request: Request, hold_ms: int) -> int:
    """Return how long a failed attempt is followed by none."""
    longest = min(config.retry_cap_ms, config.retry_base_ms * 2 ** (request.attempt - 1))
    return max(min(hold_ms, group.settings.hold_max_ms), int(longest * fraction(request)))


def fraction(request: Request) -> Fraction:
    """Return the part of the longest delay that is taken: from 0 to just below 1."""
    digest = sha1(f"{request.id}:{request.fence}".encode(), usedforsecurity=False).hexdigest()
    return Fraction(int(digest[:8], 16), 2**32)


def count_first(group: Group) -> None:
    """Note the launch of a first attempt."""
    _look_at_clock(group)
    group.firsts.append(group.now)


def _spend(group: Group) -> bool:
    """Take a retry out of the budget, if it allows one more."""
    _look_at_clock(group)
    limits = group.settings
    share = _estimate(group, group.firsts) * limits.retry_budget_percent / 100
    allowed = max(limits.retry_budget_min_per_s * WINDOW_MS / 1_000, share)
    if _estimate(group, group.retries) + 1 > allowed:
        return False
    group.retries.append(group.now)
    return True


def _look_at_clock(group: Group) -> None:
    """Let windows go by. One begins where the last ended, or, when nothing happened in it, with what happens now."""
    passed = (group.now - group.window_ms) // WINDOW_MS
    if passed == 1:
        group.window_ms += WINDOW_MS
    elif passed > 1:
        group.window_ms = group.now


def _estimate(group: Group, moments: list[int]) -> float:
    """Return about how many there were in the last ten seconds. In floats, as an equal pair must round the same way."""
    began = group.window_ms
    before = sum(began - WINDOW_MS <= moment < began for moment in moments)
    return sum(moment >= began for moment in moments) + before * (1 - (group.now - began) / WINDOW_MS)


def counts(group: Group) -> list[int]:
    """Return when the window began, and first attempts and retries counted in it and in the one before."""
    began = group.window_ms
    found = [began]
    for moments in (group.firsts, group.retries):
        found.append(sum(moment >= began for moment in moments))
        found.append(sum(began - WINDOW_MS <= moment < began for moment in moments))
    return found


def note_try(group: Group, request: Request, status: int | None, error_type: str) -> None:
    """Remember an attempt that is over while its request is not."""
    request.tries.append(
        Attempt(request.attempt, request.claimed_ms, group.now, status, error_type, request.gateway, request.endpoint)
    )

"""What pages ask the history: counts and percentiles over a time, the list, one request, shares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dispatch.errors import DispatchError, HistoryOff
from dispatch.studio.asking import Question
from dispatch.studio.findings import HistoryFacts
from dispatch.studio.reader import Reader
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import Filter, Percentiles, RequestEntry, Series

T = TypeVar("T")

OFF = "History is off. Set history.url to keep finished requests."
_PAGE = 100
_FACTS_EVERY_S = 60.0
_FACTS_OF_MS = 3_600_000
_STEPS = 60
_RANGE_MAX_MS = 400 * 24 * 3_600_000
_GROUPS = {
    "succeeded": "succeeded",
    "failed": "broke", "dead": "broke", "lost": "broke", "malformed": "broke",
    "expired": "late", "rejected": "late",
    "cancelled": "left", "producer_gone": "left", "reply_dropped": "left",
}  # fmt: skip
"""Ten endings are four colours of a chart: what went well, broke, came too late, or lost its caller."""
_ENTRY = (
    "request_id", "times", "pool_id", "ending", "submitted_ms", "ended_ms", "model", "producer_id", "gateway_id",
    "endpoint_id", "backend_address", "attempt", "cost_units", "message_count", "queue_wait_ms", "execution_ms",
    "total_latency_ms", "delivery_ms", "status", "error_type", "input_tokens", "output_tokens", "trace_id", "stream",
)  # fmt: skip
"""Members of a row that are shown: never the error's message, which may quote what was asked."""
_ATTEMPT = (
    "attempt", "started_ms", "ended_ms", "gateway_id", "endpoint_id", "execution_ms", "first_chunk_ms", "status",
    "error_type",
)  # fmt: skip


async def overview(question: Question) -> dict[str, Any]:
    """Return totals, and how it went step by step: endings in four groups, p95 of wait and run."""
    history, wanted = _history(question), _filter(question)
    span = (wanted.until_ms or 0) - (wanted.since_ms or 0)
    step_s = max(1, -(-span // (_STEPS * 1000)))
    stats, series, tokens, errors = await asyncio.gather(
        _ask(lambda: history.stats(wanted)),
        _ask(lambda: history.series(wanted, step_s)),
        _ask(lambda: history.tokens(wanted)),
        _ask(lambda: history.errors(wanted)),
    )
    return {
        "since_ms": wanted.since_ms,
        "until_ms": wanted.until_ms,
        "step_ms": step_s * 1000,
        "total": msgspec.to_builtins(stats.total),
        "pools": [msgspec.to_builtins(pool) for pool in stats.pools],
        "steps": _steps(series),
        "tokens": [msgspec.to_builtins(each) for each in tokens],
        "errors": [
            {"ending": each.ending, "error_type": each.error_type, "requests": each.requests, "pools": each.pool_ids,
             "last_ms": each.last_ms, "example_id": each.example_id}
            for each in errors
        ],
    }  # fmt: skip


async def requests(question: Question) -> dict[str, Any]:
    """Return a page of the list, the newest first."""
    history, wanted, cursor = _history(question), _filter(question), question.text("cursor")
    page = await _ask(lambda: history.requests(wanted, limit=_PAGE, cursor=cursor))
    return {"rows": [_entry(row) for row in page.rows], "cursor": page.cursor if page.truncated else ""}


async def request(question: Question) -> dict[str, Any]:
    """Return one request that has ended, with its attempts; `row` None = there is none."""
    history, request_id = _history(question), question.text("id")
    story = await _ask(lambda: history.request(request_id))
    if story is None:
        return {"row": None}
    entry = _entry(story.request)
    claimed = None
    if entry["queue_wait_ms"] is not None and entry["execution_ms"] is not None:
        claimed = entry["submitted_ms"] + entry["queue_wait_ms"]
    tries = [{name: getattr(attempt, name) for name in _ATTEMPT} for attempt in story.attempts]
    for one in tries:
        one["claimed_ms"] = one.pop("started_ms")
    return {"row": entry | {"claimed_ms": claimed, "tries": tries, "delivered_ms": story.delivered_ms}}


async def shares(question: Question) -> dict[str, Any]:
    """Return what pools were served against their weights, and Jain's index step by step."""
    history, wanted = _history(question), _filter(question)
    span = (wanted.until_ms or 0) - (wanted.since_ms or 0)
    step_s = max(1, -(-span // (_STEPS * 1000)))
    view = question.reader.view
    weights = {row.pool_id: row.quantum or 1 for row in (view.pools if view is not None else None) or ()}
    found = await _ask(lambda: history.shares(wanted, step_s, weights))
    result: dict[str, Any] = msgspec.to_builtins(found)
    return result


async def keep_facts(reader: Reader, history: History) -> None:
    """Tell the reader once a minute what runs usually take, until cancelled; it judges by that what is unusual."""
    while True:
        until = time.time_ns() // 1_000_000
        wanted = Filter(since_ms=until - _FACTS_OF_MS, until_ms=until, ending="succeeded")
        try:
            stats = await asyncio.to_thread(history.stats, wanted)
        except DispatchError as error:
            reader.history = HistoryFacts(problem=str(error))
        else:
            found = {pool.pool_id: pool.execution.p95 for pool in stats.pools if pool.pool_id and pool.execution}
            reader.history = HistoryFacts(run_p95_ms=found)
        await asyncio.sleep(_FACTS_EVERY_S)


def _history(question: Question) -> History:
    if question.history is None:
        raise HistoryOff(OFF)
    return question.history


async def _ask(query: Callable[[], T]) -> T:
    return await asyncio.to_thread(query)


def _filter(question: Question) -> Filter:
    since, until = question.number("since_ms"), question.number("until_ms")
    if not 0 <= since < until or until - since > _RANGE_MAX_MS:
        raise DispatchError("the range has to begin before it ends, and to be no longer than 400 days")
    pools = tuple(name for name in question.text("pool", 4_000).split(",") if name)
    return Filter(
        since_ms=since, until_ms=until, pools=pools or None,
        ending=question.text("ending"), model=question.text("model"), gateway_id=question.text("gateway"),
        endpoint_id=question.text("endpoint"), producer_id=question.text("producer"),
        request_id=question.text("request"), error_type=question.text("error"),
        failed=question.text("failed") == "1",
        wait_over_ms=_least(question, "wait"), run_over_ms=_least(question, "run"),
    )  # fmt: skip


def _least(question: Question, name: str) -> int | None:
    text = question.text(name)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def _entry(row: RequestEntry) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _ENTRY}


def _steps(series: Series) -> list[dict[str, Any]]:
    """Join the pools of each step: counts add up; of percentiles, which do not, the slowest pool's are told."""
    steps: dict[int, dict[str, Any]] = {}
    for point in series.points:
        step = steps.setdefault(
            point.start_ms,
            {"at": point.start_ms, "succeeded": 0, "broke": 0, "late": 0, "left": 0, "wait": None, "run": None,
             "wait50": None, "run50": None},
        )  # fmt: skip
        for ending, times in point.endings.items():
            step[_GROUPS.get(ending, "left")] += times
        for name, found in (("wait", point.queue_wait), ("run", point.execution)):
            _slowest(step, name, found)
    return [steps[at] for at in sorted(steps)]


def _slowest(step: dict[str, Any], name: str, found: Percentiles | None) -> None:
    if found is not None and (step[name] is None or found.p95 > step[name]):
        step[name], step[f"{name}50"] = found.p95, found.p50


PAST = {
    "history": overview,
    "history_list": requests,
    "history_request": request,
    "history_shares": shares,
}

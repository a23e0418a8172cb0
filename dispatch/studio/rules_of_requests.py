"""Rules about requests that run or ended, and about their way into the history."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from dispatch.fabric.streams import HISTORY
from dispatch.fabric.view import EndingRow, FabricView, RequestRow
from dispatch.studio.findings import Act, Finding, Situation
from dispatch.studio.looking import address_of, ago, is_live, listed
from dispatch.studio.words import duration, plural

_BAD = ("lost", "dead", "malformed", "producer_gone", "reply_dropped")
_OWN_FAULT = {400, 405, 411, 413, 415, 422}
"""Answers that speak of the request: another provider would say the same."""
_MOSTLY = 5


def running_long(s: Situation) -> Iterator[Finding]:
    """Requests run much longer than their pool's usually do, on gateways that live."""
    usual = _usual(s)
    live = {row.gateway_id: row for row in s.view.gateways or () if is_live(s.view, row)}
    long = []
    for row in s.view.running or ():
        if row.claimed_ms is None or (s.view.gateways is not None and row.gateway_id not in live):
            continue
        if s.view.server_ms - row.claimed_ms > _too_long(s, usual.get(row.pool_id or "")):
            long.append(row)
    if not long:
        return
    longest = min(long, key=lambda row: row.claimed_ms or 0)
    known = usual.get(longest.pool_id or "")
    compared = "" if known is None else f"; 95 % of {longest.pool_id} take at most {duration(known)}"
    runs = ago(s.view, longest.claimed_ms)
    yield Finding(
        rule="running_long",
        kind="held",
        subject="group",
        sentence=f"{plural(len(long), 'request runs', 'requests run')} unusually long, the longest {runs} on "
        f"{longest.gateway_id}{compared}.",
        since_ms=longest.claimed_ms,
        act=Act("Show them", "in_flight", longest.request_id),
        look_first=_slow_backend(s.view, long),
        signals=("in-flight-sticks",),
    )


def ended_badly(s: Situation) -> Iterator[Finding]:
    """Requests ended without their caller having been answered by an endpoint."""
    recent = _recent(s)
    for ending in _BAD:
        rows = [row for row in recent if row.ending == ending]
        if not rows:
            continue
        least = "At least " if _cut_off(s, recent) else ""
        ended = plural(len(rows), "request", "requests")
        yield Finding(
            rule=f"ended_{ending}",
            kind="broken",
            subject="group",
            sentence=f"{least}{ended} ended as {ending} in {duration(s.limits.recent_ms)}: {_why_ended(ending, rows)}.",
            since_ms=min((row.ended_ms for row in rows if row.ended_ms is not None), default=None),
            act=Act("Open history", "history", ending),
            look_first=_look_at_ending(ending, rows, s.view),
            signals=("requests-vanish",),
        )


def refused_by_endpoint(s: Situation) -> Iterator[Finding]:
    """An endpoint answered with errors that another provider might not have given."""
    by_endpoint: dict[str, list[EndingRow]] = defaultdict(list)
    for row in _recent(s):
        if row.endpoint and row.ending in {"succeeded", "failed"}:
            by_endpoint[row.endpoint].append(row)
    for name, rows in sorted(by_endpoint.items()):
        refused = [row for row in rows if row.ending == "failed" and _says_no(row)]
        if not refused:
            continue
        mostly = len(refused) >= _MOSTLY and 2 * len(refused) >= len(rows)
        statuses = Counter(f"status {row.status}" for row in refused)
        told = listed([status for status, _ in statuses.most_common()])
        yield Finding(
            rule="refused_by_endpoint",
            kind="broken" if mostly else "note",
            subject=f"endpoint:{name}",
            sentence=f"{name} answered {plural(len(refused), 'request', 'requests')} with {told}; no other provider "
            "was asked, since fallback, provider limits and budgets belong to the endpoint, not to dispatch.",
            since_ms=min((row.ended_ms for row in refused if row.ended_ms is not None), default=None),
            act=Act("Open endpoint", "endpoint", name),
            look_first=f"the configuration of what answers at {address_of(s.view.endpoint(name))} (LiteLLM, "
            "OpenRouter, vLLM or the provider's gateway)",
            signals=("fallback-missing",),
        )


def history_behind(s: Situation) -> Iterator[Finding]:
    """What ended does not reach the history."""
    group, history = s.view.group, s.history
    if group is None or group.readers is None:
        return
    problem = history.problem if history and history.configured else ""
    if problem:
        yield _history(
            "history_away", f"History does not answer: {problem.rstrip('.')}.", "ClickHouse, and the exporter"
        )
    reader = next((row for row in group.readers if row.name == HISTORY), None)
    if reader is None:
        if s.view.endings:
            yield _history("history_off", "Nothing takes the endings of this group to a history: history is off, or no "
                           "gateway that writes it has run in this group.",
                           "history.url of the gateways, and their group", note=True)  # fmt: skip
        return
    lag, last_ms = reader.lag or 0, reader.last_ms
    stuck_ms = s.view.server_ms - s.limits.reader_lag_ms
    if lag and _waits_since(s.view, last_ms) < stuck_ms:
        sentence = (
            f"History is {plural(lag, 'ending', 'endings')} behind; the last it took ended {ago(s.view, last_ms)} ago."
        )
        if not last_ms:
            sentence = f"History is {plural(lag, 'ending', 'endings')} behind, and has taken none."
        yield _history("history_behind", sentence, "the exporter: does a gateway with history.url run in this group?",
                       since_ms=last_ms)  # fmt: skip
    elif reader.taken and (reader.oldest_taken_ms or 0) < stuck_ms:
        taken, oldest_ms = plural(reader.taken, "ending was", "endings were"), reader.oldest_taken_ms
        sentence = f"{taken} taken and not written, the oldest ended {ago(s.view, oldest_ms)} ago."
        yield _history("history_unwritten", sentence, "ClickHouse, and the exporter's log", since_ms=oldest_ms)
    if history and history.missing:
        yield _history("history_gap", f"{plural(history.missing, 'ending has', 'endings have')} no row in the history.",
                       "dispatch history verify")  # fmt: skip


def _history(rule: str, sentence: str, look: str, *, note: bool = False, since_ms: int | None = None) -> Finding:
    return Finding(
        rule=rule,
        kind="note" if note else "broken",
        subject="group",
        sentence=sentence,
        since_ms=since_ms or None,
        act=Act("Open system", "system"),
        look_first=look,
        signals=("history-missing",),
    )


def _waits_since(view: FabricView, last_ms: int | None) -> int:
    """Return since when the first ending that the reader has not taken waits, as far as the newest endings tell."""
    later = [row.ended_ms for row in view.endings or () if row.ended_ms is not None and row.ended_ms > (last_ms or 0)]
    return min(later, default=view.server_ms)


def _usual(s: Situation) -> dict[str, float]:
    """Return how long 95 % of each pool's runs take: by the history, else by the newest endings if enough."""
    if s.history and s.history.run_p95_ms:
        return dict(s.history.run_p95_ms)
    runs: dict[str, list[int]] = defaultdict(list)
    for row in s.view.endings or ():
        if row.ending == "succeeded" and row.pool and row.claimed_ms is not None and row.ended_ms is not None:
            runs[row.pool].append(row.ended_ms - row.claimed_ms)
    return {
        pool: sorted(times)[int(0.95 * (len(times) - 1))]
        for pool, times in runs.items()
        if len(times) >= s.limits.long_run_samples
    }


def _too_long(s: Situation, usual: float | None) -> float:
    return s.limits.long_run_ms if usual is None else max(s.limits.long_run_floor_ms, 3 * usual)


def _slow_backend(view: FabricView, long: Sequence[RequestRow]) -> str:
    names = Counter(row.endpoint_id or "its endpoint" for row in long)
    [(endpoint, _)] = names.most_common(1)
    address = address_of(view.endpoint(endpoint))
    return f"heartbeats are fresh, so the gateway lives: the latency of the backend {endpoint} at {address}"


def _recent(s: Situation) -> list[EndingRow]:
    since = s.view.server_ms - s.limits.recent_ms
    return [row for row in s.view.endings or () if row.ended_ms is not None and row.ended_ms >= since]


def _cut_off(s: Situation, recent: Sequence[EndingRow]) -> bool:
    """Say whether there may be more recent endings than were read."""
    return "endings" in s.view.truncated and len(recent) == len(s.view.endings or ())


def _says_no(row: EndingRow) -> bool:
    return row.status is not None and row.status >= 400 and row.status not in _OWN_FAULT


def _why_ended(ending: str, rows: Sequence[EndingRow]) -> str:
    gateways, producers = _top(row.gateway for row in rows), _top(row.producer for row in rows)
    match ending:
        case "lost":
            return f"{gateways or 'their gateway'} died or lost touch while it held them, and the pool is at_most_once"
        case "dead":
            return f"their attempts are spent, the last on {gateways or 'an unknown gateway'}"
        case "malformed":
            return f"what {producers or 'a producer'} stored could not be read"
        case "producer_gone":
            return f"{producers or 'their producer'} stopped refreshing its liveness key before they ran"
        case _:
            return f"{producers or 'their producer'} was gone when the reply came"


def _look_at_ending(ending: str, rows: Sequence[EndingRow], view: FabricView) -> str:
    pools = _top(row.pool for row in rows)
    match ending:
        case "lost":
            row = view.pool(rows[0].pool)
            delivery = f" (now {row.delivery})" if row and row.delivery else ""
            return f"the log of {_top(row.gateway for row in rows) or 'the gateway'}; delivery of {pools}{delivery}"
        case "dead":
            return "dispatch dead list: what each attempt came to"
        case "malformed":
            return "the producer's version, and who else writes to this Valkey"
        case _:
            producer = _top(row.producer for row in rows) or "the producer"
            return f"the process of {producer}: is it alive, is its loop blocked?"


def _top(names: Iterator[str | None]) -> str:
    found = Counter(name for name in names if name)
    return listed([name for name, _ in found.most_common()])

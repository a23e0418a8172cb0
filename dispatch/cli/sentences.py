"""What can be said of one request, in sentences: where it is, why it waits, how it ended and what that means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dispatch.cli.operating import moment, one_line
from dispatch.fabric.view import FabricView
from dispatch.studio.findings import Finding
from dispatch.studio.words import FLOWING, REASONS, count, duration, plural

MEANINGS = {
    "succeeded": "Its reply was sent to its producer.",
    "failed": "Its producer was told the error.",
    "cancelled": "Its caller, or somebody for it, asked to stop it.",
    "expired": "Its deadline passed.",
    "producer_gone": "Its producer had stopped refreshing its liveness key, so it was not run.",
    "lost": "Its gateway died or lost touch while it ran, and its pool is at_most_once: it is not run again.",
    "dead": "Its attempts are spent; it is kept: dispatch dead show.",
    "malformed": "What its producer had stored could not be read.",
    "reply_dropped": "It was run, and its producer was gone when the reply came.",
    "rejected": "It was refused and never queued.",
}
"""What each ending means for the caller."""


@dataclass(frozen=True, slots=True)
class Live:
    """A request that has not ended, and what it waits behind. `before` and `estimate` (ms) None = not known."""

    row: dict[str, Any]
    view: FabricView
    found: list[Finding]
    before: int | None = None
    estimate: int | None = None

    def ago(self, ms: int | None) -> str:
        """Return how long ago a moment of the server was."""
        return duration(None if ms is None else max(1, self.view.server_ms - ms))

    def until(self, ms: int | None) -> str:
        """Return how long it is until a moment of the server."""
        return duration(None if ms is None else max(1, ms - self.view.server_ms))


def live_told(live: Live) -> list[str]:
    """Say where a request is that has not ended."""
    state = live.row["state"]
    lines = {"leased": _running, "delayed": _delayed}.get(state, _waiting)(live)
    if "cancel_asked_by" in live.row:
        lines.append(f"{one_line(live.row['cancel_asked_by'])} asked to stop it; its gateway was told.")
    lines.append(f"Its deadline is in {live.until(live.row.get('deadline_ms'))} ({moment(live.row['deadline_ms'])}).")
    return lines + _tries(live.row.get("tries") or [])


def _waiting(live: Live) -> list[str]:
    row = live.row
    lines = [
        (
            f"{row['request_id']} waits in pool {row['pool_id']} for its turn, since {live.ago(row['submitted_ms'])} "
            f"({moment(row['submitted_ms'])})."
        )
    ]
    if live.before is not None:
        first = "It is the next of its pool." if live.before == 0 else ""
        lines.append(first or f"{plural(live.before, 'request stands', 'requests stand')} before it in its pool.")
    lines += _why(live)
    if live.estimate is not None:
        lines.append(f"At the pool's present rate a request that came now would wait about {duration(live.estimate)}.")
    return lines


def _why(live: Live) -> list[str]:
    """Say what the pool waits for: the findings about it, its endpoint and the group, else its own block reason."""
    pool = live.view.pool(live.row["pool_id"])
    subjects = {f"pool:{live.row['pool_id']}", f"endpoint:{pool.endpoint_id}" if pool else ""}
    about = [
        each
        for each in live.found
        if "pending-grows" in each.signals and (each.subject == "group" or each.subject in subjects)
    ]
    if about:
        return [f"{one_line(each.sentence)} Look first: {one_line(each.look_first)}." for each in about]
    if pool is None:
        return ["Why it waits is not known: its pool could not be read."]
    if pool.block_reason is None:
        return [f"Its pool is not held up ({FLOWING.why.lower()}): {count(pool.in_flight)} of it run."]
    reason = REASONS.get(pool.block_reason)
    why, look = (reason.why, reason.look) if reason else (pool.block_reason, "")
    since = f", for {live.ago(pool.block_since_ms)}" if pool.block_since_ms is not None else ""
    return [f"{why}{since}." + (f" Look first: {look}." if look else "")]


def _running(live: Live) -> list[str]:
    row = live.row
    lines = [
        (
            f"{row['request_id']} of pool {row['pool_id']} runs on gateway {row['gateway_id']} against endpoint "
            f"{row['endpoint_id']} for {live.ago(row['claimed_ms'])}, attempt {row['attempt']}; it had waited "
            f"{duration(row['claimed_ms'] - row['submitted_ms'])}."
        )
    ]
    if "chunks" in row:
        first = duration(row["first_chunk_ms"] - row["claimed_ms"])
        lines.append(f"It streams: {plural(row['chunks'], 'chunk', 'chunks')} so far, the first after {first}.")
    beats = {gateway.gateway_id: gateway.beat_ms for gateway in live.view.gateways or ()}
    if live.view.gateways is None:
        lines.append("Whether its gateway lives is not known.")
    elif row["gateway_id"] not in beats:
        lines.append("Its gateway is gone: when the lease ends the request is lost, or run again (at_least_once).")
    else:
        lines.append(f"Its gateway was last heard of {live.ago(beats[row['gateway_id']])} ago.")
    return lines


def _delayed(live: Live) -> list[str]:
    row = live.row
    return [
        (
            f"{row['request_id']} of pool {row['pool_id']} waits for attempt {row['attempt'] + 1}, which is due in "
            f"{live.until(row.get('due_ms'))} ({moment(row.get('due_ms'))})."
        )
    ]


def ended_told(ending: dict[str, Any], live: dict[str, Any] | None) -> list[str]:
    """Say how a request ended, from the record of its ending or what is left of it."""
    pool, name = ending.get("pool") or ending.get("pool_id"), ending["request_id"]
    lines = [f"{name} of pool {pool} ended as {ending['ending']} at {moment(ending.get('ended_ms'))}."]
    lines.append(MEANINGS.get(ending["ending"], "") + _error(ending))
    claimed, ended, submitted = (ending.get(f"{word}_ms") for word in ("claimed", "ended", "submitted"))
    if claimed is not None and ended is not None and submitted is not None:
        where = f"on gateway {ending.get('gateway')} against endpoint {ending.get('endpoint')}"
        lines.append(f"It waited {duration(claimed - submitted)} and ran {duration(ended - claimed)} {where}, "
                     f"attempt {ending.get('attempt')}.")  # fmt: skip
    elif ended is not None and submitted is not None:
        lines.append(f"It never ran; it was there for {duration(ended - submitted)}.")
    return lines + _tries((live or {}).get("tries") or [])


def story_told(story: dict[str, Any]) -> list[str]:
    """Say how a request ended, from its row in the history."""
    row = story["request"]
    lines = [(f"{row['request_id']} of pool {row['pool_id']} ended as {row['ending']} at {moment(row['ended_ms'])} "
             "(from history).")]  # fmt: skip
    lines.append(MEANINGS.get(row["ending"], "") + _error(row))
    if row["execution_ms"] is None:
        lines.append(f"It never ran; it waited {duration(row['queue_wait_ms'])}.")
    else:
        where = f"on gateway {row['gateway_id']} against endpoint {row['endpoint_id']}, attempt {row['attempt']}"
        lines.append(f"It waited {duration(row['queue_wait_ms'])} and ran {duration(row['execution_ms'])} {where}.")
    if row["input_tokens"] is not None or row["output_tokens"] is not None:
        lines.append(f"Tokens: {count(row['input_tokens'])} in, {count(row['output_tokens'])} out.")
    if row["delivery_ms"] is not None:
        lines.append(f"Its producer took the reply {duration(row['delivery_ms'])} later.")
    return lines + _tries(story["attempts"][:-1])


def _error(row: dict[str, Any]) -> str:
    error, status = row.get("error_type"), row.get("status")
    if not error or row["ending"] == "succeeded":
        return ""
    told = f" Error: {one_line(str(error))}" + (f", status {status}" if status is not None else "")
    message = row.get("error_message")
    return told + (f" ({one_line(message)})." if message else ".")


def _tries(tries: list[dict[str, Any]]) -> list[str]:
    return [
        f"Attempt {one['attempt']} had ended with {one['error_type'] or 'an unknown error'}"
        + (f" (status {one['status']})" if one.get("status") is not None else "")
        + f" on gateway {one['gateway_id']}."
        for one in tries
    ]

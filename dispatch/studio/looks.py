"""What pages ask for when somebody opens something: waiting requests, one request, config and its generations."""

from __future__ import annotations

from typing import Any

from dispatch.errors import BadArgument, DispatchError
from dispatch.fabric.functions import fabric_audit, fabric_snapshot, library_version
from dispatch.fabric.view import event_row
from dispatch.studio.asking import Question
from dispatch.studio.board import event_shown
from dispatch.studio.redacting import without_secrets

_WAITING_SHOWN = 200
_PAGE = 50
_PAGE_OF_LINES = 100
_REQUEST_FIELDS = (
    "request_id", "state", "ending", "pool_id", "producer_id", "model", "message_count", "cost", "attempt",
    "submitted_ms", "deadline_ms", "body_bytes", "priority", "detached", "fairness_key", "claimed_ms", "due_ms",
    "gateway_id", "dispatcher_id", "endpoint_id", "cancel_asked_by", "probe_until_ms", "tries", "chunks",
    "first_chunk_ms", "lease_until_ms", "died_ms", "last_error_type",
)  # fmt: skip
_ENDING_FIELDS = (
    "request_id", "ending", "pool", "producer", "gateway", "endpoint", "error_type", "status", "attempt",
    "submitted_ms", "claimed_ms", "ended_ms",
)  # fmt: skip


async def waiting(question: Question) -> dict[str, Any]:
    """Return the first requests that wait in a pool: for their turn, and for their next attempt."""
    pool = question.text("pool")
    queued = await question.run(fabric_snapshot("waiting", limit=_WAITING_SHOWN, subject=pool))
    delayed = await question.run(fabric_snapshot("delayed", limit=_WAITING_SHOWN, subject=pool))
    return {
        "server_ms": queued["server_ms"],
        "queued": [_request(row) for row in queued["rows"]],
        "delayed": [_request(row) for row in delayed["rows"]],
        "more": queued["truncated"],
    }


async def request(question: Question) -> dict[str, Any]:
    """Return what is known of one request: where it is, or how it ended lately."""
    request_id = question.text("id")
    page = await question.run(fabric_snapshot("request", subject=request_id))
    lease = question.reader.tables.get("leases", {}).get(request_id)
    row = _request(page["rows"][0]) if page["rows"] else None
    if row is not None and lease is not None:
        row["lease_until_ms"] = lease["until_ms"]
    ended = await _ended(question, request_id)
    return {"server_ms": page["server_ms"], "row": row, "ended": ended}


async def _ended(question: Question, request_id: str) -> dict[str, Any] | None:
    page = await question.run(fabric_snapshot("endings", limit=200))
    for row in page["rows"]:
        if row.get("request_id") == request_id:
            return {name: row.get(name) for name in _ENDING_FIELDS}
    return None


async def endings(question: Question) -> dict[str, Any]:
    """Return the newest endings, of one pool if one is named."""
    pool = question.text("pool")
    page = await question.run(fabric_snapshot("endings", limit=200))
    rows = [row for row in page["rows"] if not pool or row.get("pool") == pool]
    return {"rows": [{name: row.get(name) for name in ("record_id", *_ENDING_FIELDS)} for row in rows[:_PAGE]]}


async def config(question: Question) -> dict[str, Any]:
    """Return the config in force, addresses without what is secret in them."""
    return _without_secrets(await question.run(fabric_snapshot("config")))


async def generations(question: Question) -> dict[str, Any]:
    """Return a page of the config's generations, the newest first."""
    page: dict[str, Any] = await question.run(
        fabric_snapshot("generations", cursor=question.text("cursor"), limit=_PAGE)
    )
    return page


async def generation(question: Question) -> dict[str, Any]:
    """Return one generation and what it changed."""
    number = question.number("generation")
    try:
        found = await question.run(fabric_snapshot("generation", subject=str(number)))
    except BadArgument:
        raise DispatchError(f"generation {number} is not kept any more") from None
    found["changes"] = [[without_secrets(str(cell)) for cell in change] for change in found["changes"]]
    return _without_secrets(found)


async def events(question: Question) -> dict[str, Any]:
    """Return a page of what changed, the newest first."""
    page = await question.run(fabric_snapshot("events", cursor=question.text("cursor"), limit=_PAGE))
    rows = [{"id": row["event_id"], **event_shown(event_row(row))} for row in page["rows"]]
    return {"rows": rows, "cursor": page["cursor"]}


async def system(question: Question) -> dict[str, Any]:
    """Return which library the server runs, and what an audit of the group's own counters finds."""
    found = await question.run(library_version())
    audit = await question.run(fabric_audit("group"))
    return {
        "contract": found.contract, "digest": found.digest, "version": found.version, "audit": audit,
        "history": question.history is not None,
    }  # fmt: skip


async def lines(question: Question) -> dict[str, Any]:
    """Return the last 15 minutes of what waits in the pools that are named."""
    pools = question.args.get("pools")
    if not isinstance(pools, list) or len(pools) > _PAGE_OF_LINES:
        raise DispatchError(f"at most {_PAGE_OF_LINES} pools are expected")
    known = question.reader.memory.lines.pools
    return {name: list(known[name]) for name in pools if isinstance(name, str) and name in known}


async def signals(question: Question) -> list[dict[str, Any]]:
    """Return the table of symptoms, and what may cause each now."""
    return question.reader.strip.signals()


def _request(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _REQUEST_FIELDS if name in row}


def _without_secrets(page: dict[str, Any]) -> dict[str, Any]:
    for endpoint in page["document"].get("endpoints", []):
        for name in ("url", "gate_url"):
            if endpoint.get(name):
                endpoint[name] = without_secrets(endpoint[name])
    return page


LOOKS = {
    "waiting": waiting,
    "request": request,
    "endings": endings,
    "config": config,
    "generations": generations,
    "generation": generation,
    "events": events,
    "lines": lines,
    "signals": signals,
    "system": system,
}

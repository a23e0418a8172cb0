"""`dispatch pools`: what waits and runs in the pools of a fabric group, and what holds them up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    Actor,
    FabricGroup,
    Group,
    Json,
    Reason,
    Url,
    complain,
    fabric_group,
    moment,
    one_line,
    or_dash,
    require_typed,
    who,
    write_json,
)
from dispatch.cli.tables import print_table
from dispatch.errors import PoolUnknown
from dispatch.fabric.functions import fabric_snapshot, pool_pause, request_cancel
from dispatch.fabric.records import PoolState

_HELP = """List pools, and pause, resume, drain or purge one.

\b
Example:
  dispatch pools list
  dispatch pools pause backfill --reason "the batch endpoint is being moved"
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)

Pool = Annotated[str, typer.Argument(help="Name of the pool.", show_default=False)]

_REASONS = {
    "global_capacity": "the group runs as many requests as it may",
    "lane_capacity": "the pool runs as many requests as it may (max_concurrent)",
    "protected": "the free slots are kept for pools below their minimum",
    "endpoint_open": "its endpoint's breaker is open",
    "endpoint_gated": "its endpoint says that it is busy enough",
    "endpoint_capacity": "its endpoint runs as many requests as it may",
    "insufficient_credit": "its next request costs more than the credit it has; it gets more each round",
    "paused": "the pool is paused",
    "malformed_head": "a request at its head could not be read, and was ended",
}
"""The schema's skip reasons in words."""


@app.command("list")
def list_command(url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, json: Json = False) -> None:
    r"""List all pools: weight and bounds, what waits and runs, and why nothing is launched.

    \b
    Example:
      dispatch pools list
    """
    with fabric_group(url, group) as fabric:
        rows = list(fabric.rows("pools"))
    if json:
        write_json({"group": group, "pools": rows})
        return
    headings = ("pool", "state", "weight", "min", "max", "waiting", "delayed", "running", "credit", "launched",
                "blocked by")  # fmt: skip
    print_table(headings, [_cells(row) for row in rows])


@app.command("show")
def show_command(pool: Pool, url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, json: Json = False) -> None:
    r"""Show one pool: its config, its counters, its next request, who paused it, and why it was passed over.

    \b
    Example:
      dispatch pools show interactive
    """
    with fabric_group(url, group) as fabric:
        row = _row(fabric, pool)
    if json:
        write_json({"group": group, **row})
        return
    for name, value in _lines(row):
        typer.echo(f"{name + ':':<18}{value}")


@app.command("pause")
def pause_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    pool: Pool, url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, reason: Reason = "", actor: Actor = "",
    json: Json = False,
) -> None:  # fmt: skip
    r"""Launch nothing of a pool any more. New requests are taken and wait; running ones finish.

    \b
    Example:
      dispatch pools pause backfill --reason "the batch endpoint is being moved"
    """
    _change(url, group, ("pause", pool, actor, reason), json)


@app.command("resume")
def resume_command(  # noqa: PLR0913, PLR0917 - as above
    pool: Pool, url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, reason: Reason = "", actor: Actor = "",
    json: Json = False,
) -> None:  # fmt: skip
    r"""End a pause or a drain.

    \b
    Example:
      dispatch pools resume backfill
    """
    _change(url, group, ("resume", pool, actor, reason), json)


@app.command("drain")
def drain_command(  # noqa: PLR0913, PLR0917 - as above
    pool: Pool, url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, reason: Reason = "", actor: Actor = "",
    json: Json = False,
) -> None:  # fmt: skip
    r"""Take no new requests into a pool; what waits is launched. An empty pool can be left out of the config.

    \b
    Example:
      dispatch pools drain backfill
      dispatch config set pools.backfill=null
    """
    _change(url, group, ("drain", pool, actor, reason), json)


@app.command("purge")
def purge_command(  # noqa: PLR0913, PLR0917 - as above
    pool: Pool,
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the pool's name.")] = False,
    reason: Reason = "",
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Cancel every request that waits in a pool, also for its next attempt.

    Running ones, and those that come meanwhile, are left alone.

    \b
    Example:
      dispatch pools purge backfill --reason "wrong prompts" --yes
    """
    with fabric_group(url, group) as fabric:
        row = _row(fabric, pool)
        if not yes:
            question = f"{row['pending']} waiting requests of pool {pool} will be cancelled; type its name"
            require_typed(question, pool, f"nothing was cancelled: the name {pool} was not given")
        cancelled = _purge(fabric, pool, who(actor), reason)
        left = _row(fabric, pool)
    if json:
        write_json({"group": group, "pool_id": pool, "cancelled": cancelled, "waiting": left["pending"],
                    "running": left["in_flight"]})  # fmt: skip
        return
    typer.echo(f"pool {pool}: {cancelled} cancelled; {left['pending']} wait, {left['in_flight']} run")


def _change(url: str, group: str, asked: tuple[str, str, str, str], json: bool) -> None:
    action, pool, actor, reason = asked
    with fabric_group(url, group) as fabric:
        state: PoolState = fabric.run(pool_pause(pool, action, actor=who(actor), reason=reason))
    if json:
        write_json({"group": group, "pool_id": pool, "changed": state.changed, "state": state.state,
                    "waiting": state.waiting, "running": state.in_flight})  # fmt: skip
        return
    now = "is now" if state.changed else "was already"
    typer.echo(f"pool {pool} {now} {state.state}; {state.waiting} wait, {state.in_flight} run")


def _row(fabric: FabricGroup, pool: str) -> dict[str, Any]:
    for row in fabric.rows("pools", pool):
        return row
    raise PoolUnknown(f"pool {pool!r} is not configured in group {fabric.name}; dispatch pools list has those that are")


def _purge(fabric: FabricGroup, pool: str, actor: str, reason: str) -> int:
    """Cancel what waits by now; returns how many were.

    Claims shift the pages meanwhile, so the pool is walked until a walk finds nothing.
    """
    began_ms = fabric.run(fabric_snapshot("group"))["server_ms"]
    total = 0
    while True:
        before = total
        for ids in _waiting_pages(fabric, pool, began_ms):
            calls = [request_cancel(name, actor=actor, reason=reason, only_waiting=True) for name in ids]
            total += sum(answer.status == "CANCELLED" for answer in fabric.run_many(calls))
            complain(f"{total} cancelled")
        if total == before:
            return total


def _waiting_pages(fabric: FabricGroup, pool: str, began_ms: int) -> Iterator[list[str]]:
    """Ids of what waits for its first attempt and for its next one, a page at a time."""
    for section in ("waiting", "delayed"):
        for page in fabric.pages(section, pool):
            ids = [row["request_id"] for row in page["rows"] if row["submitted_ms"] <= began_ms]
            if ids:
                yield ids


def _state(row: dict[str, Any]) -> str:
    if "paused" in row:
        return "paused"
    if "draining" in row:
        return "draining"
    return "active" if row["enabled"] else "disabled"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = ("quantum", "min_concurrent", "max_concurrent", "pending", "delayed", "in_flight", "deficit", "launched")
    return (
        row["pool_id"], _state(row), *(or_dash(row.get(name)) for name in numbers), or_dash(row.get("block_reason")),
    )  # fmt: skip


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `show` says of a pool, line by line."""
    name = row["pool_id"]
    yield "pool", f"{name} ({one_line(row['display_name'])})" if row["display_name"] else name
    yield "state", _state_told(row)
    yield "weight", str(row["quantum"])
    yield "slots", f"at least {row['min_concurrent']}, at most {row.get('max_concurrent', 'the group')}"
    yield "burst", f"at most {row['max_burst_per_visit']} per visit" if "max_burst_per_visit" in row else "no bound"
    yield "endpoint", row["endpoint_id"]
    yield "delivery", row["delivery"].replace("_", " ")
    yield "attempts", _attempts_told(row)
    yield "waiting", f"{row['pending']} of {row['max_queue_depth']}"
    yield "waiting bytes", f"{row['pending_bytes']} of {row['max_queue_bytes']}"
    yield "delayed", f"{row['delayed']} (each waits for its next attempt)" if row["delayed"] else "0"
    yield "running", str(row["in_flight"])
    yield "credit", str(row["deficit"])
    yield "next request", _head_told(row)
    yield "blocked", _block_told(row)
    yield "submitted", str(row["submitted"])
    yield "launched", f"{row['launched']}, {row['cost_served']} units"
    for title, counter in (("ended", "endings"), ("refused", "rejected")):
        yield title, ", ".join(f"{word} {count}" for word, count in sorted(row.get(counter, {}).items())) or "-"
    for word, count in sorted(row.get("skips", {}).items(), key=lambda pair: -pair[1]):
        yield "passed over", f"{count} times: {_REASONS.get(word, word)}"


def _state_told(row: dict[str, Any]) -> str:
    note = row.get("paused") or row.get("draining")
    if not note:
        return _state(row)
    why = f": {one_line(note['reason'])}" if note["reason"] else ""
    return f"{_state(row)} by {one_line(note['by'])} at {moment(note['at_ms'])}{why}"


def _attempts_told(row: dict[str, Any]) -> str:
    most = row.get("max_attempts", 1)
    if most == 1:
        return "1"
    lost = ["a lost gateway"] if row["delivery"] == "at_least_once" else []
    after = ", ".join([word for word in (row.get("retry_on", ""),) if word] + lost)
    return f"at most {most}, repeated after {after or 'nothing'}"


def _head_told(row: dict[str, Any]) -> str:
    if "head_cost" not in row:
        return "-"
    return f"costs {row['head_cost']}, submitted {moment(row['head_submitted_ms'])}"


def _block_told(row: dict[str, Any]) -> str:
    if "block_reason" not in row:
        return "-"
    return f"since {moment(row['block_since_ms'])}: {_REASONS.get(row['block_reason'], row['block_reason'])}"

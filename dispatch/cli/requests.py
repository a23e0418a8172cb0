"""`dispatch requests`: what runs and waits in a fabric group, and where one request is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    FabricGroup,
    Group,
    Json,
    Url,
    complain,
    fabric_group,
    moment,
    one_line,
    or_dash,
    write_json,
)
from dispatch.cli.tables import print_table
from dispatch.errors import PoolUnknown, RequestUnknown
from dispatch.studio.words import duration

_HELP = """List requests that run and wait, and say where one is. They are stopped with dispatch cancel.

\b
Example:
  dispatch requests list --pool backfill
  dispatch requests show 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)

State = Literal["running", "delayed", "queued"]


@app.command("list")
def list_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    state: Annotated[State | None, typer.Option(help="Only those that run, or wait.", show_default="all")] = None,
    pool: Annotated[str, typer.Option(help="Only those of this pool.", show_default="all")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many at most.")] = 200,
    json: Json = False,
) -> None:
    r"""List requests: those that run, those that wait for their next attempt, and those that wait for their turn.

    The last ones stand pool by pool, in the order of their turns.

    \b
    Example:
      dispatch requests list --state running
    """
    with fabric_group(url, group) as fabric:
        if pool and not list(fabric.rows("pools", pool)):
            raise PoolUnknown(
                f"pool {pool!r} is not configured in group {group}; dispatch pools list has those that are"
            )
        rows: list[dict[str, Any]] = []
        for row in _found(fabric, state, pool):
            if len(rows) == limit:
                complain(f"there are more than these {limit} (--limit)")
                break
            rows.append(row)
    if json:
        write_json({"group": group, "requests": rows})
        return
    print_table(
        ("request", "state", "for", "pool", "model", "cost", "attempt", "submitted", "gateway"),
        [
            (
                row["request_id"], _told(row["state"]), duration(max(1, row["age_ms"])), row["pool_id"],
                one_line(row["model"]), str(row["cost"]), str(row["attempt"]), moment(row["submitted_ms"]),
                or_dash(row.get("gateway_id")),
            )
            for row in rows
        ],
    )  # fmt: skip


@app.command("show")
def show_command(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="A request.", show_default=False)],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    json: Json = False,
) -> None:
    r"""Say where a request is. What has ended is known for a minute (retention_ms).

    \b
    Example:
      dispatch requests show 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
    """
    with fabric_group(url, group) as fabric:
        for found in fabric.rows("request", request_id):
            row = found
            break
        else:
            name = one_line(request_id)
            raise RequestUnknown(f"{name} is not there; it was never submitted to group {group}, or ended a while ago")
    if json:
        write_json({"group": group, **row})
        return
    for name, value in _lines(row):
        typer.echo(f"{name + ':':<18}{value}")


def _found(fabric: FabricGroup, state: State | None, pool: str) -> Iterator[dict[str, Any]]:
    for wanted, section in (("running", "leases"), ("delayed", "delayed")):
        if state in {None, wanted}:
            yield from (row for row in _aged(fabric, section) if not pool or row["pool_id"] == pool)
    if state in {None, "queued"}:
        for one in list(fabric.rows("pools", pool)):
            if one["pending"]:
                yield from _aged(fabric, "waiting", one["pool_id"])


def _aged(fabric: FabricGroup, section: str, subject: str = "") -> Iterator[dict[str, Any]]:
    """Read a section; each row says for how long the request runs, or waits since it was submitted (`age_ms`)."""
    for page in fabric.pages(section, subject):
        for row in page["rows"]:
            yield row | {"age_ms": max(0, page["server_ms"] - row.get("claimed_ms", row["submitted_ms"]))}


def _told(state: str) -> str:
    return {"leased": "running", "queued": "waiting"}.get(state, state)


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `show` says of a request, line by line."""
    ending = f" {row['ending']}" if row.get("ending") else ""
    yield "request", row["request_id"]
    yield "state", _told(row["state"]) + ending
    yield "pool", row["pool_id"]
    yield "producer", "nobody waits for it" if row.get("detached") else or_dash(row.get("producer_id"))
    yield "model", one_line(row.get("model") or "-")
    yield "messages", or_dash(row.get("message_count"))
    yield "body", f"{row['body_bytes']} bytes" if "body_bytes" in row else "-"
    yield "cost", or_dash(row.get("cost"))
    yield "priority", or_dash(row.get("priority"))
    yield "fairness key", or_dash(row.get("fairness_key"))
    yield "submitted", moment(row.get("submitted_ms"))
    yield "deadline", moment(row.get("deadline_ms"))
    yield "attempt", or_dash(row.get("attempt"))
    if "due_ms" in row:
        yield "next attempt", moment(row["due_ms"])
    if "gateway_id" in row:
        yield (
            "runs on",
            f"gateway {row['gateway_id']}, endpoint {row['endpoint_id']}, since {moment(row['claimed_ms'])}",
        )
    if "chunks" in row:
        yield "streamed", f"{row['chunks']} chunks since {moment(row['first_chunk_ms'])}"
    if "cancel_asked_by" in row:
        yield "to be stopped", one_line(row["cancel_asked_by"])
    for one in row.get("tries") or ():
        status = f" (status {one['status']})" if one["status"] is not None else ""
        yield f"try {one['attempt']}", f"{one['error_type']}{status} on gateway {one['gateway_id']}"

"""`dispatch dead`: requests of at_least_once pools whose attempts are spent; they are kept to be looked at."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import typer

from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    REFUSED,
    Actor,
    FabricGroup,
    Group,
    Json,
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
from dispatch.errors import DispatchError, InvalidRequest, PoolUnknown
from dispatch.fabric.functions import dead_change, dead_content
from dispatch.fabric.records import DeadChange, DeadContent
from dispatch.fabric.schema import document, key

_HELP = """Requests of at_least_once pools whose attempts are spent: list and show them, retry or drop them.

They are kept whole for dead_ttl_ms (7 days), the newest dead_kept (1,000) of them; both are fields of the config.

\b
Example:
  dispatch dead list
  dispatch dead retry --all --pool backfill --yes
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Requests in the list.", show_default=False)]
OfPool = Annotated[str, typer.Option("--pool", help="Only those of this pool.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All of the list (or of --pool) instead of single ones.")]
Yes = Annotated[bool, typer.Option("--yes", help="With --all: do not ask for their number.")]

_BATCH = 100


@dataclass(slots=True)
class _Done:
    """What came of a retry or a drop, request by request."""

    retried: list[dict[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """How many of each, those that are none left out."""
        counts = (
            ("retried", self.retried), ("dropped", self.dropped), ("refused", self.refused), ("not there", self.unknown)
        )  # fmt: skip
        return ", ".join(f"{len(found)} {word}" for word, found in counts if found) or "nothing to do"


@app.command("list")
def list_command(url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, pool: OfPool = "", json: Json = False) -> None:
    r"""List dead requests, the last that died first.

    \b
    Example:
      dispatch dead list --pool backfill
    """
    with fabric_group(url, group) as fabric:
        rows = list(fabric.rows("dead", pool))
    if json:
        write_json({"group": group, "dead": rows})
        return
    print_table(
        ("request", "pool", "attempts", "died", "last error"),
        [
            (
                row["request_id"], row["pool_id"], str(row["attempt"]), moment(row["died_ms"]),
                or_dash(row["last_error_type"]),
            )
            for row in rows
        ],
    )  # fmt: skip


@app.command("show")
def show_command(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="A request in the list.", show_default=False)],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    content: Annotated[
        bool,
        typer.Option("--content", help="Print its envelope and its body, too: prompts, and whatever they hold."),
    ] = False,
    json: Json = False,
) -> None:
    r"""Show all facts of a dead request and each of its tries. What it says is left out unless --content is given.

    \b
    Example:
      dispatch dead show 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
    """
    with fabric_group(url, group) as fabric:
        row = _row(fabric, request_id)
        said = _content(fabric, request_id) if content else None
    if json:
        write_json({"group": group, **row, **({} if said is None else _content_json(*said))})
        return
    for name, value in _lines(row):
        typer.echo(f"{name + ':':<18}{value}")
    if said is None:
        typer.echo(f"{'content:':<18}{row['body_bytes']} bytes, not shown (--content shows it)")
        return
    for title, text in zip(("envelope", "body"), said, strict=True):
        typer.echo(f"\n{title}:\n{_readable(text)}")


@app.command("retry")
def retry_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    request_ids: Ids = None,
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    all_: All = False,
    pool: OfPool = "",
    yes: Yes = False,
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Submit dead requests anew, under new ids that are printed: fresh deadline, attempts counted from 0.

    Nobody waits for their replies any more: these are kept for idempotency_ttl_ms (a day).

    Exit code: 0 all were retried; 1 one is not there, or its pool does not take it (it stays in the list); 2 no answer,
    or something is wrong with the call.

    \b
    Example:
      dispatch dead retry 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
      dispatch dead retry --all --pool backfill
    """
    with fabric_group(url, group) as fabric:
        ids = _chosen(fabric, request_ids, all_, pool, None if yes else "retried")
        done = _change(fabric, "retry", ids, who(actor))
    _say(group, done, json)


@app.command("drop")
def drop_command(  # noqa: PLR0913, PLR0917 - as above
    request_ids: Ids = None,
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    all_: All = False,
    pool: OfPool = "",
    yes: Yes = False,
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Forget dead requests and all that is kept of them, at once.

    Exit code: 0 all were dropped; 1 one is not there; 2 no answer, or something is wrong with the call.

    \b
    Example:
      dispatch dead drop 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
      dispatch dead drop --all --yes
    """
    with fabric_group(url, group) as fabric:
        ids = _chosen(fabric, request_ids, all_, pool, None if yes else "dropped")
        done = _change(fabric, "drop", ids, who(actor))
    _say(group, done, json)


def _chosen(fabric: FabricGroup, ids: list[str] | None, all_: bool, pool: str, ask: str | None) -> list[str]:
    """Return the requests that are meant. `ask`: what will be done to them, None = no question.

    Raises:
        InvalidRequest: neither single ones nor all are named, or both.
    """
    if bool(ids) == all_ or (pool and not all_):
        raise InvalidRequest("name requests, or give --all (with --pool for those of one pool)")
    if ids:
        return list(dict.fromkeys(ids))
    found = [row["request_id"] for row in fabric.rows("dead", pool)]
    if ask and found:
        of_pool = f" of pool {pool}" if pool else ""
        question = f"{len(found)} dead requests{of_pool} will be {ask}; type their number"
        require_typed(question, str(len(found)), f"nothing was {ask}: the number {len(found)} was not given")
    return found


def _change(fabric: FabricGroup, action: str, ids: list[str], actor: str) -> _Done:
    done = _Done()
    for at in range(0, len(ids), _BATCH):
        part = ids[at : at + _BATCH]
        new_ids = [secrets.token_hex(16) if action == "retry" else "" for _ in part]
        calls = [
            dead_change(action, request_id, actor=actor, new_id=new_id)
            for request_id, new_id in zip(part, new_ids, strict=True)
        ]
        for request_id, answer in zip(part, fabric.connection.run_many(fabric.name, calls), strict=True):
            _sort(done, request_id, answer)
        if len(ids) > _BATCH:
            complain(f"{at + len(part)} of {len(ids)}")
    return done


def _sort(done: _Done, request_id: str, answer: DeadChange | DispatchError) -> None:
    if isinstance(answer, PoolUnknown):
        done.refused.append({"request_id": request_id, "reason": "pool_unknown", "message": str(answer)})
        return
    if isinstance(answer, DispatchError):
        raise answer
    match answer.status:
        case "RETRIED":
            done.retried.append({"request_id": request_id, "new_id": answer.new_id})
        case "DROPPED":
            done.dropped.append(request_id)
        case "REFUSED":
            why = document()["refusals"].get(answer.reason, "")
            message = f"{answer.reason}: {why}" if why else answer.reason
            done.refused.append({"request_id": request_id, "reason": answer.reason, "message": message})
        case _:
            done.unknown.append(request_id)


def _say(group: str, done: _Done, json: bool) -> None:
    """Write what came of it.

    Raises:
        typer.Exit: not everything was done.
    """
    if json:
        write_json({"group": group, **msgspec.to_builtins(done)})
    else:
        for row in done.retried:
            typer.echo(f"{row['request_id']}: retried as {row['new_id']}")
        for request_id in done.dropped:
            typer.echo(f"{request_id}: dropped")
    for row in done.refused:
        complain(f"{one_line(row['request_id'])}: not retried: {row['message']}")
    for request_id in done.unknown:
        complain(f"{one_line(request_id)}: is not in the dead list")
    typer.echo(done.summary, err=json)
    if done.refused or done.unknown:
        raise typer.Exit(REFUSED)


def _row(fabric: FabricGroup, request_id: str) -> dict[str, Any]:
    for row in fabric.rows("request", request_id):
        if "died_ms" in row:
            return row
    raise _absent(fabric, request_id)


def _absent(fabric: FabricGroup, request_id: str) -> InvalidRequest:
    name = one_line(request_id)
    return InvalidRequest(
        f"{name} is not in the dead list of group {fabric.name}; dispatch dead list has those that are"
    )


def _content(fabric: FabricGroup, request_id: str) -> tuple[bytes, bytes]:
    """Return envelope and body of a dead request.

    Raises:
        InvalidRequest: it left the list meanwhile.
    """
    found: DeadContent | None = fabric.run(dead_content(request_id))
    if found is None:
        raise _absent(fabric, request_id)
    body: bytes | None = found.body
    if len(found.body) != found.body_bytes:
        body = fabric.connection.get(key(fabric.name, "request_body", id=request_id, nonce=found.nonce))
    return found.envelope, body or b""


def _content_json(envelope: bytes, body: bytes) -> dict[str, Any]:
    return {"envelope": _raw(envelope), "body": _raw(body)}


def _raw(text: bytes) -> Any:
    """Return JSON as it stands, digit for digit, or what is none as text."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return text.decode(errors="replace")
    return msgspec.Raw(text)


def _readable(text: bytes) -> str:
    """Return content fit for a terminal: indented if it is JSON, and nothing in it that moves the cursor."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        text = msgspec.json.format(text)
    return "\n".join(one_line(line) for line in text.decode(errors="replace").split("\n"))


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What `show` says of a request, line by line."""
    yield "request", row["request_id"]
    yield "pool", row["pool_id"]
    yield "producer", row["producer_id"]
    yield "model", one_line(row["model"])
    yield "messages", or_dash(row.get("message_count"))
    yield "cost", str(row["cost"])
    yield "priority", str(row["priority"])
    yield "fairness key", or_dash(row.get("fairness_key"))
    yield "submitted", moment(row["submitted_ms"])
    yield "deadline", moment(row["deadline_ms"])
    yield "died", moment(row["died_ms"])
    yield "last error", or_dash(row["last_error_type"])
    for one in row["tries"]:
        yield f"try {one['attempt']}", _try_told(one)


def _try_told(one: dict[str, Any]) -> str:
    status = f" (status {one['status']})" if one["status"] is not None else ""
    ran_s = (one["ended_ms"] - one["claimed_ms"]) / 1000
    return (
        f"{one['error_type']}{status} after {ran_s:.1f} s on gateway {one['gateway_id']}, "
        f"endpoint {one['endpoint_id']}, claimed {moment(one['claimed_ms'])}"
    )

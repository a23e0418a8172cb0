"""`dispatch keys`: the bearer keys of a group's callers."""

from __future__ import annotations

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
    trouble_as_exit_code,
    who,
    write_json,
)
from dispatch.cli.remote import RemoteConnection
from dispatch.cli.tables import print_table
from dispatch.errors import GroupUnknown, InvalidRequest
from dispatch.fabric.api_keys import Grant, NewKey, Role, new_key, read_record, read_token
from dispatch.fabric.functions import key_change, key_read
from dispatch.fabric.schema import LIMITS

_HELP = """Bearer keys of a group's callers: create, list and revoke them.

A key is for one group. The group keeps only a hash of it, so it is shown once, when it is created. Gateways act upon
what they read of the keys for at most 2 s: a revoked key stops within 2 s, a new one works at once.

\b
Example:
  dispatch keys create --name batch-team --pool backfill
  dispatch keys list
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)


@app.command("create")
def create_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    name: Annotated[str, typer.Option(help="For whom or what it is; shown in lists.")],
    role: Annotated[
        list[Role] | None,
        typer.Option(help="What it is for; several are allowed. admin may observe, too.", show_default="submit"),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="A pool it may use; several are allowed.", show_default="all of them")
    ] = None,
    fix_pool: Annotated[
        str | None, typer.Option(help="The pool of every call made with it.", show_default="the caller's choice")
    ] = None,
    fairness_key: Annotated[
        str | None,
        typer.Option(help="The fairness key of every call made with it.", show_default="the caller's choice"),
    ] = None,
    cost: Annotated[
        int | None, typer.Option(help="The cost of every call made with it, in units.", show_default="by the cost rule")
    ] = None,
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Create a key and print it on stdout, once; what it allows goes to stderr.

    \b
    Examples:
      dispatch keys create --name batch-team --pool backfill
      dispatch keys create --name tenant-a --fix-pool interactive --fairness-key tenant-a
      dispatch keys create --name dashboard --role observe
    """
    with trouble_as_exit_code():
        grant = Grant(
            name=name,
            roles=tuple(dict.fromkeys(role or [Role.SUBMIT])),
            pools=tuple(dict.fromkeys(pool)) if pool else None,
            pool=fix_pool,
            fairness_key=fairness_key,
            cost=cost,
        )
    with fabric_group(url, group) as fabric:
        unknown = _unknown_pools(fabric, grant)
        made = _stored(fabric, grant, who(actor))
    for missing in unknown:
        complain(f"note: pool {missing!r} is not configured in group {group}")
    row = read_record(made.record).shown(made.key_id)
    if json:
        write_json({"group": group, **row, "token": made.token})
        return
    typer.echo(made.token)
    facts = f"key {made.key_id} ({one_line(name)}) for group {group}: {_told(row)}"
    typer.echo(f"{facts}. It cannot be shown again.", err=True)


@app.command("list")
def list_command(url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, json: Json = False) -> None:
    r"""List the keys of a group and what they allow, the oldest first. The keys themselves cannot be shown.

    \b
    Example:
      dispatch keys list
    """
    with fabric_group(url, group) as fabric:
        rows = _rows(fabric)
    if json:
        write_json({"group": group, "keys": rows})
        return
    print_table(
        ("key", "name", "roles", "pools", "fixed", "created"),
        [
            (
                row["key_id"], one_line(row["name"]), " ".join(row["roles"]),
                "all" if row["pools"] is None else " ".join(row["pools"]), or_dash(_fixed(row)),
                moment(row["created_ms"]),
            )
            for row in rows
        ],
    )  # fmt: skip


@app.command("revoke")
def revoke_command(
    key_ids: Annotated[list[str], typer.Argument(metavar="KEY...", help="Ids of keys, as list shows them.")],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Revoke keys. Gateways refuse them within 2 s; calls that were admitted before go on.

    Exit code: 0 all were revoked; 1 one is not there; 2 no answer, or something is wrong with the call.

    \b
    Example:
      dispatch keys revoke 4f1c0d6c2b8e4d5c
    """
    revoked: list[str] = []
    unknown: list[str] = []
    with fabric_group(url, group) as fabric:
        for given in dict.fromkeys(key_ids):
            token = read_token(given)  # somebody may give the whole key: no message repeats it
            key_id = given if token is None else token.key_id
            answer = fabric.run(key_change("revoke", key_id, actor=who(actor)))
            (revoked if answer == "REVOKED" else unknown).append(key_id)
    if json:
        write_json({"group": group, "revoked": revoked, "unknown": unknown})
    for key_id in revoked:
        typer.echo(f"{key_id}: revoked", err=json)
    for key_id in unknown:
        complain(f"{one_line(key_id)}: is no key of group {group}; dispatch keys list has those that are")
    if unknown:
        raise typer.Exit(REFUSED)


def _stored(fabric: FabricGroup, grant: Grant, actor: str) -> NewKey:
    """Make a key and store it.

    Raises:
        InvalidRequest: the group has as many keys as it may have.
    """
    if isinstance(fabric.connection, RemoteConnection):  # the gateway makes it
        return fabric.connection.make_key(fabric.name, grant, actor)
    made = new_key(grant)
    answer = fabric.run(key_change("create", made.key_id, made.record, actor=actor))
    if answer != "CREATED":  # an id in use is one of 2^64
        raise InvalidRequest(
            f"group {fabric.name} has {LIMITS['keys_max']} keys, which is its bound: revoke one first"
            if answer == "FULL"
            else f"the key's id is in use ({answer}): try again"
        )
    return made


def _unknown_pools(fabric: FabricGroup, grant: Grant) -> list[str]:
    named = [*(grant.pools or ()), *([grant.pool] if grant.pool else [])]
    if not named:
        return []
    try:
        known = {row["pool_id"] for row in fabric.rows("pools")}
    except GroupUnknown:
        known = set()
    return [pool for pool in dict.fromkeys(named) if pool not in known]


def _rows(fabric: FabricGroup) -> list[dict[str, Any]]:
    rows = []
    for key_id, encoded in fabric.run(key_read()).items():
        try:
            rows.append(read_record(encoded).shown(key_id))
        except msgspec.MsgspecError:
            complain(f"{key_id}: its record cannot be read; no gateway takes this key")
    return sorted(rows, key=lambda row: (row["created_ms"], row["key_id"]))


def _fixed(row: dict[str, Any]) -> str:
    """What the key fixes, as words."""
    names = (("pool", "pool"), ("fairness_key", "fairness key"), ("cost", "cost"))
    return ", ".join(f"{word} {row[name]}" for name, word in names if row[name] is not None)


def _told(row: dict[str, Any]) -> str:
    """What the key allows, in a sentence."""
    roles = ", ".join(row["roles"])
    pools = "all pools" if row["pools"] is None else f"pools {', '.join(row['pools'])}"
    fixed = _fixed(row)
    return f"{roles}; {pools}" + (f"; {fixed} for every call" if fixed else "")

"""`dispatch config`: the config of a fabric group, read and changed as one document."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    REFUSED,
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
    trouble_as_exit_code,
    who,
    write_json,
)
from dispatch.cli.tables import print_table
from dispatch.config import edited, encode_document, load_document
from dispatch.errors import BadArgument, ConfigurationError, GroupUnknown
from dispatch.fabric.functions import fabric_snapshot, group_check, group_configure
from dispatch.fabric.records import Configured
from dispatch.fabric.schema import LIMITS

_HELP = """Show and change the config of a fabric group: one document, applied as a whole.

\b
Example:
  dispatch config show > group.yaml
  dispatch config diff group.yaml
  dispatch config apply group.yaml --reason "more room for chat"
"""

app = typer.Typer(no_args_is_help=True, help=_HELP)

File = Annotated[Path, typer.Argument(help="Config document: .yaml, .toml or .json.", show_default=False)]
Expected = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Apply only if this generation is in force; 0 = never configured.",
        show_default="the one in force when the command begins",
    ),
]
_NUMBERED = re.compile(r"(?P<list>pools|endpoints)\[(?P<number>\d+)\]")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")]


@dataclass(frozen=True, slots=True)
class _Intent:
    """What is to be done with a document."""

    document: dict[str, Any]
    expected: int | None = None
    actor: str = ""
    reason: str = ""
    dry_run: bool = False


@app.command("show")
def show_command(
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    generation: Annotated[int | None, typer.Option(help="An earlier one.", show_default="the one in force")] = None,
    json: Json = False,
) -> None:
    r"""Print the config in force, every default filled in. What is printed can be edited and applied.

    \b
    Example:
      dispatch config show > group.yaml
    """
    with fabric_group(url, group) as fabric:
        found = fabric.run(fabric_snapshot("config")) if generation is None else _generation(fabric, generation)
    if json:
        write_json(found)
        return
    typer.echo(f"# group {group}, {_told(found)}")
    typer.echo(yaml.safe_dump(found["document"], sort_keys=False, allow_unicode=True, width=10_000), nl=False)


@app.command("apply")
def apply_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    file: File,
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    expected: Expected = None,
    dry_run: DryRun = False,
    reason: Reason = "",
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Bring a whole config into force, all or nothing, and print what it changes.

    What the file leaves out has its default. A pool that is left out is removed, which needs it to be empty.

    Exit code: 0 in force (or was already), 1 refused and nothing was changed, 2 no answer, or the file cannot be read.

    \b
    Example:
      dispatch config apply group.yaml --reason "more room for chat"
    """
    with trouble_as_exit_code():
        intent = _Intent(load_document(file), expected, who(actor), reason, dry_run)
    with fabric_group(url, group) as fabric:
        _carry_out(fabric, intent, _in_force(fabric), json)


@app.command("set")
def set_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    assignments: Annotated[
        list[str], typer.Argument(metavar="PATH=VALUE...", help="FIELD, pools.ID.FIELD or endpoints.ID.FIELD.")
    ],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    expected: Expected = None,
    dry_run: DryRun = False,
    reason: Reason = "",
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Change single fields of the config in force. A pool or endpoint that is not there is added; =null removes one.

    Exit code: 0 in force (or was already), 1 refused and nothing was changed, 2 no answer, or no PATH=VALUE.

    \b
    Example:
      dispatch config set pools.interactive.quantum=6 total_concurrent_dispatch=12
      dispatch config set pools.old=null --reason "drained on Monday"
    """
    with fabric_group(url, group) as fabric:
        in_force = fabric.run(fabric_snapshot("config"))
        intent = _Intent(edited(in_force["document"], assignments), expected, who(actor), reason, dry_run)
        _carry_out(fabric, intent, in_force, json)


@app.command("diff")
def diff_command(file: File, url: Url = DEFAULT_URL, group: Group = DEFAULT_GROUP, json: Json = False) -> None:
    r"""Say what applying a file would change, field by field. Changes nothing.

    Exit code: 0 no difference, 1 it differs, or would be refused; 2 no answer, or the file cannot be read.

    \b
    Example:
      dispatch config diff group.yaml
    """
    with trouble_as_exit_code():
        intent = _Intent(load_document(file), dry_run=True)
    with fabric_group(url, group) as fabric:
        answer = _carry_out(fabric, intent, _in_force(fabric), json)
    if answer.status == "VALID":
        raise typer.Exit(REFUSED)


@app.command("history")
def history_command(
    generation: Annotated[int | None, typer.Argument(help="Show what this one changed.", show_default=False)] = None,
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    limit: Annotated[int, typer.Option(min=1, max=LIMITS["generations_kept"], help="How many, the newest first.")] = 20,
    json: Json = False,
) -> None:
    r"""List the generations of the config: when, by whom, why; or print what one of them changed.

    \b
    Example:
      dispatch config history
      dispatch config history 7
    """
    with fabric_group(url, group) as fabric:
        if generation is not None:
            _show_generation(_generation(fabric, generation), json)
            return
        rows: list[dict[str, Any]] = []
        cursor = ""
        while len(rows) < limit:
            page = fabric.run(fabric_snapshot("generations", cursor=cursor, limit=limit - len(rows)))
            rows += page["rows"]
            cursor = page["cursor"]
            if not cursor:
                break
    if json:
        write_json({"group": group, "generations": rows})
        return
    print_table(
        ("generation", "at", "actor", "changes", "reason"),
        [
            (
                str(row["generation"]), moment(row["changed_ms"]), one_line(row["actor"]), str(row["changed"]),
                one_line(row["reason"]),
            )
            for row in rows
        ],
    )  # fmt: skip


@app.command("rollback")
def rollback_command(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    generation: Annotated[int, typer.Argument(help="The generation whose document is to be in force.")],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    expected: Expected = None,
    dry_run: DryRun = False,
    reason: Annotated[str, typer.Option(help="Why, for the record.", show_default="rollback to GENERATION")] = "",
    actor: Actor = "",
    json: Json = False,
) -> None:
    r"""Apply the document of an earlier generation once more, as a new one.

    Exit code: 0 in force (or was already), 1 refused and nothing was changed, 2 no answer, or it is not kept any more.

    \b
    Example:
      dispatch config rollback 7
    """
    with fabric_group(url, group) as fabric:
        document = _generation(fabric, generation)["document"]
        intent = _Intent(document, expected, who(actor), reason or f"rollback to {generation}", dry_run)
        _carry_out(fabric, intent, _in_force(fabric), json)


def _in_force(fabric: FabricGroup) -> dict[str, Any]:
    """Return the config in force; that of a group that was never configured is generation 0."""
    try:
        found: dict[str, Any] = fabric.run(fabric_snapshot("config"))
    except GroupUnknown:
        return {"generation": 0}
    return found


def _generation(fabric: FabricGroup, number: int) -> dict[str, Any]:
    try:
        found: dict[str, Any] = fabric.run(fabric_snapshot("generation", subject=str(number)))
    except BadArgument as error:
        raise ConfigurationError(
            f"generation {number} of group {fabric.name} is not kept; dispatch config history lists those that are"
        ) from error
    return found


def _carry_out(fabric: FabricGroup, intent: _Intent, in_force: dict[str, Any], json: bool) -> Configured:
    """Apply or check a document and say what came of it.

    Raises:
        typer.Exit: it was refused.
    """
    document = encode_document(intent.document)
    expected = in_force["generation"] if intent.expected is None else intent.expected
    if intent.dry_run:
        call = group_check(document, expected_generation=expected)
    else:
        call = group_configure(
            document, expected_generation=expected, actor=intent.actor, reason=intent.reason, nonce=uuid.uuid4().hex
        )
    answer: Configured = fabric.run(call)
    if json:
        write_json({"group": fabric.name, "expected": expected, **msgspec.to_builtins(answer)})
    else:
        _say_changes([(each.field, each.before, each.after) for each in answer.changes], answer.changed)
    stays = f"generation {answer.generation} stays in force"
    match answer.status:
        case "APPLIED":
            _say(f"generation {answer.generation} is in force", json)
        case "VALID":
            _say(f"nothing was changed: {stays}", json)
        case "UNCHANGED":
            _say(f"no difference: {stays}", json)
        case _:
            _say_refusal(answer, intent.document, in_force, expected)
            raise typer.Exit(REFUSED)
    return answer


def _say_refusal(answer: Configured, document: dict[str, Any], in_force: dict[str, Any], expected: int) -> None:
    if answer.status == "CONFLICT":
        by = f" by {answer.actor} at {moment(answer.changed_ms)}" if answer.generation else ""
        complain(
            f"nothing was changed: generation {answer.generation}{by} is in force, not {expected}; look and repeat"
        )
    else:
        for problem in answer.problems:
            complain(f"{_named(problem.field, document)} is {problem.value}: {problem.message}")
        complain(f"nothing was changed; in force stays {_told(in_force)}")


def _named(field: str, document: dict[str, Any]) -> str:
    """Return `pools[3].quantum` with the pool's name in place of its number, if it has one."""
    found = _NUMBERED.match(field)
    if found is None:
        return field
    try:
        name = document[found["list"]][int(found["number"])][f"{found['list'][:-1]}_id"]
    except (LookupError, TypeError):
        return field
    return f"{found['list']}[{name}]{field[found.end() :]}"


def _show_generation(found: dict[str, Any], json: bool) -> None:
    if json:
        write_json(found)
        return
    typer.echo(_told(found))
    _say_changes(found["changes"], found["changed"])


def _told(config: dict[str, Any]) -> str:
    """Return which config this is, since when, by whom and why."""
    if not config["generation"]:
        return "no config"
    reason = f": {one_line(config['reason'])}" if config["reason"] else ""
    by = one_line(config["actor"])
    return f"generation {config['generation']} by {by} at {moment(config['changed_ms'])}{reason}"


def _say_changes(changes: list[tuple[str, str, str]], changed: int) -> None:
    for field, before, after in changes:
        typer.echo(f"{field}: {before} -> {after}")
    if changed > len(changes):
        typer.echo(f"... and {changed - len(changes)} more")


def _say(text: str, json: bool) -> None:
    """Write a line for people: to stderr when stdout is for a parser."""
    typer.echo(text, err=json)

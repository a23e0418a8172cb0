"""`dispatch explain`: where one request is, why it waits, or how it ended, in sentences."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from dispatch.cli.history.options import HistoryUrl, PasswordEnv
from dispatch.cli.operating import (
    DEFAULT_GROUP,
    DEFAULT_URL,
    REFUSED,
    FabricGroup,
    Group,
    Json,
    Url,
    complain,
    fabric_group,
    one_line,
    write_json,
)
from dispatch.cli.past import Past
from dispatch.cli.sentences import Live, ended_told, live_told, story_told
from dispatch.errors import DispatchError
from dispatch.fabric.functions import pool_estimate
from dispatch.fabric.view import Wanted, read_view_blocking
from dispatch.studio.findings import Situation
from dispatch.studio.verdict import findings

app = typer.Typer(add_completion=False)

_PAGES_MAX = 50  # of the endings: the newest 10,000
_POSITION_MAX = 2_000
_WANTED = Wanted(running=1, endings=0, events=0)


@dataclass(slots=True)
class Known:
    """What is known of a request: as it stands now, the record of its ending, its row in the history."""

    live: dict[str, Any] | None = None
    ending: dict[str, Any] | None = None
    story: dict[str, Any] | None = None


@app.command()
def explain(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    request_id: Annotated[str, typer.Argument(metavar="ID", help="A request.", show_default=False)],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    history: HistoryUrl = "",
    password_env: PasswordEnv = "",
    json: Json = False,
) -> None:
    r"""Say where a request is, why it waits, or how it ended.

    Asked are live state, then the stream of endings (the newest 10,000), then the history if one is named.

    Exit code: 0 it is known, 1 there is no trace of it, 2 no answer.

    \b
    Example:
      dispatch explain 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88
    """
    past, known = Past(history, password_env, group), Known()
    with fabric_group(url, group) as fabric:
        known.live = next(iter(fabric.rows("request", request_id)), None)
        going_on = known.live is not None and not known.live.get("ending")
        if not going_on:
            known.ending = _ending(fabric, request_id)
        lines = _lines(fabric, past, known, request_id)
    found = bool(known.live or known.ending or known.story)
    if json:
        write_json({"group": group, "request_id": request_id, "found": found, "sentences": lines, **asdict(known)})
    else:
        for line in lines:
            (typer.echo if found else complain)(line)
    if not found:
        raise typer.Exit(REFUSED)


def _lines(fabric: FabricGroup, past: Past, known: Known, request_id: str) -> list[str]:
    if known.live and not known.live.get("ending"):
        return live_told(_live(fabric, known.live))
    if known.ending:
        return ended_told(known.ending, known.live)
    story = past.story(request_id)
    if story is not None:
        known.story = asdict(story)
        return story_told(known.story)
    if known.live:
        return ended_told(known.live, known.live)
    return [_no_trace(past, request_id)]


def _no_trace(past: Past, request_id: str) -> str:
    name = one_line(request_id)
    if past.problem:
        return f"No trace of {name} in Valkey, and the history does not answer: {past.problem}"
    if not past.named:
        return (
            f"No trace of {name} in Valkey. Either it was never admitted, or it ended too long ago; "
            "name a history (--history) to ask that, too."
        )
    return (
        f"No trace of {name} in Valkey or in history. Either it is older than the history, or it was never admitted, "
        "or history lost it (dispatch doctor)."
    )


def _live(fabric: FabricGroup, row: dict[str, Any]) -> Live:
    """Gather what the sentences about a request that has not ended rest on."""
    view = read_view_blocking(fabric.connection.run_many, fabric.name, _WANTED)
    waits = row["state"] == "queued"
    return Live(
        row=row,
        view=view,
        found=findings(Situation(view=view, compare_clocks=False)),
        before=_before(fabric, row) if waits else None,
        estimate=_estimate(fabric, row["pool_id"]) if waits else None,
    )


def _before(fabric: FabricGroup, row: dict[str, Any]) -> int | None:
    """Return how many requests of its pool stand before it, None when it is too far behind to say."""
    for number, other in enumerate(fabric.rows("waiting", row["pool_id"])):
        if other["request_id"] == row["request_id"]:
            return number
        if number >= _POSITION_MAX:
            return None
    return None


def _estimate(fabric: FabricGroup, pool: str) -> int | None:
    try:
        found: int | None = fabric.run(pool_estimate(pool)).wait_ms
    except DispatchError:  # a key may see the request and not this
        return None
    return found


def _ending(fabric: FabricGroup, request_id: str) -> dict[str, Any] | None:
    pages = fabric.pages("endings")
    for _ in range(_PAGES_MAX):
        page = next(pages, None)
        if page is None:
            return None
        for row in page["rows"]:
            if row.get("request_id") == request_id:
                found: dict[str, Any] = row
                return found
    return None

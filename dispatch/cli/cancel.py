"""`dispatch cancel`: stop requests, wherever they are, and say what became of each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    Reason,
    Url,
    complain,
    fabric_group,
    one_line,
    who,
    write_json,
)
from dispatch.fabric.functions import fabric_snapshot, request_cancel
from dispatch.fabric.records import Cancellation

_BATCH = 100
_LOOK_AGAIN_S = 0.1

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class _Told:
    """What became of one request: `result` is cancelled, ended (otherwise), running (still) or unknown.

    `begun`: it ran when it was cancelled. `ending` "" = not known (any more); `gateway_id` "" = none ran it.
    """

    request_id: str
    result: str
    begun: bool = False
    ending: str = ""
    gateway_id: str = ""

    @property
    def sentence(self) -> str:
        name = one_line(self.request_id)
        match self.result:
            case "cancelled" if self.begun:
                return f"{name}: cancelled; gateway {self.gateway_id} has stopped it"
            case "cancelled":
                return f"{name}: cancelled; it was not running"
            case "ended" if self.begun:
                return f"{name}: ended {self.ending or 'in a way that is not known'} before it could be stopped"
            case "ended":
                return f"{name}: had ended before: {self.ending}"
            case "running":
                return f"{name}: still runs on gateway {self.gateway_id}, which was told to stop it"
        return f"{name}: is not there; it was never submitted to this group, or ended a while ago"


@app.command()
def cancel(  # noqa: PLR0913, PLR0917 - a command's options are its parameters
    request_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Requests to cancel.")],
    url: Url = DEFAULT_URL,
    group: Group = DEFAULT_GROUP,
    reason: Reason = "",
    actor: Actor = "",
    wait: Annotated[
        float, typer.Option(min=0, help="How many seconds to wait for running requests to end; 0 = not at all.")
    ] = 5.0,
    json: Json = False,
) -> None:
    r"""Cancel requests. One that waits ends at once; the gateway of one that runs is told to break it off.

    Exit code: 0 each of them is cancelled; 1 one is not there, had ended otherwise, or still runs; 2 no answer.

    \b
    Example:
      dispatch cancel 4f1c0d6c2b8e4d5c9a7f3e2d1c0b9a88 --reason "wrong prompt"
      dispatch cancel ID1 ID2 ID3 --wait 30
    """
    with fabric_group(url, group) as fabric:
        told = _cancel(fabric, list(dict.fromkeys(request_ids)), (who(actor), reason), wait)
    if json:
        write_json({"group": group, "requests": [msgspec.to_builtins(each) for each in told]})
    for each in told:
        if each.result in {"running", "unknown"}:
            complain(each.sentence)
        elif not json:
            typer.echo(each.sentence)
    if any(each.result != "cancelled" for each in told):
        raise typer.Exit(REFUSED)


def _cancel(fabric: FabricGroup, ids: list[str], why: tuple[str, str], wait_s: float) -> list[_Told]:
    """Cancel all, wait for those that run, and return what became of each, in the order given."""
    told: dict[str, _Told] = {}
    for part in _batches(ids):
        calls = [request_cancel(request_id, actor=why[0], reason=why[1]) for request_id in part]
        for request_id, answer in zip(part, fabric.run_many(calls), strict=True):
            told[request_id] = _first_told(request_id, answer)
    ends_at = time.monotonic() + wait_s
    while time.monotonic() < ends_at and (running := [each for each in told.values() if each.result == "running"]):
        time.sleep(_LOOK_AGAIN_S)
        told |= {each.request_id: each for each in _look(fabric, running)}
    return list(told.values())


def _first_told(request_id: str, answer: Cancellation) -> _Told:
    match answer.status:
        case "CANCELLED":
            return _Told(request_id, "cancelled", ending="cancelled")
        case "CANCELLING":
            return _Told(request_id, "running", begun=True, gateway_id=answer.ending)
        case "ENDED":
            result = "cancelled" if answer.ending == "cancelled" else "ended"
            return _Told(request_id, result, ending=answer.ending)
    return _Told(request_id, "unknown")


def _look(fabric: FabricGroup, running: list[_Told]) -> Iterator[_Told]:
    """Look once after requests that ran; yields what is known of each by now."""
    for part in _batches(running):
        pages = fabric.run_many([fabric_snapshot("request", subject=each.request_id) for each in part])
        for each, page in zip(part, pages, strict=True):
            yield _seen(each, page["rows"])


def _seen(before: _Told, rows: list[dict[str, Any]]) -> _Told:
    state, ending = (rows[0]["state"], rows[0].get("ending", "")) if rows else ("ended", "")
    if state == "leased":
        return _Told(before.request_id, "running", begun=True, gateway_id=rows[0]["gateway_id"])
    if state != "ended":  # given back by a gateway that stopped: it ends when somebody comes by
        return before
    result = "cancelled" if ending == "cancelled" else "ended"
    return _Told(before.request_id, result, begun=True, ending=ending, gateway_id=before.gateway_id)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = list(items)
    for at in range(0, len(rest), _BATCH):
        yield rest[at : at + _BATCH]

"""What changes, as server-sent events.

`snapshot` says that the group's numbers have changed, with the new totals for keys of all pools: look again at what is
shown. It comes when the group's channel tells of a change (lua/functions/snapshot_publish.lua), within about 250 ms.
`change` is an entry of the group's stream of events, with its id: config, pauses, breakers, keys, repairs.
`gap` says that changes may be missing before what follows (the stream is bounded, and a server can be replaced).
`fabric` says that Valkey does not answer, or does again. A client that comes back with `Last-Event-ID` goes on after
that event.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from dispatch.contract.answers import Meaning, Problem
from dispatch.errors import AccessRefused, DispatchError
from dispatch.fabric.api_keys import Role
from dispatch.ingress.authority import Principal
from dispatch.ingress.control.access import Control, Here, Observer, allows_all_pools, principal_of
from dispatch.ingress.control.answering import ControlRoute, Refusal
from dispatch.ingress.control.documenting import errors
from dispatch.ingress.control.paging import EVENT_ID, only_allowed
from dispatch.ingress.control.watching import WATCHERS_MAX, EventId, Look, event_id

router = APIRouter(tags=["events"], route_class=ControlRoute)

_RETRY_MS = 2_000
_FULL = Meaning(HTTPStatus.SERVICE_UNAVAILABLE, "rejected-too_many_watchers", retry=True)

LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", pattern=EVENT_ID, description="go on after this event; none = from now on"),
]


def _room(control: Here, _principal: Observer) -> None:
    """Refuse more watchers than one process serves."""
    if control.watch.watchers >= WATCHERS_MAX:
        message = f"this gateway serves {WATCHERS_MAX} event streams, which is its bound; try another or again"
        raise Refusal(Problem(meaning=_FULL, message=message, code="too_many_watchers"))


@router.get("/events", response_class=EventSourceResponse, responses=errors(), dependencies=[Depends(_room)])
async def stream_events(
    request: Request, principal: Observer, control: Here, last_event_id: LastEventId = None
) -> AsyncIterator[ServerSentEvent]:
    """Stream what changes, as it does: `snapshot`, `change`, `gap` and `fabric` events, and comments to stay alive."""
    watcher = _Watcher(control, principal, None if last_event_id is None else event_id(last_event_id))
    async with control.watch.watching():
        yield ServerSentEvent(retry=_RETRY_MS, comment="watching")
        while watcher.goes_on:
            async for event in watcher.news():
                yield event
            await control.watch.wait(watcher.seen)
            await watcher.check(request)


class _Watcher:
    """One who watches, and what was told."""

    def __init__(self, control: Control, principal: Principal, last: EventId | None) -> None:
        self._control = control
        self._principal = principal
        self._last = last
        self._totals: dict[str, Any] | None = None
        self._problem = ""
        self._let_in = True
        self.seen: Look | None = None
        self.goes_on = True

    async def check(self, request: Request) -> None:
        """End the stream when the key is revoked or the gateway stops. While keys cannot be checked nothing is told."""
        self._let_in = False
        try:
            principal = await principal_of(request)
            principal.require(Role.OBSERVE)
            self._let_in = True
        except AccessRefused:
            self.goes_on = False
        except DispatchError:
            pass
        if self._control.state.gateway.status().draining:
            self.goes_on = False

    async def news(self) -> AsyncIterator[ServerSentEvent]:
        """Yield what is new since the last time."""
        look = self.seen = await self._control.watch.look()
        if look.problem != self._problem:
            self._problem = look.problem
            yield _event("fabric", {"answers": not look.problem, "problem": look.problem or None})
        if look.problem or not self._let_in:
            return
        if look.totals != self._totals:
            self._totals = look.totals
            shown = look.totals if allows_all_pools(self._principal) else {}
            yield _event("snapshot", {"server_ms": look.server_ms, **shown})
        try:
            async for event in self._changes(look):
                yield event
        except DispatchError:
            return  # the next look says what is wrong

    async def _changes(self, look: Look) -> AsyncIterator[ServerSentEvent]:
        if self._last is None:
            self._last = look.newest
        if self._last > look.newest:  # the server is another one, or has lost data
            self._last = look.newest
            yield _event("gap", {"server_ms": look.server_ms})
        rows, complete = await self._control.watch.since(self._last, look)
        if rows and not complete:
            yield _event("gap", {"server_ms": look.server_ms})
        for row in only_allowed(self._principal, "events", {"rows": rows})["rows"]:
            yield ServerSentEvent(event="change", id=row["event_id"], data=row)
        if rows:
            self._last = event_id(rows[-1]["event_id"])


def _event(name: str, facts: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(event=name, data=facts)

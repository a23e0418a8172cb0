"""Reading a view: pages, bounds, and what could not be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dispatch.errors import BadArgument, FabricUnavailable, GroupUnknown
from dispatch.fabric.calls import FunctionCall
from dispatch.fabric.view import Wanted, read_view_blocking

GROUP = {"server_ms": 1_000, "section": "group", "pending": 3, "in_flight": 1, "lease_ms": 30_000, "unheard_of": [1]}


class Server:
    """Answers sections from lists of rows, a page at a time; what is no list is the answer itself."""

    def __init__(self, **sections: Any) -> None:
        self.sections = {"group": GROUP} | sections
        self.rounds: list[list[tuple[Any, ...]]] = []

    def run_many(self, _group: str, calls: Sequence[FunctionCall[Any]]) -> list[Any]:
        self.rounds.append([tuple(call.args) for call in calls])
        return [self._page(*call.args) for call in calls]

    def _page(self, *args: Any) -> Any:
        section, cursor, limit, _subject = args
        found = self.sections.get(section, [])
        if not isinstance(found, list):
            return found
        at = int(cursor or 0)
        following = str(at + limit) if at + limit < len(found) else ""
        return {"server_ms": 1_000, "rows": found[at : at + limit], "cursor": following, "truncated": bool(following)}


def pools(count: int) -> list[dict[str, Any]]:
    return [{"pool_id": f"p{number:04}", "pending": number} for number in range(count)]


def test_all_sections_come_in_one_round_trip() -> None:
    server = Server(
        pools=pools(3), events=[{"event_id": "1-0", "kind": "pause", "at_ms": 5, "pool": "p", "actor": "me"}]
    )
    view = read_view_blocking(server.run_many, "prod")
    assert len(server.rounds) == 1
    assert view.group is not None
    assert (view.group.pending, view.group.delayed) == (3, None)
    assert [row.pool_id for row in view.pools or ()] == ["p0000", "p0001", "p0002"]
    assert view.endpoints == ()
    assert [(event.kind, event.facts) for event in view.events or ()] == [("pause", {"pool": "p", "actor": "me"})]
    assert (view.truncated, view.unknown) == (frozenset(), {})


def test_long_sections_come_in_pages() -> None:
    server = Server(pools=pools(1_000))
    view = read_view_blocking(server.run_many, "prod")
    assert [row.pending for row in view.pools or ()] == list(range(1_000))
    assert [len(calls) for calls in server.rounds] == [7, 1, 1, 1, 1]


def test_bounds_hold_and_are_said() -> None:
    leases = [{"request_id": f"r{number}", "claimed_ms": 500 - number} for number in range(450)]
    server = Server(leases=leases, pools=pools(2))
    view = read_view_blocking(server.run_many, "prod", Wanted(running=250, pools=1, gateways=0))
    assert len(view.running or ()) == 250
    assert (view.running or ())[0].claimed_ms == 251
    assert view.truncated == {"running", "pools"}
    assert view.gateways is None


def test_a_row_that_comes_twice_counts_once() -> None:
    server = Server(pools=pools(199) + pools(3))
    view = read_view_blocking(server.run_many, "prod")
    assert len(view.pools or ()) == 199


def test_what_was_refused_is_unknown_with_its_reason() -> None:
    refused = Server(endpoints=BadArgument("the key may not"), group=BadArgument("no"), pools=pools(1))
    view = read_view_blocking(refused.run_many, "prod")
    assert view.endpoints is None
    assert view.group is None
    assert view.unknown == {"endpoints": "the key may not", "group": "no"}
    assert len(view.pools or ()) == 1


@pytest.mark.parametrize("make", [GroupUnknown, FabricUnavailable])
def test_nothing_at_all_is_an_error(make: Callable[[str], Exception]) -> None:
    sections = ("group", "pools", "endpoints", "gateways", "leases", "endings", "events")
    server = Server(**dict.fromkeys(sections, make("away")))
    with pytest.raises(type(make(""))):
        read_view_blocking(server.run_many, "prod")

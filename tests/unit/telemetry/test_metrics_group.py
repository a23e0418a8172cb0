"""The group's state as metrics: what is not known is missing, what is known to be none is 0."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.telemetry.metrics import catalogue as c
from dispatch.telemetry.metrics.catalogue import CATALOGUE, Family
from dispatch.telemetry.metrics.group import read_group
from dispatch.telemetry.metrics.reading import GroupReader, Look
from dispatch.telemetry.metrics.tallies import Buckets, Capped, Labels, Value

pytestmark = pytest.mark.anyio

POOL = {"pool_id": "p", "pending": 0, "enabled": True}
ENDPOINT = {"endpoint_id": "e", "in_flight": 0}
GATE = {
    "target": 3,
    "token_limit_ms": 150,
    "waiting": None,
    "token_ms": None,
    "launched_since": None,
    "age_ms": None,
    "stale": False,
}


def metrics_of(look: Look) -> dict[Family, dict[Labels, Value]]:
    return {family: dict(values) for family, values in read_group(look, 0.5)}


def look_at(server_ms: int = 10_000, **rows: list[dict[str, Any]]) -> dict[Family, dict[Labels, Value]]:
    return metrics_of(Look(0.0, server_ms, {}, rows))


def test_what_was_not_read_is_missing_and_said_to_be() -> None:
    found = metrics_of(Look(0.0))
    assert set(found) == {c.GROUP_UP}
    assert set(found[c.GROUP_UP].values()) == {0}
    found = metrics_of(Look(0.0, 1, None, {"pools": [POOL]}, frozenset({"pools"})))
    assert found[c.GROUP_UP] == {("group",): 0, ("pools",): 1, ("endpoints",): 0, ("gateways",): 0}
    assert found[c.GROUP_TRUNCATED] == {("pools",): 1}
    assert found[c.PENDING] == {("p",): 0}
    assert c.GROUP_PENDING not in found


def test_null_is_not_known_and_what_was_never_counted_is_zero() -> None:
    found = look_at(pools=[POOL | {"max_concurrent": None, "endings": {"failed": 2}}])
    assert c.MAX_CONCURRENT not in found
    assert c.DEFICIT not in found
    assert found[c.ENDINGS]["p", "failed"] == 2
    assert found[c.ENDINGS]["p", "succeeded"] == 0
    assert sum(value for value in found[c.DROPS].values() if isinstance(value, int)) == 0


@pytest.mark.parametrize(
    ("row", "age"),
    [
        ({"pending": 0}, 0),
        ({"pending": 2, "head_submitted_ms": 7_500}, 2.5),
        ({"pending": 2, "head_submitted_ms": 10_500}, 0),
        ({"pending": 2}, None),
    ],
)
def test_the_age_of_what_is_next(row: dict[str, Any], age: float | None) -> None:
    assert look_at(pools=[POOL | row]).get(c.OLDEST_AGE, {}).get(("p",)) == age


def test_a_reason_blocks_only_what_waits() -> None:
    row = {"block_reason": "lane_capacity", "block_since_ms": 9_000}
    assert c.BLOCKED not in look_at(pools=[POOL | row])
    assert look_at(pools=[POOL | row | {"pending": 1}])[c.BLOCKED] == {("p", "lane_capacity"): 1}


@pytest.mark.parametrize(
    ("row", "state"),
    [({}, "enabled"), ({"paused": {"by": "x"}}, "paused"), ({"draining": {}, "paused": None}, "enabled"),
     ({"draining": True, "paused": True}, "draining"), ({"enabled": False, "paused": True}, "disabled")],
)  # fmt: skip
def test_a_pool_is_in_one_state(row: dict[str, Any], state: str) -> None:
    found = look_at(pools=[POOL | row])[c.POOL_STATE]
    assert {labels[1] for labels, value in found.items() if value} == {state}


@pytest.mark.parametrize(
    ("gate", "state"),
    [
        ({"waiting": 2, "launched_since": 0}, "open"),
        ({"waiting": 2, "launched_since": 1}, "closed"),
        ({"token_ms": 151}, "closed"),
        ({"token_ms": 150}, "open"),
        ({"waiting": 9, "stale": True}, "stale"),
    ],
)
def test_a_gate_is_in_one_state_and_unknown_samples_are_missing(gate: dict[str, Any], state: str) -> None:
    found = look_at(endpoints=[ENDPOINT | {"gate": GATE | gate}])
    assert {labels[1] for labels, value in found[c.GATE].items() if value} == {state}
    assert (c.GATE_VALUE in found) is ("waiting" in gate)
    assert c.GATE_AGE not in found


def test_an_endpoint_without_gate_and_breaker_has_no_states() -> None:
    found = look_at(endpoints=[ENDPOINT | {"hold_until_ms": 12_000}])
    assert c.GATE not in found
    assert c.BREAKER not in found
    assert found[c.HELD] == {("e",): 2}
    assert look_at(endpoints=[ENDPOINT])[c.HELD] == {("e",): 0}


def test_names_and_labels_are_in_the_one_form() -> None:
    for name, family in CATALOGUE.items():
        assert family.name == name
        assert name.startswith(("llm_dispatch.", "gen_ai."))
        assert family.says
        assert len(set(family.labels)) == len(family.labels)
        assert not {"request", "request_id", "producer", "producer_id"} & set(family.labels)
        assert not name.endswith(("_total", "_seconds", ".total"))


def test_a_value_on_a_bound_counts_below_it() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.add(value)
    assert buckets.counts == [2, 2, 1]
    assert buckets.total == 14


def test_what_clients_name_is_bounded() -> None:
    capped = Capped(2, longest=5)
    assert [capped(name) for name in ("a", "b", "c", "a", "d", "b")] == ["a", "b", "other", "a", "other", "b"]
    assert Capped(2, longest=5)("longer") == "other"
    assert capped.folded == 2


def test_what_cannot_be_printed_is_no_part_of_a_label() -> None:
    capped = Capped()
    odd = ["a\0b", "a\x1b[31mb", "a\ud800b", "a\rb"]
    assert [capped(name) for name in odd] == ["a\ufffdb", "a\ufffd[31mb", "a\ufffdb", "a\ufffdb"]
    assert capped("Qwen/Qwen3-8B é漢🙂") == "Qwen/Qwen3-8B é漢🙂"
    assert Capped(longest=5)("\0" * 6) == "other"


class Scripted:
    """A connection that answers looks as told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[list[tuple[str, str]]] = []

    async def run_many(self, _group: str, calls: Any) -> Any:
        self.asked.append([(call.args[0], call.args[1]) for call in calls])
        answer = self.answers.pop(0)
        if isinstance(answer, DispatchError):
            raise answer
        return answer


def page(section: str, cursor: str = "", *rows: dict[str, Any]) -> dict[str, Any]:
    return {"server_ms": 5, "section": section, "cursor": cursor, "rows": list(rows)}


def reader_of(*answers: Any) -> tuple[GroupReader, Scripted, list[float]]:
    connection, now = Scripted(*answers), [100.0]
    return GroupReader(connection, "g", clock=lambda: now[0]), connection, now  # type: ignore[arg-type]  # all it uses


async def test_a_look_is_kept_for_a_second_and_goes_through_all_pages() -> None:
    first = [
        {"server_ms": 7, "pending": 1},
        page("pools", "200", {"pool_id": "a"}),
        page("endpoints"),
        page("gateways"),
    ]
    reader, connection, now = reader_of(first, [page("pools", "", {"pool_id": "b"})], FabricUnavailable("away"))
    look = await reader.look()
    assert connection.asked[1] == [("pools", "200")]
    assert [row["pool_id"] for row in look.rows["pools"]] == ["a", "b"]
    assert look.truncated == frozenset()
    assert look.server_ms == 7
    now[0] = 100.9
    assert await reader.look() is look
    assert len(connection.asked) == 2
    now[0] = 101.1
    away = await reader.look()
    assert not any(away.has(section) for section in ("group", "pools", "endpoints", "gateways"))
    assert reader.newest(5.0)[0] is away


async def test_a_section_whose_rest_could_not_be_read_is_missing_as_a_whole() -> None:
    first = [{"server_ms": 7}, page("pools", "200", {"pool_id": "a"}), page("endpoints"), page("gateways")]
    reader, _, _ = reader_of(first, [FabricUnavailable("away")])
    look = await reader.look()
    assert not look.has("pools")
    assert look.has("endpoints")


async def test_when_the_server_goes_between_two_pages_nothing_half_is_told() -> None:
    first = [{"server_ms": 7}, page("pools", "200", {"pool_id": "a"}), page("endpoints"), page("gateways")]
    reader, _, _ = reader_of(first, FabricUnavailable("away"))
    assert not (await reader.look()).has("pools")


async def test_a_look_ends_though_there_are_pages_without_end() -> None:
    first = [{"server_ms": 7}, page("pools", "1"), page("endpoints"), page("gateways")]
    reader, connection, _ = reader_of(first, *[[page("pools", "1")]] * 20)
    assert (await reader.look()).truncated == {"pools"}
    assert len(connection.asked) == 10


async def test_a_look_that_is_too_old_is_none() -> None:
    first = [{"server_ms": 7}, page("pools"), page("endpoints"), page("gateways")]
    reader, _, now = reader_of(first)
    await reader.look()
    now[0] = 104.0
    assert reader.newest(5.0)[0].has("pools")
    now[0] = 106.0
    assert not reader.newest(5.0)[0].has("pools")

"""A config over HTTP: applied whole or not at all, and whoever is refused sees what is in force instead."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest

from tests.support.control import ControlStack, control_stack
from tests.support.groups import default_document
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

RUNNING, WAITING = 4, 6
ONE_TOO_MANY = [{"pool_id": f"p{number}"} for number in range(1001)]
TEN = [{"endpoint_id": f"e{number}", "url": "http://127.0.0.1:9/v1"} for number in range(10)]
BAD_LAST = [*TEN[:9], {"endpoint_id": "e9", "url": "ftp://nowhere"}]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "minima": ({"pools": [{"pool_id": "a", "min_concurrent": 9}]}, "pools"),
    "unknown-field": ({"colour": "red"}, "colour"),
    "too-many-pools": ({"pools": ONE_TOO_MANY}, "pools"),
    "bad-url": ({"endpoints": BAD_LAST}, "endpoints[9].url"),
}


@pytest.fixture
async def control(valkey: ValkeyProcess) -> AsyncIterator[ControlStack]:
    async with control_stack(valkey.url) as running:
        running.hand.submit("interactive", RUNNING + WAITING)
        assert len(running.hand.claim(RUNNING)) == RUNNING
        yield running


async def put(control: ControlStack, document: Any, expected: int, **more: Any) -> httpx.Response:
    headers = {"idempotency-key": more.pop("once")} if "once" in more else {}
    body = {"document": document, "expected_generation": expected, **more}
    return await control.http().put("/config", json=body, headers=headers)


async def untouched(control: ControlStack, generation: int = 1) -> None:
    """Make sure that work goes on as it did, and that the generation is in force for everybody who looks."""
    row = control.hand.pool("interactive")
    assert (row["pending"], row["in_flight"]) == (WAITING, RUNNING)
    in_force = (await control.get("/config", "observe")).json()
    assert (in_force["generation"], in_force["actor"]) == (generation, "test")
    assert (await control.get("/snapshot")).json()["group"]["generation"] == generation
    assert control.hand.section("config")["generation"] == generation


@pytest.mark.parametrize("name", REFUSED)
async def test_a_document_with_something_wrong_in_it_changes_nothing(control: ControlStack, name: str) -> None:
    changes, field = REFUSED[name]
    for answer in (
        await put(control, default_document() | changes, 1),
        await control.http().post("/config/check", json={"document": default_document() | changes}),
    ):
        told = answer.json()
        assert (answer.status_code, told["error"]["code"]) == (422, "invalid_config")
        assert field in told["error"]["param"]
        assert field in told["error"]["message"]
        assert (told["generation"], told["actor"]) == (1, "test")
        assert told["changed_ms"] > 0
        assert any(field in problem["field"] for problem in told["problems"])
    await untouched(control)


@pytest.mark.parametrize(
    "body", [b'{"document": {', b'{"document": {"policy": "drr", "policy": "fifo"}}', b"policy: drr"]
)
async def test_a_document_that_cannot_be_read_changes_nothing(control: ControlStack, body: bytes) -> None:
    answer = await control.http().put("/config", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in {"invalid_json", "duplicate_member"}
    await untouched(control)


async def test_who_did_not_know_the_generation_is_told_which_is_in_force(control: ControlStack) -> None:
    for answer in (
        await put(control, default_document(), 7),
        await control.http().post("/config/check", json={"document": default_document(), "expected_generation": 7}),
        await control.http().post("/config/rollback", json={"generation": 1, "expected_generation": 7}),
    ):
        told = answer.json()
        assert (answer.status_code, told["error"]["code"], told["error"]["param"]) == (
            409, "generation_conflict", "expected_generation",
        )  # fmt: skip
        assert (told["generation"], told["actor"]) == (1, "test")
    missing = await control.http().put("/config", json={"document": default_document()})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "expected_generation")
    await untouched(control)


async def test_of_two_who_write_at_once_one_wins(control: ControlStack) -> None:
    answers: list[httpx.Response] = []

    async def write(total: int) -> None:
        document = default_document() | {"total_concurrent_dispatch": total}
        answers.append(await put(control, document, 1, actor=f"writer {total}"))

    async with anyio.create_task_group() as tasks:
        for total in range(20, 26):
            tasks.start_soon(write, total)
    assert sorted(answer.status_code for answer in answers) == [200, *[409] * 5]
    [won] = [answer.json() for answer in answers if answer.status_code == 200]
    assert {answer.json()["actor"] for answer in answers} == {won["actor"]}
    in_force = (await control.get("/config")).json()
    assert in_force["document"]["total_concurrent_dispatch"] == int(won["changes"][0]["after"])
    events = (await control.get("/snapshot", section="events")).json()["events"]["rows"]
    assert [(row["generation"], row["changed"]) for row in events if row["kind"] == "config"] == [
        ("2", "1"), ("1", events[-1]["changed"]),
    ]  # fmt: skip


async def test_a_document_is_compared_applied_listed_and_rolled_back(control: ControlStack) -> None:
    document = default_document() | {"total_concurrent_dispatch": 30}
    change = {"field": "total_concurrent_dispatch", "before": "8", "after": "30"}
    checked = (await control.http().post("/config/check", json={"document": document})).json()
    assert checked == {
        "status": "valid", "generation": 1, "actor": None, "changed_ms": None, "changed": 1, "changes": [change],
    }  # fmt: skip
    applied = (await put(control, document, 1, actor="anna", reason="more room")).json()
    actor = f"anna with key admin ({control.key_ids['admin']})"
    assert applied | {"changed_ms": 0} == {
        "status": "applied", "generation": 2, "actor": actor, "changed_ms": 0, "changed": 1, "changes": [change],
    }  # fmt: skip
    same = (await put(control, document, 2)).json()
    assert (same["status"], same["generation"], same["actor"], same["changed"]) == ("unchanged", 2, actor, 0)
    rows = await control.rows("/config/generations", limit=1)
    assert [(row["generation"], row["actor"], row["reason"]) for row in rows] == [
        (2, actor, "more room"), (1, "test", ""),
    ]  # fmt: skip
    second = (await control.get("/config/generations/2")).json()
    assert second["changes"] == [change]
    assert second["document"] == (await control.get("/config")).json()["document"]
    back = (await control.http().post("/config/rollback", json={"generation": 1, "expected_generation": 2})).json()
    assert (back["status"], back["generation"]) == ("applied", 3)
    in_force = (await control.get("/config")).json()
    assert (in_force["document"]["total_concurrent_dispatch"], in_force["reason"]) == (8, "rollback to 1")


async def test_a_repeat_with_its_key_is_the_same_change(control: ControlStack) -> None:
    document = default_document() | {"total_concurrent_dispatch": 30}
    first = (await put(control, document, 1, once="k1")).json()
    again = (await put(control, document, 1, once="k1")).json()
    assert (again["status"], again["generation"], again["changed_ms"]) == ("applied", 2, first["changed_ms"])
    assert (await put(control, document, 1, once="k2")).status_code == 409


async def test_what_is_read_can_be_applied_as_it_is(control: ControlStack) -> None:
    read = json.loads((await control.get("/config")).content)
    assert (await put(control, read["document"], read["generation"])).json()["status"] == "unchanged"

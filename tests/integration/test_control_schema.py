"""The control API is what its OpenAPI document says, whatever is sent; and it tells what the group's library tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio.from_thread
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from dispatch.fabric.records import Outcome
from dispatch.ingress import IngressState
from dispatch.ingress.body import Held
from dispatch.ingress.control import BASE, create_control
from dispatch.telemetry.history.store import HistoryStore
from tests.support.control import ControlStack, control_stack
from tests.support.fake_fabric import FakeFabric
from tests.support.front import FakeClient, FakeGateway
from tests.support.history import PASSWORD, PASSWORD_ENV, read_endings, served_history, write
from tests.support.valkey import ValkeyProcess

EXAMPLES = 15
ENDLESS = "/events"
POOLS = [
    {"pool_id": "interactive"},
    {"pool_id": "backfill", "delivery": "at_least_once", "max_attempts": 1},
    {"pool_id": "default", "max_concurrent": 2, "max_burst_per_visit": 3},
]
ENDPOINTS = [
    {"endpoint_id": "default", "url": "http://127.0.0.1:9/v1", "max_concurrent": 4},
    {"endpoint_id": "gated", "url": "http://127.0.0.1:9/v1", "gate": "vllm"},
]
KNOWN = {"pool": "backfill", "action": "pause", "request_id": "dead-0", "generation": 1, "key_id": "known"}
CHECKED = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


def document() -> dict[str, Any]:
    state = IngressState(client=FakeClient(), gateway=FakeGateway(), connection=FakeFabric())
    return create_control(state, Held(1)).openapi()


SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = {
    operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations() if operation.ok().path != ENDLESS
}


@pytest.fixture(scope="module")
def control(valkey: ValkeyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlStack]:
    """A gateway in an event loop of its own, whose group and history have something of everything."""
    with ExitStack() as exits:
        exits.enter_context(pytest.MonkeyPatch.context()).setenv(PASSWORD_ENV, PASSWORD)
        served = exits.enter_context(served_history(tmp_path_factory.mktemp("served") / "history"))
        store = exits.enter_context(HistoryStore(served.url, password_env=PASSWORD_ENV))
        portal = exits.enter_context(anyio.from_thread.start_blocking_portal())
        stack = control_stack(valkey.url, pools=POOLS, endpoints=ENDPOINTS, history=store)
        running = exits.enter_context(portal.wrap_async_context_manager(stack))
        for number in range(40):
            running.hand.submit("backfill", request_id=f"dead-{number}")
            running.hand.settle(running.hand.claim(1), outcome=Outcome.LOST)
        running.hand.submit("default", 5, fairness_key="anna")
        running.hand.beat(running.hand.claim(1, gateway="g-1"), gateway="g-1")
        running.hand.settle(running.hand.claim(1))
        write(store, running.group, *read_endings(valkey.url, running.group))
        yield running


def read(control: ControlStack, path: str, **params: Any) -> Any:
    headers = {"authorization": f"Bearer {control.tokens['admin']}"}
    answer = httpx.get(f"{control.url}{BASE}{path}", params=params, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def steady(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without what changes by itself."""
    return {name: value for name, value in row.items() if name not in {"beat_ms", "gate"}}


@pytest.mark.parametrize("section", ["pools", "endpoints", "gateways", "leases", "dead", "endings", "events"])
def test_nothing_that_the_library_tells_is_left_out(control: ControlStack, section: str) -> None:
    told = read(control, "/snapshot", section=section, limit=200)[section]["rows"]
    real = control.hand.section(section, limit=200)["rows"]
    assert real
    assert [steady(row) for row in told] == [steady(row) for row in real]
    if section == "endpoints":
        assert [set(row.get("gate", ())) for row in told] == [set(row.get("gate", ())) for row in real]


def test_the_whole_group_is_told(control: ControlStack) -> None:
    told, real = read(control, "/snapshot")["group"], control.hand.section("group")
    assert set(told) == {*real, "fabric_group"} - {"server_ms", "section"}


def test_a_request_that_runs_is_told_whole(control: ControlStack) -> None:
    [running] = [row for row in control.hand.section("leases")["rows"] if row["pool_id"] == "default"]
    [real] = control.hand.section("request", subject=running["request_id"])["rows"]
    told = read(control, f"/requests/{running['request_id']}")
    del told["server_ms"]
    assert told == real


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "label"),
    [(kind, label) for kind in ("right", "wrong", "known") for label in OPERATIONS if kind != "known" or "{" in label],
)
def test_every_answer_is_one_of_the_document(control: ControlStack, label: str, kind: str) -> None:
    operation = OPERATIONS[label]
    known = {name: value for name, value in KNOWN.items() if f"{{{name}}}" in operation.path}
    mode = GenerationMode.NEGATIVE if kind == "wrong" else GenerationMode.POSITIVE
    strategy = operation.as_strategy(mode, **({"path_parameters": known} if kind == "known" else {}))
    headers = {"authorization": f"Bearer {control.tokens['submit' if label == 'POST /requests' else 'admin']}"}

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def ask(case: schemathesis.Case) -> None:
        response = case.call(base_url=f"{control.url}{BASE}", headers=headers, timeout=30)
        case.validate_response(response, checks=CHECKED)

    ask()

"""`/v1/models` over several endpoints, `/healthz` and `/readyz`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from dispatch.backend import Endpoint
from dispatch.ingress import IngressSettings, IngressState, create_app
from tests.support.front import FakeClient, FakeGateway
from tests.support.stub import Hold, Script, StubBackend, free_port, json_answer

pytestmark = pytest.mark.anyio


def models(*names: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "n": 2**70, "x": "é"} for name in names]}).encode()


def endpoint(port: int, name: str = "a", **more: Any) -> Endpoint:
    return Endpoint(endpoint_id=name, url=f"http://127.0.0.1:{port}/v1", **more)


def names(answer: httpx.Response) -> list[str]:
    document = answer.json()
    assert document["object"] == "list"
    return [model["id"] for model in document["data"]]


@pytest.mark.parametrize("base", ["", "/pools/interactive"])
async def test_models_of_all_endpoints_come_in_one_list_without_doubles(
    http: httpx.AsyncClient, gateway: FakeGateway, base: str
) -> None:
    async with StubBackend(json_answer(models("m1", "m2"))) as one, StubBackend(json_answer(models("m2", "m3"))) as two:
        gateway.listed = (endpoint(one.port, api_key="sk-1"), endpoint(two.port, "b"), endpoint(two.port, "again"))
        answer = await http.get(f"{base}/v1/models", headers={"authorization": "Bearer theirs", "x-request-id": "mine"})
        assert (answer.status_code, names(answer)) == (200, ["m1", "m2", "m3"])
        assert answer.json()["data"][0] == {"id": "m1", "n": 2**70, "x": "é"}
        assert answer.headers["x-request-id"] == "mine"
        assert len(two.requests) == 1
        [asked] = one.requests
        assert (asked.method, asked.target, asked.header("authorization")) == ("GET", "/v1/models", "Bearer sk-1")


@pytest.mark.parametrize(
    "broken",
    [
        json_answer(b"{}", status="500 Oops"),
        json_answer(b'{"data":7}'),
        json_answer(b'{"data":[{"id":7}]}'),
        json_answer(b"<html>"),
    ],
)
async def test_an_endpoint_without_a_list_does_not_hide_the_others(
    http: httpx.AsyncClient, gateway: FakeGateway, broken: Script
) -> None:
    async with StubBackend(broken) as one, StubBackend(json_answer(models("m"))) as two:
        gateway.listed = (endpoint(one.port), endpoint(free_port(), "gone"), endpoint(two.port, "b"))
        assert names(await http.get("/v1/models")) == ["m"]


async def test_when_no_endpoint_answers_it_says_why_for_each(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    async with StubBackend(json_answer(b'{"data":null}')) as one:
        gateway.listed = (endpoint(free_port(), "gone"), endpoint(one.port, "odd"))
        answer = await http.get("/v1/models")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], set(error)) == (
        502,
        "no_endpoint_answered",
        {"message", "type", "param", "code"},
    )
    assert "'gone'" in error["message"]
    assert "'odd'" in error["message"]


async def test_without_endpoints_it_is_503(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_endpoint")


async def test_a_silent_endpoint_costs_a_bounded_time(gateway: FakeGateway) -> None:
    state = IngressState(client=FakeClient(), gateway=gateway, settings=IngressSettings(models_timeout_s=0.2))
    transport = httpx.ASGITransport(app=create_app(state))
    async with StubBackend(Script((Hold(),))) as silent, StubBackend(json_answer(models("m"))) as two:
        gateway.listed = (endpoint(silent.port), endpoint(two.port, "b"))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            assert names(await http.get("/v1/models", timeout=2)) == ["m"]


async def test_healthz_is_200_whatever_the_fabric_does(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.facts = {"fabric_reachable": False, "running": False}
    for method in ("GET", "HEAD"):
        answer = await http.request(method, "/healthz")
        assert answer.status_code == 200
    assert (await http.get("/healthz")).json() == {"status": "ok"}


READY: Sequence[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"draining": True}, "shutting down"),
    ({"running": False}, "does not run"),
    ({"enabled": False}, "disabled"),
    ({"fabric_reachable": False}, "does not answer"),
    ({"fabric_reachable": False, "fabric_problem": "run: dispatch scripts load"}, "dispatch scripts load"),
]


@pytest.mark.parametrize(("facts", "reason"), READY)
async def test_readyz_says_whether_and_why_not(
    http: httpx.AsyncClient, gateway: FakeGateway, facts: dict[str, Any], reason: str | None
) -> None:
    gateway.facts = facts
    answer = await http.get("/readyz")
    document = answer.json()
    assert answer.status_code == (200 if reason is None else 503)
    assert document["ready"] is (reason is None)
    assert document["reason"] is None if reason is None else reason in document["reason"]
    assert (document["gateway_id"], document["fabric_group"], document["slots"]) == ("gw-1", "g", 8)


async def test_readyz_asks_the_server(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    gateway.problem = "it stands still"
    answer = await http.get("/readyz")
    assert answer.status_code == 503
    assert "it stands still" in answer.json()["reason"]


async def test_the_control_routes_are_described(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    assert {"/healthz", "/readyz", "/v1/models"} <= set(document["paths"])
    assert (await http.get("/docs")).status_code == 404

"""Scripted faults, by the call's own member and by rules, as a client of the backend meets them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from dispatch.backend import Endpoint, EndpointClient, Execution
from dispatch.backend.execution import ErrorType
from dispatch.backend.simulated import SimulatorOptions, running_simulator
from tests.support.calls import chat_call

pytestmark = pytest.mark.anyio

FAST = SimulatorOptions.fast()


@asynccontextmanager
async def simulator(options: SimulatorOptions = FAST) -> AsyncIterator[tuple[Endpoint, httpx.AsyncClient]]:
    async with (
        running_simulator(options) as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), trust_env=False, timeout=5) as http,
    ):
        yield Endpoint(endpoint_id="s", url=url, first_byte_timeout_ms=400, idle_timeout_ms=400), http


def kind(execution: Execution) -> str | None:
    return None if execution.head.error is None else execution.head.error.type


@pytest.mark.parametrize(
    ("simulate", "status", "verdict", "found"),
    [
        ({"status": 400}, 400, "neutral", (ErrorType.REJECTED, False)),
        ({"status": 500}, 500, "failure", (ErrorType.FAILED, False)),
        ({"status": 503, "retry_after": "7"}, 503, "backpressure", (ErrorType.OVERLOADED, True)),
        ({"retry_after": "7"}, 429, "backpressure", (ErrorType.OVERLOADED, True)),
        ({"garbage": "html"}, 200, "failure", (ErrorType.UNREADABLE, False)),
        ({"garbage": "json"}, 200, "failure", (ErrorType.UNREADABLE, False)),
        ({"garbage": "text"}, 200, "failure", (ErrorType.UNREADABLE, False)),
        ({"garbage": "bytes"}, 200, "failure", (ErrorType.UNREADABLE, False)),
        ({"garbage": "empty"}, 200, "failure", (ErrorType.UNREADABLE, False)),
        ({"error_in_200": True}, 200, "failure", (ErrorType.FAILED, False)),
        ({"cut": "start"}, None, "failure", (ErrorType.DISCONNECTED, True)),
        ({"cut": "start", "reset": True}, None, "failure", (ErrorType.DISCONNECTED, True)),
        ({"cut": "head"}, 200, "failure", (ErrorType.DISCONNECTED, True)),
        ({"cut": "body"}, 200, "failure", (ErrorType.DISCONNECTED, False)),
        ({"cut": "body", "reset": True}, 200, "failure", (ErrorType.DISCONNECTED, False)),
        ({"hang": "start"}, None, "failure", (ErrorType.TIMEOUT, False)),
        ({"hang": "head"}, 200, "failure", (ErrorType.TIMEOUT, False)),
        ({"hang": "body"}, 200, "failure", (ErrorType.TIMEOUT, False)),
        ({"content_type": "text/html", "status": 502, "cut": "body"}, 502, "failure", (ErrorType.FAILED, False)),
    ],
)
async def test_faults_by_the_calls_own_member(
    client: EndpointClient, simulate: dict[str, Any], status: int | None, verdict: str, found: tuple[ErrorType, bool]
) -> None:
    async with simulator() as (endpoint, http):
        execution = await client.execute(endpoint, chat_call(simulate=simulate), deadline_s=5)
        assert execution.outcome == "failed"
        assert (execution.head.status, execution.verdict) == (status, verdict)
        assert (kind(execution), execution.retryable) == found
        assert execution.hold_ms == (7_000 if "retry_after" in simulate else 0)
        plain = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert plain.outcome == "succeeded"
        stats = (await http.get("/control/stats")).json()
        assert (stats["calls"], stats["faults"], stats["running"]) == (2, 1, 0)


async def test_a_wrong_content_type_and_a_delay_alone_are_no_failure(client: EndpointClient) -> None:
    async with simulator() as (endpoint, _):
        labelled = chat_call(simulate={"content_type": "text/event-stream"})
        assert (await client.execute(endpoint, labelled, deadline_s=5)).outcome == "succeeded"
        delayed = await client.execute(endpoint, chat_call(simulate={"delay_ms": 100}), deadline_s=5)
        assert delayed.outcome == "succeeded"
        assert delayed.execution_ms >= 100


@pytest.mark.parametrize(
    ("simulate", "ends"),
    [
        ({"garbage": "html"}, "[DONE]"),
        ({"error_in_200": True}, "[DONE]"),
        ({"cut": "body"}, None),
        ({"cut": "head"}, None),
    ],
)
async def test_faults_in_the_middle_of_a_stream(simulate: dict[str, Any], ends: str | None) -> None:
    async with simulator() as (_, http):
        body = {"model": "m", "messages": [], "stream": True, "simulate": simulate}
        text = ""
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.headers["content-type"] == "text/event-stream"
                async for piece in answer.aiter_text():
                    text += piece
        except httpx.RemoteProtocolError:
            assert ends is None
        else:
            assert ends is not None
            assert text.endswith(f"data: {ends}\n\n")
        assert ("doctype" in text) == ("garbage" in simulate)
        assert ('data: {"error":' in text) == ("error_in_200" in simulate)
        assert ("content" in text) == (simulate.get("cut") != "head")


async def test_a_rule_counts_down(client: EndpointClient) -> None:
    async with simulator() as (endpoint, http):
        answer = await http.post("/control/faults", json={"simulate": {"status": 503}, "count": 2})
        assert answer.json() == {"rules": [{"simulate": {"status": 503}, "count": 2}]}
        statuses = [(await client.execute(endpoint, chat_call(), deadline_s=5)).head.status for _ in range(4)]
        assert statuses == [503, 503, 200, 200]
        assert (await http.get("/control/faults")).json() == {"rules": []}


async def test_rules_go_by_operation_and_model_in_their_order(client: EndpointClient) -> None:
    async with simulator() as (endpoint, http):
        for rule in (
            {"simulate": {"status": 501}, "operation": "embeddings"},
            {"simulate": {"status": 502}, "model": "other"},
            {"simulate": {"status": 503}, "count": 1},
            {"simulate": {"status": 504}},
        ):
            assert (await http.post("/control/faults", json=rule)).status_code == 200
        statuses = [(await client.execute(endpoint, chat_call(), deadline_s=5)).head.status for _ in range(2)]
        assert statuses == [503, 504]
        other = chat_call(b'{"model":"other","messages":[]}')
        assert (await client.execute(endpoint, other, deadline_s=5)).head.status == 502
        own = chat_call(simulate={"status": 418})
        assert (await client.execute(endpoint, own, deadline_s=5)).head.status == 418


async def test_a_rule_with_a_probability_is_repeatable(client: EndpointClient) -> None:
    async with simulator() as (endpoint, http):
        runs = []
        for _ in range(2):
            await http.post("/control/reset")
            await http.post("/control/faults", json={"simulate": {"status": 500}, "probability": 0.5})
            found = [(await client.execute(endpoint, chat_call(), deadline_s=5)).head.status for _ in range(30)]
            runs.append(found)
        assert runs[0] == runs[1]
        assert 5 < runs[0].count(500) < 25


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"simulate": {"status": "x"}},
        {"simulate": {}, "count": 0},
        {"simulate": {}, "probability": 2},
        {"simulate": {}, "operation": "chat"},
        {"simulate": {"nonsense": True}},
    ],
)
async def test_what_is_no_rule_is_refused(rule: dict[str, Any]) -> None:
    async with simulator() as (_, http):
        answer = await http.post("/control/faults", json=rule)
        assert answer.status_code == 400
        assert "error" in answer.json()
        assert (await http.get("/control/faults")).json() == {"rules": []}


async def test_requests_are_counted_by_id(client: EndpointClient) -> None:
    async with simulator() as (endpoint, http):
        await client.execute(endpoint, chat_call(simulate={"id": "a"}), deadline_s=5)
        await client.execute(endpoint, chat_call(simulate={"id": "a", "status": 500}), deadline_s=5)
        await client.execute(endpoint, chat_call(metadata={"request_id": "b"}), deadline_s=5)
        await http.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers={"x-request-id": "c"})
        await client.execute(endpoint, chat_call(), deadline_s=5)
        stats = (await http.get("/control/stats")).json()
        assert stats["requests"] == {"a": 2, "b": 1, "c": 1}
        assert stats["by_operation"] == {"chat.completions": 4, "embeddings": 1}
        assert (stats["calls"], stats["finished"], stats["faults"]) == (5, 4, 1)
        stats = (await http.post("/control/reset")).json()
        assert (stats["calls"], stats["requests"]) == (0, {})


async def test_hanging_calls_do_not_keep_the_server_from_ending(client: EndpointClient) -> None:
    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks, simulator() as (endpoint, http):
            patient = Endpoint(endpoint_id="s", url=endpoint.url)
            for _ in range(5):
                call = chat_call(simulate={"hang": "start"})
                tasks.start_soon(lambda call=call: client.execute(patient, call, deadline_s=60))
            while (await http.get("/control/stats")).json()["faults"] < 5:  # noqa: ASYNC110 - asked over HTTP
                await anyio.sleep(0.005)


async def test_the_application_alone_runs_under_another_server() -> None:
    from dispatch.backend.simulated import create_app  # noqa: PLC0415 - the only test without the simulator's server

    transport = httpx.ASGITransport(app=create_app(FAST))
    async with httpx.AsyncClient(transport=transport, base_url="http://simulated") as http:
        answer = await http.post("/v1/chat/completions", json={"model": "m", "messages": [{"role": "user"}]})
        assert answer.status_code == 200
        assert json.loads(answer.content)["object"] == "chat.completion"
        assert (await http.get("/v1/chat/completions")).status_code == 405
        assert (await http.get("/nothing")).status_code == 404

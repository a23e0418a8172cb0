"""Asking an endpoint whether it is back, and its engine for its metrics: what is concluded, and what goes out."""

from __future__ import annotations

import json
import time

import anyio
import pytest

from dispatch.backend import EndpointClient
from dispatch.backend.engine_metrics import EngineReading
from dispatch.backend.gauge import PAGE_MAX_BYTES, Gauge
from dispatch.backend.probing import Probe
from dispatch.errors import ConfigurationError
from tests.support.calls import chat_call, endpoint_at
from tests.support.descriptors import no_free_descriptor
from tests.support.stub import Fin, Hold, Reset, Script, StubBackend, Write, answer_bytes, free_port, json_answer

pytestmark = pytest.mark.anyio

PAGE = b"vllm:num_requests_waiting 2\n"
GOOD = Probe("good")
CUT = Probe("failure", "endpoint_disconnected")


def status(code: int, body: bytes = b"{}", **fields: str) -> Script:
    headers = [(name.replace("_", "-"), value) for name, value in fields.items()]
    return json_answer(body, status=f"{code} X", headers=headers)


@pytest.mark.parametrize(
    ("script", "probe"),
    [
        (status(200, b'{"object":"list","data":[]}'), GOOD),
        (status(200, b'[{"id":"m"}]'), GOOD),
        (status(200, b"\xef\xbb\xbf{}"), GOOD),
        (status(200, b"<html>"), Probe("failure", "endpoint_unreadable")),
        (status(200, b""), Probe("failure", "endpoint_unreadable")),
        (status(200, b'{"error":{"code":500,"message":"x"}}'), Probe("failure", "endpoint_failed")),
        (status(200, b'{"error":{"code":503}}'), Probe("backpressure", "endpoint_overloaded", 1000)),
        (status(404), GOOD),
        (status(405), GOOD),
        (status(400), GOOD),
        (status(501), GOOD),
        (status(401), Probe("neutral", "endpoint_unauthorized")),
        (status(403), Probe("neutral", "endpoint_rejected")),
        (status(407), Probe("neutral", "endpoint_rejected")),
        (status(408), Probe("neutral", "endpoint_rejected")),
        (status(429, retry_after="2"), Probe("backpressure", "endpoint_overloaded", 2000)),
        (status(503), Probe("backpressure", "endpoint_overloaded", 1000)),
        (status(500), Probe("failure", "endpoint_failed")),
        (status(502), Probe("failure", "endpoint_failed")),
        (status(504), Probe("failure", "endpoint_failed")),
        (status(307, location="/v1/models/"), Probe("failure", "endpoint_redirect")),
        (Script((Write(b"SSH-2.0-x\r\n"), Fin())), Probe("failure", "endpoint_unreadable")),
        (Script((Reset(),)), CUT),
        (Script((Write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"), Fin())), CUT),
    ],
    ids=lambda value: value.verdict if isinstance(value, Probe) else "",
)
async def test_what_an_answer_says_about_an_endpoint(client: EndpointClient, script: Script, probe: Probe) -> None:
    async with StubBackend(script) as stub:
        assert await client.probe(endpoint_at(stub.url, api_key="sk-1"), within_s=5) == probe
        request = stub.requests[-1]  # the layer below asks again where a connection ended before the answer
    assert (request.method, request.target) == ("GET", "/v1/models")
    assert request.header("authorization") == "Bearer sk-1"


async def test_nobody_there_is_a_failure(client: EndpointClient) -> None:
    found = await client.probe(endpoint_at(f"http://127.0.0.1:{free_port()}"), within_s=5)
    assert found == Probe("failure", "endpoint_unreachable")


async def test_no_answer_in_the_probes_time_is_a_failure_and_its_connection_is_closed(client: EndpointClient) -> None:
    async with StubBackend(Script((Hold(),))) as stub:
        started = time.monotonic()
        assert await client.probe(endpoint_at(stub.url), within_s=0.2) == Probe("failure", "endpoint_timeout")
        assert time.monotonic() - started < 2
        await stub.until(lambda seen: seen.open_connections == 0)
    assert stub.connections[0].closed_by == "client"


@pytest.mark.parametrize("within_s", [0.0, -1.0, float("nan")])
async def test_no_time_is_no_question(client: EndpointClient, within_s: float) -> None:
    async with StubBackend(status(200)) as stub:
        assert (await client.probe(endpoint_at(stub.url), within_s=within_s)).verdict == "failure"
        assert not stub.connections


async def test_a_call_for_which_there_is_no_socket_is_not_the_endpoints_fault(client: EndpointClient) -> None:
    async with StubBackend(status(200)) as stub:
        endpoint = endpoint_at(stub.url)
        with no_free_descriptor():
            assert await client.probe(endpoint, within_s=5) == Probe("neutral", "endpoint_unreachable")
            execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert (execution.outcome, execution.verdict, execution.retryable) == ("failed", "neutral", True)
        error = execution.head.error
        assert error is not None
        assert "too many open files" in error.message
        assert not stub.connections
        assert await client.probe(endpoint, within_s=5) == GOOD


def gauge_at(url: str, **config: str) -> Gauge:
    found = Gauge.from_config({"gate": "vllm", **config}, endpoint_at(url, api_key="sk-1"))
    assert found is not None
    return found


async def test_metrics_are_asked_for_at_the_root_of_the_endpoint_with_its_key(client: EndpointClient) -> None:
    async with StubBackend(Script((Write(answer_bytes(PAGE)),))) as stub:
        assert await client.gauge(gauge_at(stub.url), within_s=5) == EngineReading(2)
        [request] = stub.requests
    assert (request.method, request.target, request.body) == ("GET", "/metrics", b"")
    assert request.header("authorization") == "Bearer sk-1"


async def test_another_page_is_asked_with_its_own_credentials_only(client: EndpointClient) -> None:
    async with StubBackend(Script((Write(answer_bytes(PAGE)),))) as stub:
        for url in (f"{stub.url}/m/?a=b", f"http://u:p%40@127.0.0.1:{stub.port}/m/", stub.url):
            gauge = Gauge.from_config({"gate": "vllm", "gate_url": url}, endpoint_at("http://engine:1", api_key="sk-1"))
            assert gauge is not None
            assert "p@" not in repr(gauge)
            assert await client.gauge(gauge, within_s=5) == EngineReading(2)
        first, second, third = stub.requests
    assert (first.target, first.header("authorization")) == ("/m/?a=b", None)
    assert (second.target, second.header("authorization")) == ("/m/", "Basic dTpwQA==")
    assert third.target == "/metrics"


async def test_names_of_the_config_take_the_place_of_the_presets(client: EndpointClient) -> None:
    page = b"vllm:num_requests_waiting 2\nq 7\nt 0.5\n"
    async with StubBackend(Script((Write(answer_bytes(page)),))) as stub:
        gauge = gauge_at(stub.url, gate_waiting_metric="q", gate_token_metric="t")
        assert await client.gauge(gauge, within_s=5) == EngineReading(7, token_ms=500.0)


def test_an_endpoint_without_a_gate_has_no_gauge() -> None:
    assert Gauge.from_config({"gate": "none"}, endpoint_at("http://engine:1")) is None
    assert Gauge.from_config({}, endpoint_at("http://engine:1")) is None


@pytest.mark.parametrize("url", ["ftp://u:secret@h/", "h:1/metrics", "http://", "http://u:secret@[::/"])
def test_a_wrong_page_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="gate_url") as caught:
        gauge_at("http://engine:1", gate_url=url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (Script((Write(answer_bytes(PAGE, status="404 Not Found")),)), "404"),
        (Script((Write(answer_bytes(PAGE, status="307 X", headers=[("location", "/metrics/")])),)), "307"),
        (Script((Reset(),)), "before it answered"),
        (Script((Write(answer_bytes(b"x" * (PAGE_MAX_BYTES + 1))),)), "more than"),
        (Script((Hold(),)), "did not come within 0.3 s"),
    ],
    ids=["404", "redirect", "reset", "huge", "slow"],
)
async def test_metrics_that_do_not_come_are_said(client: EndpointClient, script: Script, why: str) -> None:
    async with StubBackend(script) as stub:
        found = await client.gauge(gauge_at(stub.url), within_s=0.3 if script.steps == (Hold(),) else 5)
        assert isinstance(found, str)
        assert why in found
        await stub.until(
            lambda seen: all(one.closed_by or not one.requests for one in seen.connections) or why == "404"
        )


async def test_an_endless_page_is_cut_off(client: EndpointClient) -> None:
    head = Write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    piece = Write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
    async with StubBackend(Script((head, *[piece] * 64, Hold()))) as stub:
        with anyio.fail_after(5):
            assert "more than" in str(await client.gauge(gauge_at(stub.url), within_s=4))
            await stub.connections[0].closed.wait()


async def test_garbage_is_an_unknown_reading(client: EndpointClient) -> None:
    async with StubBackend(json_answer(json.dumps({"a": 1}).encode())) as stub:
        assert await client.gauge(gauge_at(stub.url), within_s=5) == EngineReading()

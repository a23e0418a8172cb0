"""`/metrics` of a real gateway: what was done is counted, exactly, and what is not known is not shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dispatch.fabric.api_keys import Role
from dispatch.fabric.functions import pool_pause
from dispatch.fabric.sync import BlockingConnection
from dispatch.telemetry.metrics import reading
from tests.support.engines import BROKEN, OK, Engine, slow, text_of
from tests.support.gateway_process import GatewayProcess
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import until
from tests.support.scrape import read_page, scrape
from tests.support.stack import Stack, stack
from tests.support.streams import DONE as END_OF_STREAM
from tests.support.streams import HEAD, chunk, data
from tests.support.stub import Fin, Reset, Script, StubBackend, Write, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = Script((Write(HEAD + data(chunk("a")) + data(chunk("b", "stop")) + END_OF_STREAM), Fin()))
SHARED = ("llm_dispatch_pool_", "llm_dispatch_group_", "llm_dispatch_endpoint_")
GEN_AI = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "openai", "gen_ai_request_model": "m"}


def saying(text: str, **members: Any) -> dict[str, Any]:
    return BODY | {"messages": [{"role": "user", "content": text}]} | members


def http(path: Stack, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=path.url, timeout=60, headers=headers)


@pytest.fixture(autouse=True)
def _always_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a test has just done is what the page shows."""
    monkeypatch.setattr(reading, "FRESH_S", 0.0)


@asynccontextmanager
async def metered(url: str, engine_url: str, **document: Any) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    """Start a stack that counts, and a client of it."""
    async with stack(url, engine_url, metrics=True, **document) as path, http(path) as client:
        yield path, client


DONE: list[tuple[int, str, dict[str, str]]] = [
    # The group's.
    (5, "pool_admitted_total", {"pool": "default"}),
    (5, "pool_launched_total", {"pool": "default"}),
    (5, "pool_cost_served_total", {"pool": "default"}),
    (3, "pool_endings_total", {"pool": "default", "ending": "succeeded"}),
    (2, "pool_endings_total", {"pool": "default", "ending": "failed"}),
    (5, "pool_endings_total", {}),
    (0, "pool_drops_total", {}),
    (1, "pool_refused_total", {"pool": "shut", "reason": "pool_disabled"}),
    (1, "pool_refused_total", {}),
    (5, "endpoint_attempts_total", {"endpoint": "default"}),
    (2, "endpoint_failures_total", {"endpoint": "default"}),
    # This gateway's.
    (3, "attempts_total", {"pool": "default", "outcome": "succeeded"}),
    (2, "attempts_total", {"pool": "default", "outcome": "failed"}),
    (2, "attempt_failures_total", {"pool": "default", "error_type": "endpoint_failed"}),
    (0, "retries_total", {}),
    (0, "lease_losses_total", {}),
    (5, "claimed_total", {}),
    (5, "queue_wait_seconds_count", {"pool": "default"}),
    (5, "execution_seconds_count", {"pool": "default"}),
    (5, "request_duration_seconds_count", {"pool": "default"}),
    (5, "request_duration_seconds_bucket", {"pool": "default", "le": "+Inf"}),
    (3, "http_answers_total", {"operation": "chat.completions", "status": "200"}),
    (2, "http_answers_total", {"operation": "chat.completions", "status": "500"}),
    (8, "http_answers_total", {}),
    (1, "http_refusals_total", {"reason": "rejected-pool_disabled"}),
    (1, "http_refusals_total", {"reason": "rejected-pool_unknown"}),
    (5, "function_duration_seconds_count", {"function": "lease_settle"}),
    (0, "function_errors_total", {"function": "lease_settle"}),
]
"""By how much a sample grows in the test below; labels that are left out are summed over."""

STANDS: list[tuple[float | None, str, dict[str, str]]] = [
    (1, "pool_state", {"pool": "shut", "state": "disabled"}),
    (0, "pool_state", {"pool": "shut", "state": "enabled"}),
    (0, "pool_pending", {"pool": "default"}),
    (0, "pool_oldest_age_seconds", {"pool": "default"}),
    (None, "pool_head_cost", {"pool": "default"}),
    (1, "endpoint_breaker_state", {"endpoint": "default", "state": "closed"}),
    (0, "endpoint_hold_seconds", {"endpoint": "default"}),
    (None, "endpoint_gate_value", {"endpoint": "default"}),
    (8, "group_limit", {}),
    (64, "group_slots", {}),
    (1, "group_gateways", {"state": "active"}),
    (64, "gateway_slots", {}),
    (0, "gateway_slots_used", {}),
    (1, "gateway_fabric_up", {}),
    (0, "gateway_draining", {}),
]
"""How samples stand after the test below."""


async def test_what_was_done_is_counted_exactly(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default"}, {"pool_id": "shut", "enabled": False}]
    async with Engine() as engine:
        engine.calls = lambda request: BROKEN if text_of(request) == "break" else OK
        endpoint = {"endpoint_id": "default", "url": engine.url, "breaker_failures": 1000}
        async with metered(valkey.url, engine.url, pools=pools, endpoints=[endpoint]) as (path, client):
            before = await scrape(path.url)
            for text, status in (("a", 200), ("break", 500), ("b", 200), ("c", 200), ("break", 500)):
                assert (await client.post(CHAT, json=saying(text))).status_code == status
            assert (await client.post(f"/pools/shut{CHAT}", json=BODY)).status_code == 503
            assert (await client.post(f"/pools/none{CHAT}", json=BODY)).status_code == 404
            assert (await client.post(CHAT, content=b"{")).status_code == 400
            after = await scrape(path.url)
    for by, name, labels in DONE:
        grown = [page.total(f"llm_dispatch_{name}", **labels) for page in (before, after)]
        assert grown[1] - grown[0] == by, (name, labels)
    for value, name, labels in STANDS:
        assert after.value(f"llm_dispatch_{name}", **labels) == value, (name, labels)
    duration = "gen_ai_client_inference_duration_seconds_count"
    assert after.total(duration, **GEN_AI) == 5
    assert after.total(duration, **GEN_AI, error_type="endpoint_failed") == 2
    assert after.total("gen_ai_client_inference_usage_input_tokens_total", **GEN_AI) == 9
    assert after.total("gen_ai_client_inference_usage_output_tokens_total", **GEN_AI) == 6


async def test_what_waits_and_runs_is_shown_with_its_age_cost_and_reason(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        engine.calls = slow(30)
        async with (
            stack(valkey.url, engine.url, metrics=True, total_concurrent_dispatch=1) as path,
            http(path) as client,
        ):
            calls = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(3)]
            await until(lambda: path.section("group")["pending"] == 2 and engine.count("call") == 1)
            page = await scrape(path.url)
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    assert page.value("llm_dispatch_pool_pending", pool="default") == 2
    assert page.value("llm_dispatch_pool_in_flight", pool="default") == 1
    assert page.value("llm_dispatch_group_pending") == 2
    assert page.value("llm_dispatch_gateway_slots_used") == 1
    assert page.value("llm_dispatch_pool_head_cost", pool="default") == 1
    age = page.value("llm_dispatch_pool_oldest_age_seconds", pool="default")
    assert age is not None
    assert 0 < age < 60
    assert page.value("llm_dispatch_pool_blocked_seconds", pool="default", reason="global_capacity") is not None
    assert page.total("llm_dispatch_pool_skips_total", pool="default", reason="global_capacity") > 0


async def test_retries_and_an_open_breaker_are_told(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default", "max_attempts": 2, "retry_base_ms": 1, "retry_cap_ms": 2}]
    async with Engine() as engine:
        endpoint = {"endpoint_id": "default", "url": engine.url, "breaker_failures": 3, "open_ms": 60_000}
        async with (
            stack(valkey.url, engine.url, metrics=True, pools=pools, endpoints=[endpoint]) as path,
            http(path) as client,
        ):
            engine.calls = Script((Reset(),))
            assert (await client.post(CHAT, json=BODY)).status_code == 502
            page = await scrape(path.url)
            assert page.value("llm_dispatch_retries_total", pool="default", kind="retry") == 1
            assert page.value("llm_dispatch_endpoint_failures_in_a_row", endpoint="default") == 2
            assert page.value("llm_dispatch_group_retry_budget", kind="retries") is not None
            assert page.total("llm_dispatch_group_retry_budget", kind="retries") > 0
            assert page.value("llm_dispatch_request_duration_seconds_count", pool="default") == 1
            engine.calls = BROKEN
            assert (await client.post(CHAT, json=BODY)).status_code == 500
            page = await scrape(path.url)
    states = {
        one: page.value("llm_dispatch_endpoint_breaker_state", endpoint="default", state=one)
        for one in ("closed", "open", "half_open")
    }
    assert states == {"closed": 0, "open": 1, "half_open": 0}


async def test_streams_are_counted_with_the_time_to_their_first_chunk(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(STREAM) as stub,
        stack(valkey.url, f"{stub.url}/v1", metrics=True) as path,
        http(path) as client,
    ):
        answer = await client.post(CHAT, json=BODY | {"stream": True})
        assert answer.status_code == 200
        page = await scrape(path.url)
    sent = sum(line.startswith("data: {") for line in answer.text.splitlines())
    assert page.value("llm_dispatch_stream_chunks_total") == sent > 0
    assert page.total("llm_dispatch_stream_size_bytes_total") > sent
    assert page.total("gen_ai_client_inference_time_to_first_chunk_seconds_count", **GEN_AI) == 1
    assert page.value("llm_dispatch_http_answers_total", operation="chat.completions", status="200") == 1


async def test_two_gateways_export_the_same_of_the_group(valkey: ValkeyProcess) -> None:
    async with Engine() as engine:
        group = unique_group()
        configure(valkey.url, group, default_document(engine.url))
        async with (
            GatewayProcess(valkey.url, group, gateway_id="one") as one,
            GatewayProcess(valkey.url, group, gateway_id="two") as two,
            httpx.AsyncClient(base_url=one.url, timeout=60) as client,
        ):
            for _ in range(5):
                assert (await client.post(CHAT, json=BODY)).status_code == 200
            await asyncio.sleep(reading.WITHIN_S)  # what was read before the calls is forgotten
            pages = [await scrape(each.url) for each in (one, two)]
    of_group = [{key: value for prefix in SHARED for key, value in page.of(prefix).items()} for page in pages]
    assert of_group[0] == of_group[1]
    assert pages[0].total("llm_dispatch_pool_endings_total", ending="succeeded") == 5
    assert pages[0].value("llm_dispatch_group_gateways", state="active") == 2
    assert pages[0].value("llm_dispatch_group_slots") == 128
    claimed = [page.total("llm_dispatch_claimed_total") for page in pages]
    assert sum(claimed) == 5  # the others are each gateway's own
    for page in pages:
        for name, says in page.helps.items():
            if name.startswith(SHARED):
                assert says.endswith("every gateway exports the same."), name


async def test_while_valkey_is_away_the_page_shows_what_this_gateway_knows(
    start_valkey: Callable[..., ValkeyProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.fabric.glide.REQUEST_TIMEOUT_S", 1.0)
    server = start_valkey(aof=True)
    async with Engine() as engine, stack(server.url, engine.url, metrics=True) as path, http(path) as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await scrape(path.url)).value("llm_dispatch_snapshot_up", section="pools") == 1
        server.kill()
        await until(lambda: not path.gateway.status().fabric_reachable)
        page = await scrape(path.url)
        assert {page.value("llm_dispatch_snapshot_up", section=one) for one in reading.SECTIONS} == {0}
        assert [page.of(prefix) for prefix in SHARED] == [{}, {}, {}]
        assert page.value("llm_dispatch_gateway_fabric_up") == 0
        assert page.value("llm_dispatch_request_duration_seconds_count", pool="default") == 1
        server.start()
        await until(lambda: path.gateway.status().fabric_reachable, within_s=20)
        page = await scrape(path.url)
        assert page.value("llm_dispatch_snapshot_up", section="pools") == 1
        assert page.value("llm_dispatch_pool_pending", pool="default") == 0


async def test_a_paused_pool_says_so(valkey: ValkeyProcess) -> None:
    async with stack(valkey.url, "http://127.0.0.1:9/v1", metrics=True) as path:
        with BlockingConnection(valkey.url) as connection:
            connection.run(path.group, pool_pause("backfill", "pause", actor="test"))
        page = await scrape(path.url)
    found = {
        state: page.value("llm_dispatch_pool_state", pool="backfill", state=state) for state in ("enabled", "paused")
    }
    assert found == {"enabled": 0, "paused": 1}


async def test_models_that_clients_make_up_do_not_grow_the_page(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(lambda _: json_answer(json.dumps({"choices": []}).encode())) as stub,
        stack(valkey.url, f"{stub.url}/v1", metrics=True, total_concurrent_dispatch=200) as path,
        http(path) as client,
    ):
        limiter = asyncio.Semaphore(50)

        async def ask(number: int) -> int:
            async with limiter:
                return (await client.post(CHAT, json=BODY | {"model": f"m-{number}"})).status_code

        assert set(await asyncio.gather(*(ask(number) for number in range(1200)))) == {200}
        page = await scrape(path.url)
    models = page.labels("gen_ai_client_inference_duration_seconds_count", "gen_ai_request_model")
    assert len(models) == 1001
    assert page.total("gen_ai_client_inference_duration_seconds_count", gen_ai_request_model="other") == 200
    assert page.value("llm_dispatch_models_folded_total") == 200


async def test_a_key_needs_the_role_observe_for_all_pools(valkey: ValkeyProcess) -> None:
    async with stack(valkey.url, "http://127.0.0.1:9/v1", metrics=True, keys="required") as path:
        watching = path.create_key(roles=(Role.OBSERVE,)).token
        others = {
            "": 401,
            "fd_none": 401,
            path.create_key(roles=(Role.SUBMIT,)).token: 403,
            path.create_key(roles=(Role.OBSERVE,), pools=("default",)).token: 403,
        }
        for token, status in others.items():
            async with http(path, **({"authorization": f"Bearer {token}"} if token else {})) as client:
                answer = await client.get("/metrics")
                assert (answer.status_code, "llm_dispatch" in answer.text) == (status, False)
        assert (await scrape(path.url, watching)).value("llm_dispatch_group_pending") == 0


async def test_a_key_that_was_good_reads_metrics_while_valkey_is_away(
    start_valkey: Callable[..., ValkeyProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch.fabric.glide.REQUEST_TIMEOUT_S", 1.0)
    server = start_valkey()
    async with stack(server.url, "http://127.0.0.1:9/v1", metrics=True, keys="required") as path:
        watching, submitting = path.create_key(roles=(Role.OBSERVE,)).token, path.create_key().token
        await scrape(path.url, watching)
        server.kill()
        await until(lambda: not path.gateway.status().fabric_reachable)
        assert (await scrape(path.url, watching)).value("llm_dispatch_gateway_fabric_up") == 0
        for token, status in ((submitting, 403), (f"{watching[:-1]}{'0' if watching[-1] != '0' else '1'}", (401, 503))):
            async with http(path, authorization=f"Bearer {token}") as client:
                assert (await client.get("/metrics")).status_code in (
                    status if isinstance(status, tuple) else (status,)
                )


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "text/plain"),
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
            "application/openmetrics-text",
        ),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=x\u00ff", "text/plain"),
    ],
)
async def test_the_page_comes_in_the_form_that_is_asked_for(valkey: ValkeyProcess, accept: str, form: str) -> None:
    async with stack(valkey.url, "http://127.0.0.1:9/v1", metrics=True) as path, http(path) as client:
        answer = await client.get("/metrics", headers={b"accept": accept.encode("latin-1")})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(form)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.endswith("# EOF\n") is (form != "text/plain")
    if form == "text/plain":
        read_page(answer.text)


@pytest.mark.parametrize(("setting", "status"), [("open", 200), ("keys", 401), ("off", 404)])
async def test_a_setting_says_who_reads_metrics(valkey: ValkeyProcess, group: str, setting: str, status: int) -> None:
    async with (
        GatewayProcess(valkey.url, group, metrics=setting, keys="required") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as client,
    ):
        assert (await client.get("/metrics")).status_code == status

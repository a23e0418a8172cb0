"""One request, one trace: from its producer through the queue to the endpoint and back, asserted on exported spans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from dispatch.backend.simulated import SimulatorOptions, running_simulator
from dispatch.errors import RequestEnded, RequestRefused
from dispatch.fabric.records import Outcome
from dispatch.fabric.schema import ENDINGS, key
from dispatch.producer.client import DispatchClient
from dispatch.sync import DispatchClient as BlockingClient
from dispatch.telemetry import names
from tests.support.by_hand import ByHand
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES, eye, until
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Script, StubBackend, json_answer
from tests.support.tracing import Kept, recording, tracing_producers
from tests.support.ways_to_end import end_in_most_ways

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MARKER, KEY = "PLEASE-TELL-NOBODY", "sk-plant-0123456789"


@pytest.fixture
def produced(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with tracing_producers(monkeypatch) as exporter:
        yield exporter


@asynccontextmanager
async def recorded(valkey_url: str, endpoint_url: str, **document: Any) -> AsyncIterator[tuple[Stack, Kept]]:
    """Run the whole path and record it."""
    sink = Kept()
    async with stack(valkey_url, endpoint_url, **document) as path, recording(valkey_url, path.group, sink):
        yield path, sink


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def by_kind(sink: Kept) -> tuple[ReadableSpan, ReadableSpan, ReadableSpan]:
    [process], [client], [deliver] = sink.of("process"), sink.of("chat"), sink.of("deliver")
    return process, client, deliver


async def sdk(path: Stack) -> None:
    await path.client.complete(model="qwen3", messages=MESSAGES, max_tokens=5, temperature=0.5)


async def sdk_stream(path: Stack) -> None:
    async with path.client.stream(
        model="qwen3", messages=MESSAGES, max_tokens=5, temperature=0.5, stream_options={"include_usage": True}
    ) as chunks:
        async for _ in chunks:
            pass


async def blocking(path: Stack) -> None:
    def call() -> None:
        with BlockingClient(path.valkey_url, fabric_group=path.group) as client:
            client.complete(model="qwen3", messages=MESSAGES, max_tokens=5, temperature=0.5)

    await anyio.to_thread.run_sync(call)


async def over_http(path: Stack) -> None:
    body = {"model": "qwen3", "messages": MESSAGES, "max_completion_tokens": 5, "temperature": 0.5}
    async with httpx.AsyncClient(base_url=path.url, timeout=30) as http:
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200


@pytest.mark.parametrize("call", [sdk, sdk_stream, blocking, over_http], ids=lambda call: call.__name__)
async def test_a_request_is_one_trace_of_four_spans(valkey, produced, call: Callable[[Stack], Any]) -> None:
    async with (
        running_simulator(SimulatorOptions.fast(output_tokens=5)) as backend,
        recorded(valkey.url, backend) as (path, sink),
    ):
        await call(path)
        await until(lambda: len(sink.spans) == 3)
        process, client, deliver = by_kind(sink)
        [send] = produced.get_finished_spans()
        assert [send.kind, process.kind, client.kind] == [SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT]
        assert (send.name, process.name, deliver.name) == ("send default", "process default", "deliver default")
        assert client.name == "chat qwen3"
        assert len({span.context.trace_id for span in (send, process, client, deliver)}) == 1
        assert send.parent is None
        assert process.parent.span_id == send.context.span_id
        assert client.parent.span_id == deliver.parent.span_id == process.context.span_id
        assert {span.status.status_code for span in (send, process, client, deliver)} == {StatusCode.UNSET}
        assert process.start_time <= client.start_time <= client.end_time == process.end_time == deliver.start_time
        check_attributes(path, send, process, client, deliver, streamed=call is sdk_stream)


def check_attributes(path: Stack, *spans: ReadableSpan, streamed: bool) -> None:
    """Hold every attribute of the three spans against what is known of the request."""
    send, process, client, deliver = map(attributes, spans)
    gateway = path.gateway.settings.gateway_id
    request_id, producer_id = process[names.REQUEST_ID], process[names.PRODUCER_ID]
    address = path.section("endpoints")["rows"][0]["url"]
    port = int(address.rpartition(":")[2].partition("/")[0])
    messaging = {
        names.MESSAGING_SYSTEM: "valkey", names.MESSAGING_DESTINATION_NAME: "default",
        names.MESSAGING_MESSAGE_ID: request_id, names.MESSAGING_BODY_SIZE: send[names.MESSAGING_BODY_SIZE],
    }  # fmt: skip
    named = {
        names.REQUEST_ID: request_id, names.PRODUCER_ID: producer_id, names.POOL_ID: "default",
        names.FABRIC_GROUP_ID: path.group,
    }  # fmt: skip
    asked = {
        names.GEN_AI_OPERATION_NAME: "chat", names.GEN_AI_REQUEST_MODEL: "qwen3",
        names.GEN_AI_REQUEST_STREAM: streamed, names.MESSAGE_COUNT: 1,
    }  # fmt: skip
    ran = {
        names.GATEWAY_ID: gateway, names.DISPATCHER_ID: f"{gateway}/{path.group}", names.ENDPOINT_ID: "default",
        names.BACKEND_ADDRESS: address, names.ATTEMPT: 1, names.COST_UNITS: 1, names.STATUS: 200,
    }  # fmt: skip
    tokens = {names.GEN_AI_USAGE_INPUT_TOKENS: client[names.GEN_AI_USAGE_INPUT_TOKENS],
              names.GEN_AI_USAGE_OUTPUT_TOKENS: 5}  # fmt: skip
    assert send == messaging | named | asked | {
        names.MESSAGING_OPERATION_NAME: "send", names.MESSAGING_OPERATION_TYPE: "send",
    }  # fmt: skip
    times = {name: process.pop(name) for name in (names.QUEUE_WAIT_MS, names.EXECUTION_MS, names.TOTAL_LATENCY_MS)}
    assert (process.pop(names.CHUNK_COUNT, 0) >= 5) == streamed
    assert process == messaging | named | asked | ran | tokens | {
        names.MESSAGING_OPERATION_NAME: "process", names.MESSAGING_OPERATION_TYPE: "process",
        names.ENDING: "succeeded", names.OUTCOME: "succeeded",
    }  # fmt: skip
    assert 0 <= times[names.QUEUE_WAIT_MS] <= times[names.TOTAL_LATENCY_MS]
    assert times[names.QUEUE_WAIT_MS] + times[names.EXECUTION_MS] == times[names.TOTAL_LATENCY_MS]
    assert client.pop(names.QUEUE_WAIT_MS) == times[names.QUEUE_WAIT_MS]
    assert client.pop(names.EXECUTION_MS) == times[names.EXECUTION_MS]
    assert (client.pop(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, None) is not None) == streamed
    assert client.pop(names.GEN_AI_RESPONSE_ID)
    assert client.pop(names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, 0) >= 0
    assert client.pop(names.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS, 0) >= 0
    expected = named | asked | ran | tokens | {
        names.GEN_AI_PROVIDER_NAME: "openai", names.GEN_AI_REQUEST_MAX_TOKENS: 5, names.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        names.GEN_AI_RESPONSE_MODEL: "qwen3", names.GEN_AI_RESPONSE_FINISH_REASONS: ("stop",),
        names.SERVER_ADDRESS: "127.0.0.1", names.SERVER_PORT: port, names.VERDICT: "good",
    }  # fmt: skip
    assert client == expected
    assert 0 <= deliver.pop(names.DELIVERY_MS) < 60_000
    assert deliver == named | {names.ENDING: "succeeded"}


async def test_http_continues_the_callers_trace_and_the_endpoint_continues_ours(valkey, produced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
    async with StubBackend(json_answer(b'{"choices":[]}')) as stub, recorded(valkey.url, f"{stub.url}/v1") as at:
        path, sink = at
        async with httpx.AsyncClient(base_url=path.url, timeout=30) as http:
            await http.post("/v1/chat/completions", json={"model": "m", "messages": MESSAGES}, headers=headers)
        await until(lambda: len(sink.spans) == 3)
        process, client, _ = by_kind(sink)
        [send] = produced.get_finished_spans()
        assert f"{send.context.trace_id:032x}" == TRACE
        assert f"{send.parent.span_id:016x}" == PARENT
        assert process.parent.span_id == send.context.span_id
        [seen] = stub.requests
        assert seen.header("traceparent") == f"00-{TRACE}-{client.context.span_id:016x}-01"
        assert seen.header("tracestate") == "vendor=1"
        assert client.context.trace_state.to_header() == "vendor=1"
        assert attributes(process)[names.CALLER_REQUEST_ID] == attributes(send)[names.CALLER_REQUEST_ID] == "mine"


async def test_each_attempt_is_a_span_of_its_own_that_its_endpoint_continues(valkey, produced) -> None:
    busy = json_answer(b'{"error":{"message":"later"}}', status="503 Service Unavailable")
    pools = [{"pool_id": "default", "max_attempts": 2, "retry_base_ms": 1, "retry_cap_ms": 1}]
    async with (
        StubBackend([busy, json_answer(b"{}")]) as stub,
        recorded(valkey.url, f"{stub.url}/v1", pools=pools, hold_max_ms=100) as (path, sink),
    ):
        await path.client.complete(model="m", messages=MESSAGES)
        await until(lambda: len(sink.spans) == 4)
        [process], (first, second) = sink.of("process"), sink.of("chat")
        assert [seen.header("traceparent")[36:52] for seen in stub.requests] == [
            f"{span.context.span_id:016x}" for span in (first, second)
        ]
        assert {span.parent.span_id for span in (first, second)} == {process.context.span_id}
        assert [span.status.status_code for span in (process, first, second)] == [
            StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET,
        ]  # fmt: skip
        failed, ran = attributes(first), attributes(second)
        assert (failed[names.ATTEMPT], failed[names.STATUS]) == (1, 503)
        assert failed[names.ERROR_TYPE] == "endpoint_overloaded"
        assert failed[names.ERROR_MESSAGE] == "endpoint 'default' answered 503 Service Unavailable"
        assert failed[names.SERVER_PORT] == ran[names.SERVER_PORT] == stub.port
        assert (ran[names.ATTEMPT], ran[names.STATUS]) == (2, 200)
        assert first.end_time <= second.start_time
    assert len(produced.get_finished_spans()) == 1


async def test_without_a_provider_the_callers_context_travels_and_nothing_is_made_up(valkey) -> None:
    given = f"00-{TRACE}-{PARENT}-00"
    async with StubBackend(json_answer(b'{"choices":[]}')) as stub, recorded(valkey.url, f"{stub.url}/v1") as at:
        path, sink = at
        await path.client.complete(model="m", messages=MESSAGES)
        async with httpx.AsyncClient(base_url=path.url, timeout=30) as http:
            body = {"model": "m", "messages": MESSAGES}
            await http.post("/v1/chat/completions", json=body, headers={"traceparent": given})
        await until(lambda: len(sink.of("process")) == 2)
        alone, continued = sink.of("process")
        assert (alone.parent, alone.context.trace_flags.sampled) == (None, True)
        assert f"{continued.parent.span_id:016x}" == PARENT
        assert not continued.context.trace_flags.sampled  # kept, so that an exporter can heed it; history does not
        first, second = stub.requests
        assert first.header("traceparent") is None
        assert second.header("traceparent").startswith(f"00-{TRACE}-")


async def test_the_producers_sampler_decides_for_the_whole_trace(valkey, monkeypatch) -> None:
    with tracing_producers(monkeypatch, ALWAYS_OFF) as produced:
        async with StubBackend(json_answer(b"{}")) as stub, recorded(valkey.url, f"{stub.url}/v1") as (path, sink):
            await path.client.complete(model="m", messages=MESSAGES)
            await until(lambda: len(sink.spans) == 3)
            assert produced.get_finished_spans() == ()
            assert [span.context.trace_flags.sampled for span in sink.spans] == [False] * 3
            assert stub.requests[0].header("traceparent").endswith("-00")


async def test_the_running_span_of_the_caller_is_the_parent(valkey, group, produced) -> None:
    context = trace.SpanContext(int(TRACE, 16), int(PARENT, 16), False, trace.TraceFlags(1))
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        with trace.use_span(trace.NonRecordingSpan(context)):
            await client.submit(model="m", messages=MESSAGES)
    [send] = produced.get_finished_spans()
    assert (send.context.trace_id, send.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))


async def test_a_refused_submit_ends_the_producers_span_with_an_error(valkey, produced) -> None:
    group, sink = unique_group(), Kept()
    pools = [{"pool_id": "default", "max_queue_depth": 1}]
    configure(valkey.url, group, default_document() | {"pools": pools})
    async with recording(valkey.url, group, sink), DispatchClient(valkey.url, fabric_group=group) as client:
        await client.submit(model="m", messages=MESSAGES)
        with pytest.raises(RequestRefused):
            await client.submit(model="m", messages=MESSAGES)
        await until(lambda: len(sink.of("process")) == 1)
    admitted, refused = produced.get_finished_spans()
    assert (admitted.status.status_code, refused.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert attributes(refused)[names.ERROR_TYPE] == "pool_full"
    [process] = sink.of("process")
    assert process.parent.span_id == refused.context.span_id
    assert attributes(process)[names.ENDING] == "rejected"
    assert attributes(process)[names.ERROR_TYPE] == "pool_full"


async def test_a_run_that_is_broken_off_says_where_it_ran(valkey) -> None:
    async with StubBackend(Script((Hold(),))) as stub, recorded(valkey.url, f"{stub.url}/v1") as (path, sink):
        with pytest.raises(RequestEnded):
            await path.client.complete(model="m", messages=MESSAGES, timeout=0.4)
        await until(lambda: len(sink.spans) == 3)
        process, client, _ = by_kind(sink)
        assert attributes(process)[names.ENDING] == "expired"
        for span in (process, client):
            assert attributes(span)[names.ERROR_TYPE] == "deadline_exceeded"
            assert attributes(span)[names.ERROR_MESSAGE]
            assert attributes(span)[names.BACKEND_ADDRESS] == f"{stub.url}/v1"
            assert span.status.status_code is StatusCode.ERROR
        assert attributes(client)[names.SERVER_PORT] == stub.port


async def test_every_ending_leaves_its_dispatch_span(valkey) -> None:
    group, sink = unique_group(), Kept()
    pools = [{"pool_id": "default"}, {"pool_id": "twice", "delivery": "at_least_once", "max_attempts": 1}]
    pools.append({"pool_id": "off", "enabled": False})
    configure(valkey.url, group, default_document() | {"lease_ms": 900, "liveness_ms": 900, "pools": pools})
    hand = ByHand(valkey.url, group)
    async with recording(valkey.url, group, sink):
        ways = end_in_every_way(hand)
        await until(lambda: len(sink.requests()) == len(ways), within_s=20)
    found = {attributes(span)[names.REQUEST_ID]: attributes(span)[names.ENDING] for span in sink.of("process")}
    assert found == ways
    assert set(ways.values()) == set(ENDINGS)
    assert max(sink.requests().values()) == 1
    never_ran = {"malformed", "producer_gone", "rejected"}
    counts = Counter(span.name.partition(" ")[0] for span in sink.spans)
    assert counts["chat"] == len(ways) - len(never_ran) - 2  # one was cancelled and one expired while it waited
    hand.close()


def end_in_every_way(hand: ByHand) -> dict[str, str]:
    ways = end_in_most_ways(hand)
    [dead] = hand.submit("twice")
    hand.settle(hand.claim(1), outcome=Outcome.LOST)
    hand.refusal("off")
    return ways | {dead: "dead", f"r{len(ways) + 2}": "rejected"}


async def test_no_prompt_and_no_key_is_in_any_span_or_record(valkey, produced, monkeypatch) -> None:
    monkeypatch.setenv("PLANTED_KEY", KEY)
    echo = json.dumps({"error": {"message": f"cannot do {MARKER}", "type": "x", "code": 400}}).encode()
    text = [{"role": "user", "content": MARKER}]
    refusing = Script(json_answer(echo, status=400).steps)
    async with StubBackend([json_answer(completion()), refusing]) as stub:
        url = f"{stub.url}/v1"
        endpoints = [{"endpoint_id": "default", "url": url, "api_key_env": "PLANTED_KEY"}]
        async with recorded(valkey.url, url, endpoints=endpoints) as (path, sink):
            await path.client.complete(model="m", messages=text, metadata={"team": "a"})
            with pytest.raises(RequestEnded):
                await path.client.complete(model="m", messages=text)
            await until(lambda: len(sink.spans) == 6)
            assert len(stub.requests) == 2
            with eye(valkey.url) as client:
                records = [client.xrange(key(path.group, name)) for name in ("endings", "deliveries", "events")]
        spans = [*sink.spans, *produced.get_finished_spans()]
        said = "".join(span.to_json() for span in spans) + repr(records)
        assert MARKER not in said
        assert KEY not in said
        assert f"127.0.0.1:{stub.port}/v1" in said


def completion() -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": MARKER}, "finish_reason": "stop"}
    return json.dumps({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]}).encode()

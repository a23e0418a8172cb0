"""Queued and direct, side by side: the same bytes reach the endpoint, the same reply comes back."""

from __future__ import annotations

from collections import Counter

import anyio
import anyio.to_thread
import msgspec
import pytest

from dispatch import DispatchClient, Gateway, GatewaySettings
from dispatch.backend import Endpoint
from dispatch.contract import Operation, Reply, read_call
from dispatch.errors import BackendError, ConfigurationError, DispatchError, InvalidRequest, RequestEnded, StateConflict
from dispatch.producer.options import CallOptions
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.groups import configure, default_document, unique_group
from tests.support.producing import MESSAGES, say
from tests.support.stub import Fin, Hold, Script, StubBackend, Write, answer_bytes, json_answer
from tests.support.valkey import ValkeyProcess, free_port

pytestmark = pytest.mark.anyio

_ANSWER = (
    '{"id":"c1","object":"chat.completion","created":1,"model":"m-1","choices":[{"index":0,"message":{"role":'
    '"assistant","content":"a\\u2028b é 漢 🙂"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,'
    '"completion_tokens":5,"total_tokens":8},"x_big":123456789012345678901234567890}'
).encode()
_ODD_BODY = (
    b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x\xe2\x80\xa8y"},{"type":"image_url",'
    b'"image_url":{"url":"data:image/png;base64,AAAA"}}]}],"seed":123456789012345678901234567890,'
    b'"top_p":0.10000000000000001,"chat_template_kwargs":{"enable_thinking":false},"x_vendor":{"k":[1e400,null]},'
    b'"temperature":1.0}'
)
_ANSWERS = {
    "good": json_answer(_ANSWER, headers=[("x-request-id", "backend-1"), ("set-cookie", "a=b")]),
    "caller_error": json_answer(
        b'{"error":{"message":"no","type":"invalid","param":null,"code":null}}', status="400 Bad Request"
    ),
    "overloaded": json_answer(b'{"error":{"message":"busy"}}', status="429 Too Many Requests"),
    "garbage": Script((Write(answer_bytes(b"<html>")), Fin())),
    "cut": Script((Write(answer_bytes(_ANSWER)[:-20]), Fin())),
}
_LARGE_BODY = b'{"model":"m","messages":[],"pad":"' + b"x" * 100_000 + b'"}'


@pytest.mark.parametrize("kind", list(_ANSWERS))
@pytest.mark.parametrize("body", [_ODD_BODY, _LARGE_BODY], ids=["odd", "large"])
async def test_the_same_bytes_go_and_the_same_reply_comes(valkey: ValkeyProcess, kind: str, body: bytes) -> None:
    call = read_call(Operation.CHAT_COMPLETIONS, body)
    options = CallOptions(pool_id="backfill", request_id="r-1", timeout_ms=20_000)
    async with StubBackend(_ANSWERS[kind]) as stub:
        group = _group(valkey.url, stub.url)
        settings = GatewaySettings(valkey_url=valkey.url, fabric_group=group, port=0)
        async with (
            Gateway(settings),
            DispatchClient(valkey.url, fabric_group=group) as queued,
            DispatchClient(direct=True, endpoint=Endpoint(endpoint_id="default", url=stub.url)) as direct,
        ):
            through_queue = await queued.call(call, options)
            straight = await direct.call(call, options)
        first, second = stub.requests
    assert first.body == second.body == body
    assert first.method == second.method == "POST"
    assert first.target == second.target
    assert sorted(first.headers) == sorted(second.headers)
    assert through_queue.queue_ms is not None
    assert (straight.queue_ms, straight.attempt) == (None, 1)
    assert _comparable(through_queue) == _comparable(straight)
    assert straight.ending == ("succeeded" if kind == "good" else "failed")
    if kind == "good":
        assert straight.body == _ANSWER
        assert straight.text() == "a\u2028b é 漢 🙂"


async def test_completions_batches_and_errors_are_the_same_on_both_paths(valkey: ValkeyProcess) -> None:
    async with StubBackend([json_answer(_ANSWER)] * 4 + [_ANSWERS["caller_error"]]) as stub:
        group = _group(valkey.url, stub.url)
        settings = GatewaySettings(valkey_url=valkey.url, fabric_group=group, port=0)
        items = [
            {"model": "m", "messages": say("x")},
            {"model": "m", "messages": MESSAGES, "metadata": {"page_count": "9"}},
        ]
        outcomes: list[list[str]] = []
        async with (
            Gateway(settings),
            DispatchClient(valkey.url, fabric_group=group) as queued,
            DispatchClient(direct=True, endpoint=stub.url) as direct,
        ):
            for client in (queued, direct):
                reply = await client.complete(model="m", messages=MESSAGES, temperature=0.5)
                outcomes.append([reply.text(), *[_kind(result) for result in await client.batch_generate(items)]])
            with pytest.raises(RequestEnded, match="400 Bad Request"):
                await queued.complete(model="m", messages=MESSAGES)
            with pytest.raises(BackendError, match="400 Bad Request") as caught:
                await direct.complete(model="m", messages=MESSAGES)
        assert caught.value.reply.status == 400
        assert outcomes[0] == outcomes[1] == ["a\u2028b é 漢 🙂", "Reply", "InvalidRequest"]
        assert sorted(Counter(request.body for request in stub.requests).values()) == [2, 2, 2]  # one of each path


async def test_a_direct_call_has_a_deadline_and_ends_with_its_task() -> None:
    async with StubBackend(Script((Hold(),))) as silent, DispatchClient(direct=True, endpoint=silent.url) as client:
        with pytest.raises(BackendError) as caught:
            await client.complete(model="m", messages=MESSAGES, timeout=0.2)
        assert caught.value.reply.ending == "expired"
        with anyio.move_on_after(0.2):
            await client.complete(model="m", messages=MESSAGES, timeout=60)
        await silent.until(lambda stub: stub.open_connections == 0)
    with pytest.raises(StateConflict, match="not open"):
        await client.complete(model="m", messages=MESSAGES)


async def test_an_address_where_nobody_answers_is_named_without_its_credentials() -> None:
    where = f"127.0.0.1:{free_port()}/v1"
    async with DispatchClient(direct=True, endpoint=f"http://user:hidden@{where}") as client:
        with pytest.raises(BackendError) as caught:
            await client.complete(model="m", messages=MESSAGES)
    assert f"(http://{where})" in str(caught.value)
    assert "hidden" not in str(caught.value)


async def test_the_blocking_client_goes_direct_too() -> None:
    async with StubBackend(json_answer(_ANSWER)) as stub:

        def work() -> list[str]:
            with BlockingClient(direct=True, endpoint=stub.url) as client:
                reply = client.complete(model="m", messages=MESSAGES)
                assert reply.queue_ms is None
                items = [{"model": "m", "messages": say(str(number))} for number in range(20)]
                return [_kind(result) for result in client.batch_generate(items, concurrency=5)]

        assert await anyio.to_thread.run_sync(work) == ["Reply"] * 20
        assert len(stub.requests) == 21


def test_direct_needs_an_endpoint_and_a_queue_needs_a_url() -> None:
    with pytest.raises(ConfigurationError, match="direct=True needs an endpoint"):
        DispatchClient(direct=True)
    with pytest.raises(ConfigurationError, match="endpoint is only for direct=True"):
        DispatchClient("valkey://127.0.0.1", endpoint="http://127.0.0.1/v1")
    with pytest.raises(ConfigurationError, match="URL is missing"):
        DispatchClient(fabric_group="g")
    with pytest.raises(InvalidRequest, match="producer_id"):
        BlockingClient("valkey://127.0.0.1", producer_id="a:b")


def _group(url: str, endpoint_url: str) -> str:
    name = unique_group()
    configure(url, name, default_document(endpoint_url))
    return name


def _comparable(reply: Reply) -> Reply:
    """Leave out what tells the two paths apart: who ran it, and how long it took."""
    head = msgspec.structs.replace(
        reply.head,
        gateway_id=None,
        dispatcher_id=None,
        endpoint_id=None,
        headers=tuple(item for item in reply.head.headers if item[0] != "date"),
    )
    return msgspec.structs.replace(reply, head=head, queue_ms=None, execution_ms=None)


def _kind(result: Reply | DispatchError) -> str:
    return type(result).__name__

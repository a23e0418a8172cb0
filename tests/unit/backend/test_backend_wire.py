"""What goes over the wire: bytes, headers, connections, proxies; and what never leaves."""

from __future__ import annotations

import hashlib
import random

import anyio
import pytest
from structlog.testing import capture_logs

from dispatch.backend import EndpointClient, transport
from dispatch.contract import Call, Operation
from tests.support.calls import COMPLETION, chat_call, endpoint_at
from tests.support.stub import CERTIFICATE, Fin, Hold, Script, StubBackend, Write, answer_bytes, free_port, json_answer

pytestmark = pytest.mark.anyio

OK = json_answer(COMPLETION)


async def test_the_call_travels_byte_for_byte_with_the_endpoints_own_headers(client: EndpointClient) -> None:
    body = (
        b'{ "model":"m","messages":[],"seed":123456789012345678901234567890,"top_p":0.10000000000000001,'
        b'"x_vendor":{"k":[1e400,null]},"t":"a\xe2\x80\xa8b\\ud83d\\u0000","model2":1.0 }\n'
    )
    async with StubBackend(OK) as stub:
        execution = await client.execute(endpoint_at(stub.url, api_key="sk-1"), chat_call(body), deadline_s=5)
        [request] = stub.requests
    assert execution.outcome == "succeeded"
    assert execution.body == COMPLETION
    assert execution.execution_ms >= 1
    assert request.body == body
    assert (request.method, request.target) == ("POST", "/v1/chat/completions")
    headers = dict(request.headers)
    assert len(headers) == len(request.headers)
    assert headers == {
        "host": f"127.0.0.1:{stub.port}",
        "accept": "application/json",
        "accept-encoding": "gzip",
        "authorization": "Bearer sk-1",
        "content-length": str(len(body)),
        "content-type": "application/json",
        "user-agent": "fabric-dispatch",
    }


@pytest.mark.parametrize("operation", list(Operation))
async def test_operations_have_their_paths(client: EndpointClient, operation: Operation) -> None:
    async with StubBackend(OK) as stub:
        call = Call(operation=operation, body=b'{"model":"m"}', model="m")
        await client.execute(endpoint_at(stub.url), call, deadline_s=5)
        [request] = stub.requests
    assert request.target == f"/v1/{operation.path}"
    assert request.header("authorization") is None


async def test_models_are_asked_for_without_a_body(client: EndpointClient) -> None:
    async with StubBackend(json_answer(b'{"object":"list","data":[]}')) as stub:
        execution = await client.models(endpoint_at(stub.url, api_key="sk-1"), deadline_s=5)
        [request] = stub.requests
    assert (execution.outcome, execution.verdict) == ("succeeded", "good")
    assert (request.method, request.target, request.body) == ("GET", "/v1/models", b"")
    assert request.header("authorization") == "Bearer sk-1"


async def test_thirty_large_bodies_at_once_arrive_unchanged(client: EndpointClient) -> None:
    noise = random.Random(7)
    bodies = [noise.randbytes(1_000_000 + 131_072 * (n % 3) + n) for n in range(30)]
    async with StubBackend(OK) as stub, anyio.create_task_group() as tasks:
        for body in bodies:
            tasks.start_soon(lambda body=body: client.execute(endpoint_at(stub.url), chat_call(body), deadline_s=20))
    seen = sorted(hashlib.sha256(request.body).digest() for request in stub.requests)
    assert seen == sorted(hashlib.sha256(body).digest() for body in bodies)


@pytest.mark.parametrize("size", [0, 1, 131_071, 131_072, 131_073, 262_144, 3_000_000])
async def test_bodies_of_every_size_have_their_length(client: EndpointClient, size: int) -> None:
    body = b"x" * size
    async with StubBackend(OK) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(body), deadline_s=5)
        [request] = stub.requests
    assert execution.outcome == "succeeded"
    assert request.body == body
    assert request.header("content-length") == str(size)
    assert request.header("transfer-encoding") is None


async def test_a_connection_is_used_again(client: EndpointClient) -> None:
    async with StubBackend(OK) as stub:
        for _ in range(20):
            await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
        await client.execute(endpoint_at(stub.url), chat_call(b"y" * 500_000), deadline_s=5)
        assert len(stub.connections) == 1
        assert len(stub.requests) == 21


async def test_there_is_no_bound_on_connections(client: EndpointClient) -> None:
    async with StubBackend(Script((Hold(),))) as silent, anyio.create_task_group() as tasks:
        for _ in range(250):
            tasks.start_soon(lambda: client.execute(endpoint_at(silent.url), chat_call(), deadline_s=20))
        await silent.until(lambda seen: len(seen.requests) == 250)
        tasks.cancel_scope.cancel()


async def test_cookies_are_not_kept(client: EndpointClient) -> None:
    async with StubBackend(json_answer(COMPLETION, headers=[("set-cookie", "lb=7; Path=/")])) as stub:
        for _ in range(2):
            execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
            assert "set-cookie" not in dict(execution.head.headers)
        assert all(request.header("cookie") is None for request in stub.requests)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(client: EndpointClient, status: int) -> None:
    async with StubBackend(OK) as other:
        answer = answer_bytes(b"", status=f"{status} Moved", headers=[("location", f"{other.url}/v1/chat/completions")])
        async with StubBackend(Script((Write(answer),))) as stub:
            execution = await client.execute(endpoint_at(stub.url, api_key="k"), chat_call(), deadline_s=5)
        assert other.connections == []
    assert (execution.outcome, execution.verdict, execution.head.status) == ("failed", "failure", status)
    assert execution.body == b""


@pytest.mark.parametrize("status", ["500 Oops", "503 Busy", "429 Slow"])
async def test_nothing_is_retried(client: EndpointClient, status: str) -> None:
    async with StubBackend([json_answer(b'{"error":{}}', status=status), OK]) as stub:
        execution = await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
        assert len(stub.requests) == 1
    assert execution.outcome == "failed"


async def test_a_kept_connection_that_breaks_is_not_silently_retried(client: EndpointClient) -> None:
    async with StubBackend([OK, Script((Fin(),)), OK]) as stub:
        endpoint = endpoint_at(stub.url)
        await client.execute(endpoint, chat_call(), deadline_s=5)
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert (execution.outcome, execution.retryable) == ("failed", True)
        assert len(stub.requests) == 2


@pytest.mark.parametrize("use_proxy", [False, True])
async def test_proxy_variables_count_only_where_configured(
    client: EndpointClient, monkeypatch: pytest.MonkeyPatch, use_proxy: bool
) -> None:
    async with StubBackend(OK) as proxy, StubBackend(OK) as stub:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.replace("//", "//me:s3cret@"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        endpoint = endpoint_at(stub.url, use_proxy=use_proxy, api_key="k")
        execution = await client.execute(endpoint, chat_call(), deadline_s=5)
        assert execution.outcome == "succeeded"
        assert (len(proxy.requests), len(stub.requests)) == ((1, 0) if use_proxy else (0, 1))
        if use_proxy:
            [request] = proxy.requests
            assert request.target == f"{stub.url}/v1/chat/completions"
            assert request.header("proxy-authorization") == "Basic bWU6czNjcmV0"
            assert request.header("authorization") == "Bearer k"
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            await client.execute(endpoint, chat_call(), deadline_s=5)
            assert len(stub.requests) == 1


async def test_a_proxy_that_is_away_is_said(client: EndpointClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", f"http://me:s3cret@127.0.0.1:{free_port()}")
    execution = await client.execute(endpoint_at("http://10.0.0.9", use_proxy=True), chat_call(), deadline_s=5)
    assert execution.head.error is not None
    assert "proxy" in execution.head.error.message
    assert "s3cret" not in execution.head.error.message
    assert execution.retryable is True


@pytest.mark.parametrize("trusted", [False, True])
async def test_certificates_are_checked(client: EndpointClient, monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    transport._trust.cache_clear()
    try:
        async with StubBackend(OK, secure=True) as stub:
            execution = await client.execute(endpoint_at(stub.url, api_key="k"), chat_call(), deadline_s=5)
            assert len(stub.requests) == trusted
    finally:
        transport._trust.cache_clear()
    if trusted:
        assert execution.outcome == "succeeded"
        return
    assert (execution.verdict, execution.retryable) == ("failure", True)
    assert execution.head.error is not None
    assert "certificate is not trusted" in execution.head.error.message


async def test_netrc_is_not_read(
    client: EndpointClient, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password s3cret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with StubBackend(OK) as stub:
        for use_proxy in (False, True):
            await client.execute(endpoint_at(stub.url, use_proxy=use_proxy), chat_call(), deadline_s=5)
        assert all(request.header("authorization") is None for request in stub.requests)


async def test_the_key_is_in_no_log_and_no_result(client: EndpointClient) -> None:
    answers = [
        Script((Fin(),)),
        Script((Write(b"HTTP/1.1 abc\r\nsk-s3cret: sk-s3cret\r\n\r\n"), Fin())),
        Script((Write(b"sk-s3cret"), Fin())),
        json_answer(b'{"error":{"message":"bad key sk-s3cret"}}', status="401 No"),
        json_answer(b'{"error":{"message":"bad key sk-s3cret"}}', status="403 No"),
        json_answer(b"<p>sk-s3cret", status="500 No"),
        json_answer(b"sk-s3cret"),
    ]
    with capture_logs() as logs:
        async with StubBackend(answers) as stub:
            endpoint = endpoint_at(stub.url, api_key="sk-s3cret")
            found = [await client.execute(endpoint, chat_call(), deadline_s=5) for _ in answers]
        found.append(await client.execute(endpoint, chat_call(), deadline_s=5))
    assert all(execution.outcome == "failed" for execution in found)
    assert len(logs) >= 4
    assert "s3cret" not in f"{logs}{found}"


async def test_an_answer_on_a_kept_connection_follows_a_cut_one_on_a_new_one(client: EndpointClient) -> None:
    cut = answer_bytes(COMPLETION)[:-10]
    async with StubBackend([OK, Script((Write(cut), Fin())), OK]) as stub:
        endpoint = endpoint_at(stub.url)
        outcomes = [(await client.execute(endpoint, chat_call(), deadline_s=5)).outcome for _ in range(3)]
        assert outcomes == ["succeeded", "failed", "succeeded"]
        assert len(stub.connections) == 2


async def test_a_closed_client_says_so(client: EndpointClient) -> None:
    await client.aclose()
    await client.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await client.execute(endpoint_at("http://127.0.0.1:1"), chat_call(), deadline_s=5)


async def test_closing_closes_kept_connections() -> None:
    async with StubBackend(OK) as stub:
        async with EndpointClient() as client:
            await client.execute(endpoint_at(stub.url), chat_call(), deadline_s=5)
        await stub.until(lambda seen: seen.open_connections == 0)
        assert stub.connections[0].closed_by == "client"

"""`dispatch gateway` as a process: killed, told to stop at any moment, started wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from dispatch.errors import RequestEnded
from dispatch.fabric import functions
from dispatch.fabric.connection import Connection
from dispatch.fabric.schema import key
from dispatch.producer.client import DispatchClient
from tests.support.calls import COMPLETION
from tests.support.gateway_process import GatewayProcess
from tests.support.producing import MESSAGES, eye, said, say, until, wide_group
from tests.support.stub import Pause, Script, SeenRequest, StubBackend, Write, answer_bytes
from tests.support.valkey import ValkeyProcess, free_port

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": MESSAGES}


def answer_after(seconds: float) -> Script:
    return Script((Pause(seconds), Write(answer_bytes(COMPLETION, headers=[("content-type", "application/json")]))))


def group_at(valkey: ValkeyProcess, stub: StubBackend, **more: Any) -> str:
    return wide_group(valkey.url, endpoints=[{"endpoint_id": "default", "url": f"{stub.url}/v1"}], **more)


async def in_flight(connection: Connection, group: str) -> int:
    return int((await connection.run(group, functions.fabric_snapshot("group")))["in_flight"])


async def post(url: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(f"{url}/v1/chat/completions", json=CHAT, **more)


async def test_it_serves_http_and_stops_on_sigterm_when_the_call_under_way_is_answered(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(answer_after(0.5)) as stub,
        GatewayProcess(valkey.url, group_at(valkey, stub)) as gateway,
    ):
        call = asyncio.create_task(post(gateway.url))
        await until(lambda: len(stub.requests) == 1)
        gateway.signal(signal.SIGTERM)
        answer = await call
        assert answer.status_code == 200
        assert answer.content == COMPLETION
        assert await gateway.ended(2) == 0
        with pytest.raises(httpx.ConnectError):
            await post(gateway.url)
        assert "Traceback" not in gateway.stderr


async def test_killed_it_leaves_no_slot_taken_and_its_callers_are_told(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    answers = [answer_after(30)] * 4 + [answer_after(0)]
    async with StubBackend(answers) as stub:
        group = group_at(valkey, stub, lease_ms=1500, total_concurrent_dispatch=4)
        async with (
            GatewayProcess(valkey.url, group) as first,
            DispatchClient(valkey.url, fabric_group=group) as client,
        ):
            calls = [asyncio.create_task(client.complete(model="m", messages=MESSAGES)) for _ in range(4)]
            await until(lambda: len(stub.requests) == 4)
            async with GatewayProcess(valkey.url, group) as second:
                waiting = asyncio.create_task(client.complete(model="m", messages=MESSAGES))
                first.signal(signal.SIGKILL)
                killed = time.monotonic()
                ended = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(one, RequestEnded) and one.reply.ending == "lost" for one in ended), ended
                assert time.monotonic() - killed < 3.5
                assert (await waiting).succeeded
                assert await in_flight(connection, group) == 0
                second.signal(signal.SIGTERM)
                assert await second.ended(8) == 0


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=[pytest.mark.long] if phase > 1 else []) for phase in range(20)]
)
async def test_a_drain_returns_the_rest_in_order_with_no_attempt_counted(
    valkey: ValkeyProcess, connection: Connection, phase: int
) -> None:
    chance, seen = random.Random(phase), list[int]()

    def answer(request: SeenRequest) -> Script:
        seen.append(int(said(request.body)))
        return answer_after(0.2)

    async with StubBackend(answer) as stub:
        group = group_at(valkey, stub, total_concurrent_dispatch=2)
        async with (
            GatewayProcess(valkey.url, group, slots=2, drain_timeout_ms=5000) as gateway,
            DispatchClient(valkey.url, fabric_group=group) as client,
        ):
            calls = []
            for number in range(8):
                calls.append(asyncio.create_task(client.complete(model="m", messages=say(str(number)))))
                await anyio.sleep(0.005)
            await anyio.sleep(chance.uniform(0.1, 0.5))
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended(4) == 0
            done = [number for number, call in enumerate(calls) if call.done()]
            assert sorted(seen) == done == list(range(len(done)))  # what ran has finished and is told
            rows = (await connection.run(group, functions.fabric_snapshot("waiting", subject="default")))["rows"]
            assert len(rows) == 8 - len(done)
            async with GatewayProcess(valkey.url, group, slots=2):
                replies = await asyncio.gather(*calls)
            assert len(seen) == 8
            assert [number // 2 for number in seen] == [number // 2 for number in range(8)]  # two at once
            assert {reply.attempt for reply in replies} == {1}


async def test_what_outlasts_the_drain_is_told_and_the_process_ends_in_time(valkey: ValkeyProcess) -> None:
    async with StubBackend(answer_after(30)) as stub:
        group = group_at(valkey, stub)
        async with (
            GatewayProcess(valkey.url, group, drain_timeout_ms=500) as gateway,
            DispatchClient(valkey.url, fabric_group=group) as client,
        ):
            call = asyncio.create_task(client.complete(model="m", messages=MESSAGES))
            over_http = asyncio.create_task(post(gateway.url))
            await until(lambda: len(stub.requests) == 2)
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended(2.5) == 0
            with pytest.raises(RequestEnded) as caught:
                await call
            assert caught.value.reply.ending == "lost"
            answer = await over_http
            assert answer.status_code == 502
            assert answer.headers["x-dispatch-reason"] == "ended-lost"
            await until(lambda: all(one.connection.closed_by == "client" for one in stub.requests))


async def test_a_second_signal_does_not_wait(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(answer_after(30)) as stub,
        GatewayProcess(valkey.url, group_at(valkey, stub), drain_timeout_ms=60_000) as gateway,
    ):
        call = asyncio.create_task(post(gateway.url))
        await until(lambda: len(stub.requests) == 1)
        gateway.signal(signal.SIGINT)
        await until(lambda: gateway.event("gateway_draining") is not None)
        gateway.signal(signal.SIGINT)
        assert await gateway.ended(2.5) == 0
        assert (await call).status_code == 502


async def test_http_callers_in_the_queue_are_told_when_it_stops(valkey: ValkeyProcess) -> None:
    async with StubBackend(answer_after(0.2)) as stub:
        group = group_at(valkey, stub, total_concurrent_dispatch=1)
        async with GatewayProcess(valkey.url, group, drain_timeout_ms=800) as gateway:
            calls = [asyncio.create_task(post(gateway.url)) for _ in range(4)]
            await until(lambda: len(stub.requests) == 1)
            gateway.signal(signal.SIGTERM)
            assert await gateway.ended(2.8) == 0
            statuses = sorted([(await one).status_code for one in calls])
            assert statuses[0] == 200
            assert statuses[-1] == 503
        with eye(valkey.url) as other:
            await until(lambda: other.zcard(key(group, "leases")) == 0)


@pytest.mark.parametrize("client", ["glide", "redis"])
async def test_it_ends_in_time_also_when_the_server_stands_still(
    start_valkey: Callable[..., ValkeyProcess], client: str
) -> None:
    server = start_valkey()
    async with StubBackend(answer_after(30)) as stub:
        group = group_at(server, stub)
        async with GatewayProcess(server.url, group, drain_timeout_ms=300, valkey_client=client) as gateway:
            call = asyncio.create_task(post(gateway.url))
            await until(lambda: len(stub.requests) == 1)
            server.pause()
            try:
                gateway.signal(signal.SIGTERM)
                sent = time.monotonic()
                assert await gateway.ended(4) == 0
                assert time.monotonic() - sent < 2.4, gateway.stderr
            finally:
                server.resume()
            assert "Traceback" not in gateway.stderr
            with contextlib.suppress(httpx.HTTPError):  # its outcome cannot be known in time
                assert (await call).status_code in (502, 503)


async def test_a_signal_while_it_starts_ends_it_at_once(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    server.pause()
    gateway = GatewayProcess(server.url, "g", endpoint_url="http://127.0.0.1:9/v1")
    try:
        gateway.launch()
        await until(lambda: _listens(gateway), within_s=20)
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended(15) == 0  # 0: by the signal; had it waited for the server, it would have failed
        assert "Traceback" not in gateway.stderr
    finally:
        gateway.close()
        server.resume()


def _listens(gateway: GatewayProcess) -> bool:
    """Whether the process has its signal handlers (it listens first, then installs them, then connects)."""
    with open(f"/proc/{gateway.process.pid}/status") as status:  # noqa: PTH123 - a file of the kernel
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("settings", "said_"),
    [
        ({"valkey_url": ""}, "DISPATCH_VALKEY_URL (--valkey-url) is missing"),
        ({"valkey_url": "valkey://127.0.0.1:1"}, "does not answer: connection refused"),
        ({"slots": "many"}, "DISPATCH_SLOTS (--slots): 'many' is not allowed; a whole number from 1 to 2048"),
        ({"config_file": "/absent.yaml"}, "/absent.yaml: cannot be read: No such file or directory"),
        ({"host": "203.0.113.1"}, "'203.0.113.1' is no address of this machine"),
        ({"fabric_group": "unconfigured-GROUP"}, "DISPATCH_ENDPOINT_URL (--endpoint-url) is missing"),
        (
            {
                "fabric_group": "unconfigured-GROUP",
                "endpoint_url": "http://127.0.0.1:9/v1",
                "endpoint_api_key_env": "NO_SUCH_KEY",
            },
            "environment variable NO_SUCH_KEY (api_key_env) is not set or empty",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_wrong_start_is_one_sentence_and_an_exit_code(
    valkey: ValkeyProcess, settings: dict[str, Any], said_: str
) -> None:
    group = uuid.uuid4().hex
    values = {name: str(value).replace("GROUP", group) for name, value in settings.items()}
    gateway = GatewayProcess(**({"valkey_url": valkey.url, "group": group} | _as_arguments(values)))
    await _ends_with(gateway, said_)


def _as_arguments(values: dict[str, str]) -> dict[str, str]:
    if "fabric_group" in values:
        values["group"] = values.pop("fabric_group")
    return values


async def test_a_busy_port_is_one_sentence_and_an_exit_code(valkey: ValkeyProcess) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        await _ends_with(GatewayProcess(valkey.url, "g", port=port), f"port {port} on 127.0.0.1 is in use")


async def test_a_missing_library_is_one_sentence_and_an_exit_code(start_valkey: Callable[..., ValkeyProcess]) -> None:
    await _ends_with(GatewayProcess(start_valkey(library=False).url, "g"), "run: dispatch scripts load")


async def test_a_wrong_password_is_one_sentence_and_an_exit_code(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey(options=("--requirepass", "right"), library=False)
    url = f"valkey://:hunter2@127.0.0.1:{server.port}"
    gateway = GatewayProcess(url, "g")
    await _ends_with(gateway, "password")


async def _ends_with(gateway: GatewayProcess, sentence: str) -> None:
    try:
        gateway.launch()
        assert await gateway.ended(40) == 1
        stderr = gateway.stderr
        assert sentence in stderr
        assert "Traceback" not in stderr
        assert "hunter2" not in stderr
        plain = [line for line in stderr.splitlines() if not line.startswith("{")]
        assert len(plain) == 1
    finally:
        gateway.close()


async def test_disabled_nothing_starts_and_it_says_so() -> None:
    gateway = GatewayProcess("", "g", enabled="false")
    try:
        gateway.launch()
        assert await gateway.ended(10) == 0
        assert gateway.stderr == "queueing is disabled (DISPATCH_ENABLED): nothing is started\n"
    finally:
        gateway.close()


async def test_its_log_is_json_and_holds_no_body(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(answer_after(0)) as stub,
        GatewayProcess(valkey.url, group_at(valkey, stub), log_level="debug") as gateway,
    ):
        async with httpx.AsyncClient() as client:
            body = CHAT | {"messages": say("do-not-log-me")}
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended(8) == 0
        events = [json.loads(line) for line in gateway.stderr.splitlines()]
        assert {"gateway_started", "listening", "gateway_stopped"} <= {one["event"] for one in events}
        assert "do-not-log-me" not in gateway.stderr

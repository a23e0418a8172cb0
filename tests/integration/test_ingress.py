"""The front door when things go wrong around it: Valkey away, no library, callers that leave, a gateway that drains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from dispatch.fabric.deploy import load
from dispatch.fabric.library import current_library
from dispatch.fabric.sync import BlockingConnection
from dispatch.ingress import IngressSettings
from tests.support.calls import COMPLETION
from tests.support.producing import eye, until
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Pause, Script, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OK = json_answer(COMPLETION)


def http(path: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=path.url, timeout=10)


def reason(answer: httpx.Response) -> str:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.headers["x-dispatch-reason"]


async def until_ready(client: httpx.AsyncClient, status: int, within_s: float) -> httpx.Response:
    with anyio.fail_after(within_s):
        while (answer := await client.get("/readyz")).status_code != status:  # noqa: ASYNC110 - asked from outside
            await anyio.sleep(0.05)
    return answer


async def burst(client: httpx.AsyncClient, count: int) -> float:
    """Send calls at once whose bodies are stored beside their submit, all to be refused; returns the seconds taken."""
    started = time.monotonic()

    async def call() -> None:
        answer = await client.post(CHAT, content=json.dumps(BODY).encode().ljust(20_000))
        assert (answer.status_code, reason(answer)) == (503, "rejected-fabric_unavailable")

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(call)
    return time.monotonic() - started


@pytest.mark.parametrize("away", [ValkeyProcess.kill, ValkeyProcess.pause], ids=["killed", "frozen"])
async def test_without_valkey_calls_get_503_within_a_second(
    start_valkey: Callable[..., ValkeyProcess], away: Callable[[ValkeyProcess], None]
) -> None:
    valkey = start_valkey(aof=True)
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        away(valkey)
        took: list[float] = []
        for _ in range(3):
            started = time.monotonic()
            answer = await client.post(CHAT, json=BODY)
            took.append(time.monotonic() - started)
            assert (answer.status_code, reason(answer)) == (503, "rejected-fabric_unavailable")
            assert "not admitted" in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "true"
            assert "retry-after" not in answer.headers
        assert min(took) < 1.2  # of three, as other processes share the machine
        assert await burst(client, 30) < 3  # also those that wait for each other's bodies
        assert (await client.get("/healthz")).status_code == 200
        assert (await until_ready(client, 503, 2)).json()["reason"]
        if away is ValkeyProcess.pause:
            valkey.resume()
        else:
            valkey.start()
        await until_ready(client, 200, 10)
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.content) == (200, COMPLETION)


async def test_without_the_library_callers_are_told_and_loading_it_is_enough(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    valkey = start_valkey()
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        with eye(valkey.url) as admin:
            admin.function_flush()
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, reason(answer)) == (503, "rejected-library")
        assert "dispatch scripts load" in answer.json()["error"]["message"]
        assert "dispatch scripts load" in (await until_ready(client, 503, 2)).json()["reason"]
        with BlockingConnection(valkey.url) as connection:
            load(connection, current_library())
        await until_ready(client, 200, 10)
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_caller_that_leaves_while_queued_ends_its_request_unexecuted(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "default", "quantum": 1, "max_concurrent": 1}]
    async with StubBackend(Script((Hold(),))) as stub, stack(valkey.url, f"{stub.url}/v1", pools=pools) as path:
        async with http(path) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, CHAT)  # refused: no body; only warms the connection
            running = anyio.CancelScope()

            async def run() -> None:
                with running:
                    await client.post(CHAT, json=BODY)

            tasks.start_soon(run)
            await stub.until(lambda stub: len(stub.requests) == 1)
            with anyio.move_on_after(0.3):
                await client.post(CHAT, json=BODY)
            await until(lambda: len(path.endings()) == 1, within_s=2)
            assert path.endings()[0]["ending"] == "cancelled"
            assert path.section("group")["pending"] == 0
            running.cancel()
        # The running one: its backend call is closed and its slot is back.
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()
        await until(lambda: path.leases() == 0, within_s=2)
        assert [row["ending"] for row in path.endings()] == ["cancelled", "cancelled"]
        assert len(stub.requests) == 1
        assert path.keys("body:") == []


async def test_many_callers_that_leave_at_any_moment_leave_nothing_behind(valkey: ValkeyProcess) -> None:
    slow = Script((Pause(0.02), *OK.steps))
    pools = [{"pool_id": "default", "quantum": 1, "max_concurrent": 3}]
    async with StubBackend(slow) as stub, stack(valkey.url, f"{stub.url}/v1", pools=pools) as path:
        got: list[int] = []

        async def one(number: int) -> None:
            async with http(path) as client:
                with anyio.move_on_after(number * 0.01 if number < 39 else None):
                    got.append((await client.post(CHAT, json=BODY)).status_code)

        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                for number in range(40):
                    tasks.start_soon(one, number)
        await until(lambda: path.leases() == 0 and path.section("group")["pending"] == 0, within_s=5)
        assert got
        assert set(got) == {200}
        assert {row["ending"] for row in path.endings()} <= {"succeeded", "cancelled"}
        async with http(path) as client:
            started = time.monotonic()
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            assert time.monotonic() - started < 1


async def test_a_draining_gateway_refuses_calls_and_says_it_is_not_ready(valkey: ValkeyProcess) -> None:
    slow = Script((Pause(0.4), *OK.steps))
    async with StubBackend(slow) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client, anyio.create_task_group() as tasks:
            answers: list[httpx.Response] = []

            async def run() -> None:
                answers.append(await client.post(CHAT, json=BODY))

            tasks.start_soon(run)
            await stub.until(lambda stub: len(stub.requests) == 1)
            tasks.start_soon(partial(path.gateway.stop, timeout_ms=5_000))
            await until(lambda: path.gateway.draining)
            answer = await client.post(CHAT, json=BODY)
            assert (answer.status_code, reason(answer)) == (503, "rejected-draining")
            assert answer.headers["x-should-retry"] == "true"
            assert "shutting down" in (await client.get("/readyz")).json()["reason"]
        assert (answers[0].status_code, answers[0].content) == (200, COMPLETION)
        assert len(stub.requests) == 1


async def test_a_disabled_pool_is_503_and_a_full_group_429(valkey: ValkeyProcess) -> None:
    pools = [{"pool_id": "off", "quantum": 1, "enabled": False}, {"pool_id": "default", "quantum": 1}]
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1", pools=pools, max_queued=1) as path:
        async with http(path) as client:
            answer = await client.post(f"/pools/off{CHAT}", json=BODY)
            assert (answer.status_code, reason(answer)) == (503, "rejected-pool_disabled")
        assert stub.requests == []
        assert path.submitted() == 0


async def test_the_groups_bound_on_bodies_is_the_front_doors(valkey: ValkeyProcess) -> None:
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1", max_payload_bytes=10_000) as path:
        async with http(path) as client:
            for size, status in ((10_000, 200), (10_001, 413)):
                content = json.dumps(BODY).encode().ljust(size)
                assert (await client.post(CHAT, content=content)).status_code == status
        assert [len(seen.body) for seen in stub.requests] == [10_000]


async def test_large_bodies_arrive_whole_and_leave_no_key(valkey: ValkeyProcess) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 1_000_000}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).encode()
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        slowest = 0.0
        done = anyio.Event()

        async def probe() -> None:
            nonlocal slowest
            while not done.is_set():
                started = time.monotonic()
                assert (await client.get("/healthz")).status_code == 200
                slowest = max(slowest, time.monotonic() - started)
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(probe)
            async with anyio.create_task_group() as calls:
                answers: list[int] = []

                async def call() -> None:
                    answers.append((await client.post(CHAT, content=body)).status_code)

                for _ in range(8):
                    calls.start_soon(call)
            done.set()
        assert answers == [200] * 8
        assert all(seen.body == body for seen in stub.requests)
        assert {row["cost"] for row in path.endings()} == {3}
        assert path.keys("body:") == []
        # Client, front, gateway and backend share this test's event loop; the front alone is measured elsewhere.
        assert slowest < 1


async def test_a_burst_is_not_taken_for_an_outage(valkey: ValkeyProcess) -> None:
    """What makes a call wait here is our own queue to a server that answers."""
    body = json.dumps(BODY).encode().ljust(20_000)
    quick = IngressSettings(admission_ms=150)
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1", settings=quick) as path:
        statuses: list[int] = []

        async def call(client: httpx.AsyncClient) -> None:
            statuses.append((await client.post(CHAT, content=body)).status_code)

        async with http(path) as client, anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(call, client)
        assert statuses == [200] * 300


async def test_a_hint_of_the_caller_is_recorded_but_is_not_the_id(valkey: ValkeyProcess) -> None:
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"x-request-id": "mine", "traceparent": trace, "x-dispatch-metadata": '{"team":"a"}'}
        answers = [await client.post(CHAT, json=BODY, headers=headers) for _ in range(2)]
        ids = {answer.headers["x-dispatch-request-id"] for answer in answers}
        assert len(ids) == 2
        for request_id in ids:
            envelope = path.envelope(request_id)
            assert (envelope["caller_request_id"], envelope["request_id"]) == ("mine", request_id)
            assert (envelope["traceparent"], envelope["metadata"]) == (trace, {"team": "a"})
        assert all(seen.header("x-request-id") is None for seen in stub.requests)

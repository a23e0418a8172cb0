"""Deadlines at their edges: what is refused, what is told and when, and by whose clock."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from dispatch import DispatchClient
from dispatch.errors import DispatchError, InvalidRequest, RequestEnded
from dispatch.fabric.connection import Connection
from dispatch.fabric.functions import pool_pause
from dispatch.fabric.records import Lease
from dispatch.fabric.sync import BlockingConnection
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.calls import COMPLETION
from tests.support.echo_gateway import EchoGateway, Scripted
from tests.support.leftovers import counters_above_zero
from tests.support.producing import MESSAGES, say, stopwatch, until, wide_group
from tests.support.stack import Stack, stack
from tests.support.stub import Hold, Pause, Script, SeenRequest, StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = [pytest.mark.anyio, pytest.mark.container]

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": say("hi")}
OK = json_answer(COMPLETION)
ONE_SLOT = [{"pool_id": "default", "quantum": 1, "max_concurrent": 1}]
TOLD_WITHIN_S = 1.0
"""After a deadline. A gateway's heartbeat comes every 10 s here, and a client gives up 2 s after a deadline."""


def http(path: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=path.url, timeout=30)


def told(answer: httpx.Response) -> tuple[int, str]:
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, answer.headers["x-dispatch-reason"]


def holding_first(request: SeenRequest) -> Script:
    return Script((Hold(),)) if b"first" in request.body else OK


async def hold_the_slot(path: Stack, stub: StubBackend, tasks: anyio.abc.TaskGroup) -> None:
    async def hold() -> None:
        async with http(path) as client:
            await client.post(CHAT, json=BODY | {"user": "first"})

    tasks.start_soon(hold)
    await stub.until(lambda stub: len(stub.requests) == 1)


@pytest.mark.parametrize("value", ["0", "-1", "0.001", '"5"', "1e18", "1000000000000000000", "NaN", "", "soon"])
async def test_what_is_no_timeout_is_a_400_and_nothing_is_queued(valkey: ValkeyProcess, value: str) -> None:
    async with StubBackend(OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path, http(path) as client:
        answer = await client.post(CHAT, json=BODY, headers={"x-dispatch-timeout-ms": value})
        assert told(answer) == (400, "rejected-invalid_header")
        assert answer.json()["error"]["param"] == "x-dispatch-timeout-ms"
        assert (path.submitted(), stub.requests) == (0, [])


@pytest.mark.parametrize("value", [0, -1, "5", 1e18, float("nan"), float("inf"), True])
async def test_what_is_no_timeout_is_refused_by_the_sdk(valkey: ValkeyProcess, group: str, value: Any) -> None:
    async with DispatchClient(valkey.url, fabric_group=group) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(model="m", messages=MESSAGES, timeout=value)
    assert (caught.value.param, caught.value.status) == ("timeout", 400)


async def test_the_shortest_timeouts_end_in_one_of_the_told_ways(valkey: ValkeyProcess) -> None:
    """The deadline falls into the millisecond of the submit, of the claim, of the call, of its end."""
    statuses: set[tuple[int, str | None]] = set()

    async def call(client: httpx.AsyncClient, number: int) -> None:
        headers = {"x-dispatch-timeout-ms": str(1 + number % 12)}
        answer = await client.post(CHAT, json=BODY, headers=headers)
        statuses.add((answer.status_code, answer.headers.get("x-dispatch-reason")))

    async with StubBackend(lambda _: OK) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client:
            for _ in range(5):
                async with anyio.create_task_group() as tasks:
                    for number in range(60):
                        tasks.start_soon(call, client, number)
        assert statuses <= {(200, None), (429, "rejected-deadline"), (504, "ended-expired")}
        assert (429, "rejected-deadline") in statuses
        endings = {row["request_id"]: row["ending"] for row in path.endings()}
        assert len(stub.requests) <= len(endings)
        assert counters_above_zero(valkey.url, path.group) == {}


async def test_a_deadline_that_passes_behind_a_full_pool_is_told_at_once_and_reaches_no_backend(
    valkey: ValkeyProcess,
) -> None:
    async with (
        StubBackend(holding_first) as stub,
        stack(valkey.url, f"{stub.url}/v1", pools=ONE_SLOT) as path,
        http(path) as client,
        anyio.create_task_group() as tasks,
    ):
        await hold_the_slot(path, stub, tasks)
        passed = stopwatch()
        answer = await client.post(CHAT, json=BODY, headers={"x-dispatch-timeout-ms": "400"})
        assert 0.4 <= passed() < 0.4 + TOLD_WITHIN_S
        assert told(answer) == (429, "rejected-deadline")
        assert answer.headers["x-should-retry"] == "true"
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert "x-dispatch-execution-ms" not in answer.headers
        assert (path.endings()[0]["ending"], len(stub.requests)) == ("expired", 1)
        tasks.cancel_scope.cancel()


async def test_while_a_call_runs_its_deadline_is_a_504_and_its_connection_is_closed(valkey: ValkeyProcess) -> None:
    async with (
        StubBackend(Script((Hold(),))) as stub,
        stack(valkey.url, f"{stub.url}/v1") as path,
        http(path) as client,
    ):
        passed = stopwatch()
        answer = await client.post(CHAT, json=BODY, headers={"x-dispatch-timeout-ms": "600"})
        assert 0.5 < passed() < 0.6 + TOLD_WITHIN_S  # a gateway's deadline is never late: early by a round trip
        assert told(answer) == (504, "ended-expired")
        assert answer.headers["x-should-retry"] == "false"
        with anyio.fail_after(2):
            await stub.connections[0].closed.wait()
        await until(lambda: counters_above_zero(valkey.url, path.group) == {})


async def test_a_deadline_that_passes_before_another_attempt_is_a_504(valkey: ValkeyProcess) -> None:
    """Work may have been done by the attempt before, so it is no refusal. What waits again reaches no backend."""
    busy = json_answer(b'{"error":{"message":"busy"}}', status="503 Service Unavailable")
    pools = [{"pool_id": "default", "quantum": 1, "max_attempts": 3, "retry_base_ms": 1, "retry_cap_ms": 1}]
    async with (
        StubBackend(busy) as stub,
        stack(valkey.url, f"{stub.url}/v1", pools=pools) as path,
        http(path) as client,
        anyio.create_task_group() as tasks,
    ):
        answers: list[httpx.Response] = []

        async def call() -> None:
            answers.append(await client.post(CHAT, json=BODY, headers={"x-dispatch-timeout-ms": "3000"}))

        tasks.start_soon(call)
        await stub.until(lambda stub: len(stub.requests) == 1)
        with BlockingConnection(valkey.url) as connection:
            connection.run(path.group, pool_pause("default", "pause", actor="test"))
        await until(lambda: len(answers) == 1, within_s=3 + TOLD_WITHIN_S)
        assert told(answers[0]) == (504, "ended-expired")
        assert answers[0].headers["x-should-retry"] == "false"
        assert len(stub.requests) == 1


@pytest.mark.parametrize("kind", ["asynchronous", "blocking"])
async def test_the_sdk_is_told_though_no_gateway_is_there(valkey: ValkeyProcess, group: str, kind: str) -> None:
    count = 150  # more than one call of the server ends

    def one_by_one(done: Callable[[float], None]) -> None:
        with BlockingClient(valkey.url, fabric_group=group) as client:
            passed = stopwatch()
            items = [{"model": "m", "messages": MESSAGES, "timeout": 0.5 + passed()} for _ in range(count)]
            results = client.batch_generate(items)
            done(passed())
            check(results)

    def check(results: list[Any]) -> None:
        assert len(results) == count
        for result in results:
            assert isinstance(result, RequestEnded)
            reply = result.reply
            assert (reply.ending, reply.execution_ms) == ("expired", None)
            assert reply.queue_ms is not None  # the group's word, not this client's guess
            assert reply.queue_ms >= 500

    took: list[float] = []
    if kind == "blocking":
        await anyio.to_thread.run_sync(one_by_one, took.append)
    else:
        async with DispatchClient(valkey.url, fabric_group=group) as client:
            passed = stopwatch()
            results = await client.batch_generate([{"model": "m", "messages": MESSAGES, "timeout": 0.5}] * count)
            took.append(passed())
            check(results)
    assert took[0] < 0.5 + 1.5 + TOLD_WITHIN_S  # the submits of all of them take their time, too


async def test_a_result_between_the_deadline_and_its_settle_is_told_as_the_gateway_says(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    async def late(_lease: Lease, body: bytes) -> Scripted:
        await anyio.sleep(0.7)  # this gateway does not look at deadlines
        return Scripted(body=body)

    group = wide_group(valkey.url)
    async with EchoGateway(connection, group, late), DispatchClient(valkey.url, fabric_group=group) as client:
        reply = await client.complete(model="m", messages=MESSAGES, timeout=0.4)
        assert reply.succeeded
    assert counters_above_zero(valkey.url, group) == {}


_SKEWED = """
import sys, time
skew = float(sys.argv[3])
for name in ("time", "time_ns"):
    true = getattr(time, name)
    setattr(time, name, lambda true=true, name=name: true() + type(true())(skew * (1e9 if name == "time_ns" else 1)))
import datetime
from dispatch.sync import DispatchClient
from dispatch import errors
url, group = sys.argv[1:3]
with DispatchClient(url, fabric_group=group) as client:
    began = time.monotonic()
    try:
        client.complete(model="m", messages=[{"role": "user", "content": "never"}], timeout=0.5)
    except errors.RequestEnded as error:
        print(error.reply.ending, error.reply.queue_ms is not None, 0.4 < time.monotonic() - began < 2.0)
    other = {"model": "m", "messages": [{"role": "user", "content": "x"}], "pool": "backfill"}
    print(client.complete(**other, timeout=10).succeeded)
"""


@pytest.mark.parametrize("hours", [1, -1])
async def test_the_producers_clock_plays_no_part(
    valkey: ValkeyProcess, group: str, connection: Connection, hours: int
) -> None:
    with BlockingConnection(valkey.url) as admin:
        admin.run(group, pool_pause("default", "pause", actor="test"))
    async with EchoGateway(connection, group):
        command = [sys.executable, "-c", _SKEWED, valkey.url, group, str(hours * 3600)]
        done = await anyio.run_process(command, check=False)
    assert (done.stdout.decode(), done.stderr.decode()) == ("expired True True\nTrue\n", "")


async def test_a_body_that_took_longer_than_its_deadline_to_come_has_all_its_time_left(valkey: ValkeyProcess) -> None:
    """A timeout counts from admission."""
    content = json.dumps(BODY).encode()

    async def slowly() -> Any:
        yield content[:5]
        await anyio.sleep(0.6)
        yield content[5:]

    async with StubBackend(Script((Pause(0.1), *OK.steps))) as stub, stack(valkey.url, f"{stub.url}/v1") as path:
        async with http(path) as client:
            answer = await client.post(CHAT, content=slowly(), headers={"x-dispatch-timeout-ms": "500"})
        assert answer.status_code == 200


async def test_two_thousand_deadlines_at_once_are_told_by_a_server_that_goes_on(
    valkey: ValkeyProcess, group: str
) -> None:
    endings: list[str] = []

    async def one(client: DispatchClient) -> None:
        try:
            await client.complete(model="m", messages=MESSAGES, timeout=3)
        except RequestEnded as error:
            endings.append(error.reply.ending)
        except DispatchError as error:
            endings.append(repr(error))

    async with DispatchClient(valkey.url, fabric_group=group) as client:
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(2_000):
                tasks.start_soon(one, client)
        took = time.monotonic() - began
    assert set(endings) == {"expired"}
    assert took < 3 + 10
    assert counters_above_zero(valkey.url, group) == {}

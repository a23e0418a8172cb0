"""The asynchronous client when waiters leave, answers are lost, the server stands still or comes back."""

from __future__ import annotations

import random
import time

import anyio
import pytest
import redis

from dispatch import DispatchClient
from dispatch.errors import DispatchError, FabricUnavailable, RequestEnded, StateConflict
from dispatch.fabric import glide as glide_client
from dispatch.fabric.connection import Connection
from dispatch.fabric.schema import key
from dispatch.producer.queued import QueuedPath
from tests.conftest import load_library
from tests.support.echo_gateway import EchoGateway
from tests.support.groups import configure, unique_group
from tests.support.producing import (
    MESSAGES,
    after,
    connected,
    eye,
    frames_left,
    never,
    owner,
    said,
    say,
    stopwatch,
    until,
    wide_group,
)
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

LATE_S = 1.0


async def test_no_reply_is_lost_or_late_when_waiters_leave_and_the_server_freezes(start_valkey) -> None:
    server: ValkeyProcess = start_valkey()
    group = wide_group(server.url)
    chance = random.Random(1)
    came_at: dict[str, float] = {}
    left: list[str] = []

    async def one(number: int) -> None:
        request_id = f"r{number}"
        patience = chance.uniform(0.0, 1.5) if number < 50 else 60.0
        with anyio.move_on_after(patience) as scope:
            reply = await client.complete(model="m", messages=say(request_id), request_id=request_id, timeout=60)
            came_at[request_id] = time.monotonic()
            assert said(reply.body) == request_id
        if scope.cancelled_caught:
            left.append(request_id)

    frozen: list[tuple[float, float]] = []
    async with connected(server.url) as connection, EchoGateway(connection, group, after(0.2, 2.0)) as gateway:
        async with DispatchClient(server.url, fabric_group=group, producer_id="p") as client:
            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    tasks.start_soon(one, number)
                await anyio.sleep(0.3)
                for _ in range(2):
                    begin = time.monotonic()
                    server.pause()
                    await anyio.sleep(1.2)
                    server.resume()
                    frozen.append((begin, time.monotonic()))
                    await anyio.sleep(0.2)
            await until(lambda: frames_left(server.url, group, "p") == 0)
            await until(lambda: _blocked(server.url) <= 3)  # this client's pump, the gateway's two waits
        assert left
        assert set(came_at) == {f"r{number}" for number in range(200)} - set(left)
        late = {name: _awake(gateway.settled_at[name], at, frozen) for name, at in came_at.items()}
        assert max(late.values()) < LATE_S, late
        assert set(gateway.runs.values()) == {1}


async def test_a_reopened_client_gets_its_replies_while_those_of_the_closed_one_still_come(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    group = wide_group(valkey.url)
    async with EchoGateway(connection, group, after(0.0, 0.4)) as gateway:
        for run in range(3):
            async with (
                DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client,
                anyio.create_task_group() as tasks,
            ):
                for number in range(40):
                    tasks.start_soon(_complete_quietly, client, f"{run}-{number}")
                await until(lambda: len(gateway.runs) > 20 + 40 * run)  # noqa: B023 - awaited in this turn
                if run < 2:
                    tasks.cancel_scope.cancel()
        async with DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client:
            reply = await client.complete(model="m", messages=say("last"), timeout=10)
            assert said(reply.body) == "last"
            await until(lambda: frames_left(valkey.url, group, "p") == 0)


async def test_submits_whose_answer_is_lost_are_one_request_each(start_valkey) -> None:
    server: ValkeyProcess = start_valkey()
    group = wide_group(server.url)
    replies: dict[int, str] = {}

    async def one(number: int) -> None:
        large = "x" * 5000 if number % 7 == 0 else ""
        reply = await client.complete(model="m", messages=say(f"{number}{large}"), timeout=60)
        replies[number] = said(reply.body).rstrip("x")

    with eye(server.url) as look:
        async with (
            connected(server.url) as connection,
            EchoGateway(connection, group, after(0.0, 0.3)) as gateway,
            DispatchClient(server.url, fabric_group=group) as client,
        ):
            async with anyio.create_task_group() as tasks:
                for burst in range(15):
                    for number in range(20):
                        tasks.start_soon(one, burst * 20 + number)
                    await anyio.sleep(0.02)
                    _kill_clients(look)
            assert replies == {number: str(number) for number in range(300)}
            assert set(gateway.runs.values()) == {1}
            assert len(gateway.runs) == 300
            await until(lambda: frames_left(server.url, group, client.producer_id or "") == 0)


async def test_submits_that_time_out_at_a_frozen_server_are_one_request_each(
    start_valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: ValkeyProcess = start_valkey()
    group = wide_group(server.url)
    monkeypatch.setattr(glide_client, "REQUEST_TIMEOUT_S", 0.25)
    async with (
        connected(server.url) as connection,
        EchoGateway(connection, group) as gateway,
        DispatchClient(server.url, fabric_group=group) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(4):
            server.pause()
            for number in range(10):
                tasks.start_soon(_complete_quietly, client, str(number))
            await anyio.sleep(0.6)
            server.resume()
            await anyio.sleep(0.1)
    assert len(gateway.runs) == 40
    assert set(gateway.runs.values()) == {1}


async def test_a_waiting_request_is_cancelled_when_its_caller_leaves(valkey: ValkeyProcess, group: str) -> None:
    async with DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client:
        with anyio.move_on_after(0.1):
            await client.complete(model="m", messages=MESSAGES, request_id="gone", timeout=60)
        with eye(valkey.url) as look:
            await until(lambda: look.hget(key(group, "request", id="gone"), "ending") == b"cancelled")
        await until(lambda: frames_left(valkey.url, group, "p") == 0)
        await until(lambda: client._path.inbox.busy() is False)
        assert client._path.inbox.dropped == 1


async def test_a_running_request_is_stopped_when_its_caller_leaves(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async with (
        EchoGateway(connection, group, never) as gateway,
        DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_complete_quietly, client, "gone")
            await until(lambda: bool(gateway.leases))
            tasks.cancel_scope.cancel()
        await until(lambda: len(gateway.cancelled) == 1, within_s=1.0)
        await until(lambda: frames_left(valkey.url, group, "p") == 0)


async def test_closing_cancels_what_is_outstanding_and_tells_the_callers(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    group = wide_group(valkey.url)
    outcomes: list[str] = []

    async def one(client: DispatchClient) -> None:
        try:
            await client.complete(model="m", messages=MESSAGES, timeout=60)
        except RequestEnded as error:
            outcomes.append(error.reply.ending)

    async with EchoGateway(connection, group, never, slots=5) as gateway, anyio.create_task_group() as tasks:
        client = DispatchClient(valkey.url, fabric_group=group)
        await client.__aenter__()
        for _ in range(20):
            tasks.start_soon(one, client)
        await until(lambda: len(gateway.leases) == 5)
        passed = stopwatch()
        await client.aclose()
        assert passed() < 2.0
    assert outcomes == ["cancelled"] * 20
    assert len(gateway.cancelled) == 5
    with pytest.raises(StateConflict, match="not open"):
        await client.complete(model="m", messages=MESSAGES)


async def test_closing_at_a_frozen_server_is_bounded_and_tells_the_callers(start_valkey) -> None:
    server: ValkeyProcess = start_valkey()
    group = wide_group(server.url)
    errors: list[DispatchError] = []

    async def one(client: DispatchClient) -> None:
        try:
            await client.complete(model="m", messages=MESSAGES, timeout=60)
        except DispatchError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        async with DispatchClient(server.url, fabric_group=group, close_ms=300) as client:
            for _ in range(5):
                tasks.start_soon(one, client)
            await until(lambda: len(client._path.inbox.outstanding(admitted_only=True)) == 5)
            server.pause()
            tasks.start_soon(one, client)  # this one never gets its submit answered
            await anyio.sleep(0.05)
            passed = stopwatch()
        assert passed() < 4.0
        server.resume()
    assert len(errors) == 6
    assert {type(error) for error in errors} <= {StateConflict, FabricUnavailable}


async def test_liveness_survives_killed_connections_and_a_restarted_server(start_valkey) -> None:
    server: ValkeyProcess = start_valkey(aof=True)
    group = unique_group()
    configure(server.url, group)
    async with (
        connected(server.url) as connection,
        EchoGateway(connection, group) as gateway,
        DispatchClient(server.url, fabric_group=group, producer_id="p", liveness_ms=900) as client,
    ):
        mine = owner(server.url, group, "p")
        with eye(server.url) as look:
            for _ in range(5):
                _kill_clients(look)
                await anyio.sleep(0.25)
                assert owner(server.url, group, "p") == mine
        server.stop()
        await anyio.sleep(1.0)  # longer than the marker lives
        server.start()
        await until(lambda: owner(server.url, group, "p") == mine, within_s=2.0)
        reply = await client.complete(model="m", messages=say("after"), timeout=20)
        assert said(reply.body) == "after"
        assert set(gateway.runs.values()) == {1}


async def test_liveness_survives_a_blocked_event_loop(valkey: ValkeyProcess, group: str) -> None:
    async with DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=600):
        with eye(valkey.url) as look:
            end = time.monotonic() + 2.0
            while time.monotonic() < end:  # plain computing, no await
                remaining = look.pttl(key(group, "alive", producer="p"))
                assert remaining > 0
                sum(range(20_000))


async def test_callers_are_told_when_the_group_has_forgotten_their_requests(start_valkey) -> None:
    server: ValkeyProcess = start_valkey()
    group = unique_group()
    configure(server.url, group)
    async with DispatchClient(server.url, fabric_group=group) as client, anyio.create_task_group() as tasks:
        errors: list[FabricUnavailable] = []

        async def wait() -> None:
            with pytest.raises(FabricUnavailable, match="does not know request") as caught:
                await client.complete(model="m", messages=MESSAGES, timeout=60)
            errors.append(caught.value)

        tasks.start_soon(wait)
        await until(lambda: bool(client._path.inbox.outstanding(admitted_only=True)))
        server.kill()  # without AOF: everything is gone
        server.start()
        load_library(server.url)
        await until(lambda: bool(errors), within_s=30.0)  # half of the call's own timeout


async def test_callers_are_told_when_the_group_took_their_producer_for_gone(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async with DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=300) as client:
        path = client._path
        assert isinstance(path, QueuedPath)
        endings: list[str] = []

        async def wait() -> None:
            with pytest.raises(RequestEnded) as caught:
                await client.complete(model="m", messages=MESSAGES, request_id="r", timeout=60)
            endings.append(caught.value.reply.ending)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: bool(path.inbox.outstanding(admitted_only=True)))
            path._liveness.stop()  # as if this process had been stopped
            await until(lambda: owner(valkey.url, group, "p") is None)
            async with EchoGateway(connection, group):
                with eye(valkey.url) as look:
                    await until(lambda: look.hget(key(group, "request", id="r"), "ending") == b"producer_gone")
            path._interrupted()  # what the liveness thread asks for after a lapse
    assert endings == ["producer_gone"]


async def _complete_quietly(client: DispatchClient, text: str) -> None:
    reply = await client.complete(model="m", messages=say(text), timeout=60)
    assert said(reply.body) == text


def _awake(begin: float, end: float, frozen: list[tuple[float, float]]) -> float:
    """Return how long of `begin` to `end` the server was not frozen."""
    return end - begin - sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in frozen)


def _kill_clients(look: redis.Redis) -> None:
    look.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def _blocked(url: str) -> int:
    with eye(url) as look:
        return sum("b" in client["flags"] for client in look.client_list())

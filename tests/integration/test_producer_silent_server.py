"""A server that answers nobody holds no blocking caller up for longer than its request's deadline and two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import redis

from dispatch.errors import DispatchError, FabricUnavailable, OutcomeUnknown
from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.producer.bodies import BODIES_AT_ONCE
from dispatch.producer.client import DispatchClient as AsyncClient
from dispatch.producer.options import ClientName
from dispatch.sync import DispatchClient
from tests.support.echo_gateway import EchoGateway
from tests.support.producing import MESSAGES, eye, wide_group
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyProcess

TIMEOUT_S = 1.0
LATEST_S = TIMEOUT_S + 2.0
LAST_LOOK_S = 0.9
SLOW_MACHINE_S = 2.0
"""A call that waits for the server's answer without a bound of its own takes five seconds at least, and often ten."""


def outcome(client: DispatchClient) -> tuple[DispatchError, float]:
    """Make a call that cannot succeed; returns its error and how long it took."""
    started = time.monotonic()
    with pytest.raises(DispatchError) as caught:
        client.complete(model="m", messages=MESSAGES, timeout=TIMEOUT_S)
    return caught.value, time.monotonic() - started


def test_a_submit_that_is_not_answered_is_given_up_in_time(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    with DispatchClient(server.url, fabric_group=wide_group(server.url), close_ms=200) as client:
        server.pause()
        error, took_s = outcome(client)
        server.resume()
    assert isinstance(error, FabricUnavailable)
    assert took_s < LATEST_S + SLOW_MACHINE_S


def test_callers_of_queued_requests_are_told_in_time_though_the_server_stands_still_at_their_deadline(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    with DispatchClient(server.url, fabric_group=group, close_ms=200) as client, ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(outcome, client) for _ in range(8)]
        until_queued(server, group, len(calls))  # no gateway: they wait
        server.pause()
        outcomes = [call.result() for call in calls]
        server.resume()
    assert {type(error) for error, _ in outcomes} == {OutcomeUnknown}
    assert max(took_s for _, took_s in outcomes) < LATEST_S + SLOW_MACHINE_S


def test_readers_of_streams_are_told_in_time_though_the_server_stands_still_at_their_deadline(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    """Not a second later to look once more: that is for who was held up by its own process."""
    server = start_valkey()
    group = wide_group(server.url)

    def read(client: DispatchClient, after_s: float) -> float:
        time.sleep(after_s)
        started = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            next(client.stream(model="m", messages=MESSAGES, timeout=TIMEOUT_S))
        return time.monotonic() - started

    with DispatchClient(server.url, fabric_group=group, close_ms=200) as client, ThreadPoolExecutor(9) as threads:
        readers = [threads.submit(read, client, number / 20) for number in range(9)]
        until_queued(server, group, len(readers))
        server.pause()
        took_s = [reader.result() for reader in readers]
        server.resume()
    assert min(took_s) < LATEST_S + LAST_LOOK_S
    assert max(took_s) < LATEST_S + LAST_LOOK_S + SLOW_MACHINE_S


@pytest.mark.anyio
async def test_the_same_holds_for_readers_of_asynchronous_streams(start_valkey: Callable[..., ValkeyProcess]) -> None:
    server = start_valkey()
    group = wide_group(server.url)
    took_s: list[float] = []

    async def read(client: AsyncClient, after_s: float) -> None:
        await anyio.sleep(after_s)
        started = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            await anext(client.stream(model="m", messages=MESSAGES, timeout=TIMEOUT_S))
        took_s.append(time.monotonic() - started)

    async with AsyncClient(server.url, fabric_group=group, close_ms=200) as client:
        async with anyio.create_task_group() as tasks:
            for number in range(9):
                tasks.start_soon(read, client, number / 20)
            await anyio.to_thread.run_sync(until_queued, server, group, 9)
            server.pause()
        server.resume()
    assert min(took_s) < LATEST_S + LAST_LOOK_S
    assert max(took_s) < LATEST_S + LAST_LOOK_S + SLOW_MACHINE_S


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["glide", "redis"])
async def test_a_large_body_does_not_wait_behind_others_that_a_silent_server_does_not_take(
    name: ClientName, start_valkey: Callable[..., ValkeyProcess]
) -> None:
    server = start_valkey()
    large = [{"role": "user", "content": "x" * 10_000}]
    async with AsyncClient(server.url, fabric_group=wide_group(server.url), client=name, close_ms=200) as client:
        server.pause()
        async with anyio.create_task_group() as tasks:
            for _ in range(2 * BODIES_AT_ONCE):
                tasks.start_soon(partial(client.complete, model="m", messages=large, timeout=60))
            await anyio.wait_all_tasks_blocked()
            started = time.monotonic()
            with pytest.raises(FabricUnavailable):
                await client.complete(model="m", messages=large, timeout=TIMEOUT_S)
            assert time.monotonic() - started < LATEST_S + SLOW_MACHINE_S
            tasks.cancel_scope.cancel()
        server.resume()


def until_queued(server: ValkeyProcess, group: str, count: int) -> None:
    """Wait until so many requests are in the group."""
    with eye(server.url) as watcher:
        while watcher.zcard(f"{{{group}}}:zset:llm:deadlines") < count:
            time.sleep(0.01)


@pytest.mark.anyio
async def test_replies_are_not_held_up_by_asking_what_became_of_many_requests(
    start_valkey: Callable[..., ValkeyProcess],
) -> None:
    """After an interruption each request is asked after: in few round trips, not in one for each."""
    valkey, count = start_valkey(), 200  # its own: it counts what is read
    group = wide_group(valkey.url)
    connection = await connect(valkey.url)
    async with TcpProxy(valkey.port) as proxy:

        def call_all() -> float:
            """Make the calls, cut the connections, have a gateway answer; returns how long the replies took then."""
            url = f"valkey://127.0.0.1:{proxy.port}"
            with DispatchClient(url, fabric_group=group) as client, ThreadPoolExecutor(count) as threads:
                calls = [
                    threads.submit(client.complete, model="m", messages=MESSAGES, timeout=60) for _ in range(count)
                ]
                until_queued(valkey, group, count)
                with eye(valkey.url) as watcher:
                    asked = reads(watcher)
                    proxy.cut()
                    proxy.delay_s = 0.05
                    while reads(watcher) == asked:  # now it asks
                        time.sleep(0.01)
                started = time.monotonic()
                anyio.from_thread.run_sync(queued.set)
                assert all(call.result().succeeded for call in calls)
                return time.monotonic() - started

        queued = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_when, queued, connection, group)
            took_s = await anyio.to_thread.run_sync(call_all)
            tasks.cancel_scope.cancel()
    await connection.aclose()
    assert took_s < count * 0.05


def reads(watcher: redis.Redis) -> int:
    """Return how many reading functions the server has run."""
    return int(watcher.info("commandstats").get("cmdstat_fcall_ro", {"calls": 0})["calls"])


async def serve_when(queued: anyio.Event, connection: Connection, group: str) -> None:
    await queued.wait()
    async with EchoGateway(connection, group):
        await anyio.sleep_forever()

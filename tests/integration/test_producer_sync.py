"""The blocking client against a real server, from many threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import anyio.to_thread
import pytest

from dispatch.errors import (
    FabricUnavailable,
    InvalidRequest,
    LibraryProblem,
    PoolUnknown,
    RequestEnded,
    RequestRefused,
    StateConflict,
)
from dispatch.fabric.connection import Connection
from dispatch.fabric.records import Lease, Outcome
from dispatch.fabric.schema import key
from dispatch.sync import DispatchClient
from tests.support.echo_gateway import EchoGateway, Scripted
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
from tests.support.valkey import ValkeyProcess, free_port

pytestmark = pytest.mark.anyio


async def test_many_threads_share_one_client(valkey: ValkeyProcess, connection: Connection) -> None:
    group = wide_group(valkey.url)

    def work() -> list[str]:
        def one(number: int) -> str:
            return said(client.complete(model="m", messages=say(str(number)), timeout=30).body)

        with DispatchClient(valkey.url, fabric_group=group, producer_id="p") as client:
            with ThreadPoolExecutor(32) as threads:
                texts = list(threads.map(one, range(300)))
            _wait_until(lambda: frames_left(valkey.url, group, "p") == 0)
            return texts

    async with EchoGateway(connection, group, after(0.0, 0.1)) as gateway:
        assert await anyio.to_thread.run_sync(work) == [str(number) for number in range(300)]
    assert set(gateway.runs.values()) == {1}


async def test_a_batch_keeps_order_and_shows_failures_at_their_place(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async def odd_ones_fail(_lease: Lease, body: bytes) -> Scripted:
        return Scripted(body=body, outcome=Outcome.FAILED if int(said(body)) % 2 else Outcome.SUCCEEDED)

    items = [{"model": "m", "messages": say(str(number)), "pool": "backfill"} for number in range(40)]
    items[4] = {"model": "m", "messages": MESSAGES, "pool": "nope"}
    items[6] = {"model": "m", "messages": say("x"), "temperature": float("inf")}
    steps: list[tuple[int, int]] = []

    def work() -> list[object]:
        with DispatchClient(valkey.url, fabric_group=group) as client:
            return list(client.batch_generate(items, lambda done, total: steps.append((done, total)), concurrency=7))

    async with EchoGateway(connection, group, odd_ones_fail):
        results = await anyio.to_thread.run_sync(work)
    assert steps == [(done, 40) for done in range(1, 41)]
    assert isinstance(results[4], PoolUnknown)
    assert isinstance(results[6], InvalidRequest)
    for number in set(range(40)) - {4, 6}:
        result = results[number]
        body = result.reply.body if isinstance(result, RequestEnded) else result.body  # type: ignore[attr-defined] - a Reply
        assert isinstance(result, RequestEnded) == bool(number % 2)
        assert said(body) == str(number)


async def test_an_error_of_the_progress_callback_cancels_the_rest(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async def first_only(_lease: Lease, body: bytes) -> Scripted:
        if said(body) != "0":
            await anyio.sleep_forever()
        return Scripted(body=body)

    def work() -> None:
        def fail(_done: int, _total: int) -> None:
            raise RuntimeError("enough")

        with DispatchClient(valkey.url, fabric_group=group) as client, pytest.raises(RuntimeError, match="enough"):
            client.batch_generate([{"model": "m", "messages": say(str(number))} for number in range(5)], fail)

    async with EchoGateway(connection, group, first_only) as gateway:
        await anyio.to_thread.run_sync(work)
        await until(lambda: len(gateway.cancelled) == 4)


@pytest.mark.parametrize("size", [4_097, 70_000, 3_000_000])
async def test_large_bodies_travel_both_ways_and_are_freed(
    valkey: ValkeyProcess, group: str, connection: Connection, size: int
) -> None:
    def work() -> str:
        with DispatchClient(valkey.url, fabric_group=group) as client:
            return said(client.complete(model="m", messages=say("x" * size), timeout=30).body)

    async with EchoGateway(connection, group):
        assert await anyio.to_thread.run_sync(work) == "x" * size
    with eye(valkey.url) as look:
        await until(lambda: not list(look.scan_iter(f"{{{group}}}:body:*", count=1000)))


async def test_errors_are_those_of_the_asynchronous_client(valkey: ValkeyProcess, start_valkey) -> None:
    group = wide_group(valkey.url, max_payload_bytes=10_000)
    bare = start_valkey(library=False)

    def work() -> None:
        with DispatchClient(valkey.url, fabric_group=group) as client:
            with pytest.raises(PoolUnknown) as unknown:
                client.complete(model="m", messages=MESSAGES, pool="nope")
            assert "interactive" in unknown.value.known
            with pytest.raises(RequestRefused) as refused:
                client.complete(model="m", messages=say("x" * 10_000))
            assert refused.value.reason == "body_too_large"
            with pytest.raises(RequestEnded) as ended:
                client.complete(model="m", messages=MESSAGES, timeout=0.1)
            assert ended.value.reply.ending == "expired"
        with pytest.raises(StateConflict, match="not open"):
            client.complete(model="m", messages=MESSAGES)
        with pytest.raises(LibraryProblem, match="dispatch scripts load"), DispatchClient(bare.url):
            pass
        with (
            pytest.raises(FabricUnavailable, match="does not answer"),
            DispatchClient(f"valkey://127.0.0.1:{free_port()}"),
        ):
            pass

    await anyio.to_thread.run_sync(work)


async def test_closing_cancels_what_is_outstanding_and_tells_the_threads(
    valkey: ValkeyProcess, connection: Connection
) -> None:
    group = wide_group(valkey.url)
    outcomes: list[str] = []

    def one(client: DispatchClient) -> None:
        with pytest.raises(RequestEnded) as caught:
            client.complete(model="m", messages=MESSAGES, timeout=60)
        outcomes.append(caught.value.reply.ending)

    async with EchoGateway(connection, group, never, slots=3) as gateway:
        client = await anyio.to_thread.run_sync(partial(DispatchClient, valkey.url, fabric_group=group))
        await anyio.to_thread.run_sync(client.__enter__)
        threads = [threading.Thread(target=one, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        await until(lambda: len(gateway.leases) == 3)
        passed = stopwatch()
        await anyio.to_thread.run_sync(client.close)
        assert passed() < 2.5
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join)
    assert outcomes == ["cancelled"] * 8


async def test_the_newest_client_takes_a_producer_over(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    def work() -> None:
        with (
            ThreadPoolExecutor(1) as thread,
            DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=300) as older,
        ):
            waiting = thread.submit(older.complete, model="m", messages=MESSAGES, request_id="old")
            _wait_until(lambda: "old" in gateway.leases)
            with DispatchClient(valkey.url, fabric_group=group, producer_id="p", liveness_ms=300):
                newest = owner(valkey.url, group, "p")
                with pytest.raises(StateConflict, match="another session owns producer 'p'"):
                    waiting.result(5)
                with pytest.raises(StateConflict, match="another session owns producer 'p'"):
                    older.complete(model="m", messages=MESSAGES)
                time.sleep(0.3)  # longer than two beats: the older one must not take it back
                assert owner(valkey.url, group, "p") == newest
                passed = stopwatch()
                older.close()
                assert passed() < 1.0

    async with EchoGateway(connection, group, never) as gateway:
        await anyio.to_thread.run_sync(work)
        await until(lambda: gateway.cancelled == ["old"])
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-p")]


async def test_replies_come_through_killed_connections_and_a_restart(start_valkey) -> None:
    server: ValkeyProcess = start_valkey(aof=True)
    group = unique_group()
    configure(server.url, group)

    def work() -> list[str]:
        def one(number: int) -> str:
            return said(client.complete(model="m", messages=say(str(number)), timeout=30).body)

        with DispatchClient(server.url, fabric_group=group, producer_id="p", liveness_ms=6000) as client:
            mine = owner(server.url, group, "p")
            with ThreadPoolExecutor(16) as threads, eye(server.url) as look:
                texts = threads.map(one, range(200))
                for _ in range(10):
                    look.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    time.sleep(0.02)
                server.restart()
                found = list(texts)
            _wait_until(lambda: owner(server.url, group, "p") == mine)
            return found

    async with connected(server.url) as connection, EchoGateway(connection, group, after(0.0, 0.1)) as gateway:
        assert await anyio.to_thread.run_sync(work) == [str(number) for number in range(200)]
    assert set(gateway.runs.values()) == {1}


_FORK = """
import os, sys
from dispatch.sync import DispatchClient
url, group = sys.argv[1:]
with DispatchClient(url, fabric_group=group, producer_id="parent") as client:
    one = client.complete(model="m", messages=[{"role": "user", "content": "parent"}], timeout=10)
    child = os.fork()
    if child == 0:
        reply = client.complete(model="m", messages=[{"role": "user", "content": "child"}], timeout=10)
        assert client.producer_id == f"parent.{os.getpid()}", client.producer_id
        assert b"child" in reply.body
        client.close()
        os._exit(7)
    two = client.complete(model="m", messages=[{"role": "user", "content": "again"}], timeout=10)
    assert b"parent" in one.body and b"again" in two.body
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert client.producer_id == "parent"
"""

_ASYNC_FORK = """
import asyncio, os, sys
from dispatch import DispatchClient, errors
url, group = sys.argv[1:]
async def main():
    async with DispatchClient(url, fabric_group=group) as client:
        child = os.fork()
        if child == 0:
            call = client.complete(model="m", messages=[{"role": "user", "content": "child"}])
            try:
                call.send(None)
            except errors.StateConflict as error:
                assert "forked child" in str(error)
            try:
                client.aclose().send(None)  # closing there touches nothing of the parent's
            except StopIteration:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        reply = await client.complete(model="m", messages=[{"role": "user", "content": "parent"}], timeout=10)
        assert b"parent" in reply.body
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [_FORK, _ASYNC_FORK], ids=["blocking", "asynchronous"])
async def test_a_forked_child_is_never_the_parents_producer(
    valkey: ValkeyProcess, group: str, connection: Connection, program: str
) -> None:
    async with EchoGateway(connection, group):
        done = await anyio.run_process([sys.executable, "-c", program, valkey.url, group], check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


_INTERRUPTED = """
import sys
from dispatch.sync import DispatchClient
url, group = sys.argv[1:]
with DispatchClient(url, fabric_group=group) as client:
    try:
        client.complete(model="m", messages=[{"role": "user", "content": "x"}], request_id="stopped", timeout=60)
    except KeyboardInterrupt:
        print("interrupted")
"""


async def test_ctrl_c_stops_the_request(valkey: ValkeyProcess, group: str, connection: Connection) -> None:
    async with EchoGateway(connection, group, never) as gateway:
        command = [sys.executable, "-c", _INTERRUPTED, valkey.url, group]
        async with await anyio.open_process(command, stderr=subprocess.STDOUT) as process:
            await until(lambda: "stopped" in gateway.leases)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            with anyio.fail_after(5):
                said_there = b"".join([piece async for piece in process.stdout])
            assert (said_there.decode(), await process.wait()) == ("interrupted\n", 0)
        await until(lambda: gateway.cancelled == ["stopped"])
        with eye(valkey.url) as look:
            await until(lambda: look.hget(key(group, "request", id="stopped"), "ending") == b"cancelled")


def _wait_until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

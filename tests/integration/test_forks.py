"""What a forked child does with its parent's client, and that its parent's connections do not notice.

`tests/behaviours/test_forks.py` has the sessions and the signs of life.
"""

from __future__ import annotations

import sys

import anyio
import pytest

from dispatch.fabric.connection import Connection
from tests.support.calls import COMPLETION
from tests.support.echo_gateway import EchoGateway
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

_HEAD = """
import asyncio, gc, os, signal, sys
from dispatch import DispatchClient, errors
from dispatch.sync import DispatchClient as BlockingClient

place, group = sys.argv[1:]
signal.alarm(30)  # nothing here may outlive its test
os.register_at_fork(after_in_child=lambda: signal.alarm(20))
CALL = {"model": "m", "messages": [{"role": "user", "content": "x"}], "timeout": 10}

def in_child(work):
    # The child ends as an interpreter does: finalisers, exit handlers, garbage.
    child = os.fork()
    if child == 0:
        work()
        gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""

_DIRECT = """
client = BlockingClient(direct=True, endpoint=place)
client.__enter__()
client.complete(**CALL)
for _ in range(2):
    in_child(lambda: (client.complete(**CALL), client.close()))
    in_child(lambda: client.complete(**CALL))  # and not closed
    in_child(lambda: None)
    client.complete(**CALL)
client.close()
"""

_QUEUED = """
import redis

def connections():
    # Of the process, by the names that the server gives them.
    return {row["id"] for row in eye.client_list() if row["id"] != mine}

eye = redis.Redis.from_url(place.replace("valkey://", "redis://"))
mine = str(eye.client_id())
before_opening = connections()
client = BlockingClient(place, fabric_group=group, liveness_ms=600)
client.__enter__()
client.complete(**CALL)
before = connections() - before_opening
names = set()

def work():
    assert client.producer_id is None  # until it is used here
    client.complete(**CALL)
    child = client.producer_id
    assert child not in (None, parent)
    in_child(lambda: (client.complete(**CALL), check(client.producer_id not in (None, parent, child))))
    client.complete(**CALL)
    client.close()

def check(holds):
    assert holds

parent = client.producer_id
for _ in range(2):
    in_child(work)
    in_child(client.close)  # closes nothing of the parent's
    in_child(lambda: None)
client.complete(**CALL)
assert client.producer_id == parent
assert before <= connections(), (before, connections())
client.close()
"""

_ASYNCHRONOUS = """
def refused(make):
    coroutine = make()
    try:
        coroutine.send(None)
    except errors.StateConflict as error:
        assert "cannot be used in a forked child" in str(error), error
        assert "open a new DispatchClient there" in str(error), error
        return
    raise AssertionError("it was not refused")

async def main():
    options = {"direct": True, "endpoint": place} if place.startswith("http") else {"url": place, "fabric_group": group}
    async with DispatchClient(**options) as client:
        await client.complete(**CALL)

        def work():
            refused(lambda: client.complete(**CALL))
            refused(client.__aenter__)
            assert client.producer_id is None
            try:
                client.aclose().send(None)
            except StopIteration:
                return

        child = os.fork()
        if child == 0:
            work()
            gc.collect()
            os._exit(7)  # out of the middle of a loop that runs
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        await client.complete(**CALL)

asyncio.run(main())
"""

_ENDING = """
import threading
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

def wait_for(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

def drop():
    global client
    del client

options = {"direct": True, "endpoint": place} if place.startswith("http") else {"url": place, "fabric_group": group}
client = DispatchClient(**options) if options.get("direct") else DispatchClient(**options, client="redis")
wait_for(client.__aenter__())
wait_for(client.complete(**CALL))
for _ in range(2):
    in_child(lambda: None)
    wait_for(client.complete(**CALL))
    in_child(drop)
    wait_for(client.complete(**CALL))
wait_for(client.aclose())
"""


async def run(program: str, place: str, group: str = "-") -> None:
    done = await anyio.run_process([sys.executable, "-c", _HEAD + program, place, group], check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


async def test_a_direct_blocking_client_goes_on_in_a_child_and_its_parent_keeps_its_connection() -> None:
    async with StubBackend(json_answer(COMPLETION)) as stub:
        await run(_DIRECT, f"{stub.url}/v1")
    assert len(stub.requests) == 7


async def test_a_queued_blocking_client_goes_on_in_children_and_grandchildren(
    valkey: ValkeyProcess, group: str, connection: Connection
) -> None:
    async with EchoGateway(connection, group) as gateway:
        await run(_QUEUED, valkey.url, group)
    assert len({lease.producer_id for lease in gateway.leases.values()}) == 5
    assert len(gateway.runs) == 8


@pytest.mark.parametrize("path", ["queued", "direct"])
async def test_an_asynchronous_client_tells_a_child_what_to_do(
    valkey: ValkeyProcess, group: str, connection: Connection, path: str
) -> None:
    async with StubBackend(json_answer(COMPLETION)) as stub, EchoGateway(connection, group):
        await run(_ASYNCHRONOUS, valkey.url if path == "queued" else f"{stub.url}/v1", group)


@pytest.mark.parametrize("path", ["queued", "direct"])
async def test_a_child_that_ends_or_drops_the_client_takes_nothing_from_its_parents_event_loop(
    valkey: ValkeyProcess, group: str, connection: Connection, path: str
) -> None:
    async with StubBackend(json_answer(COMPLETION)) as stub, EchoGateway(connection, group):
        await run(_ENDING, valkey.url if path == "queued" else f"{stub.url}/v1", group)

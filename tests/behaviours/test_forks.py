"""A forked child is a producer of its own, or is told why not; its parent goes on as if it had never forked."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field

import anyio
import pytest

from dispatch.fabric.connection import Connection
from tests.behaviours.scene import assert_settled, endings
from tests.support.calls import COMPLETION
from tests.support.echo_gateway import EchoGateway
from tests.support.producing import after, owner
from tests.support.stub import StubBackend, json_answer
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio

_HEAD = """
import asyncio, multiprocessing, os, signal, sys, threading
from dispatch import DispatchClient, errors
from dispatch.sync import DispatchClient as BlockingClient

url, group, client_name = sys.argv[1:]
forks = multiprocessing.get_context("fork")
bound = lambda: signal.alarm(20)  # nothing here may outlive its test
bound()
os.register_at_fork(after_in_child=bound)

def say(text):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "timeout": 20}

def ended(process):
    process.join(20)
    assert process.exitcode == 0, process.exitcode
"""

_NEW_CLIENTS_IN_CHILDREN = """
async def child(inherited):
    try:
        await inherited.complete(**say("with the parent's client"))
    except errors.StateConflict as error:
        assert "forked child" in str(error), error
    else:
        raise AssertionError("a child used its parent's client")
    async with DispatchClient(url, fabric_group=group, client=client_name) as own:
        assert own.producer_id != "parent"
        replies = await asyncio.gather(*(own.complete(**say(f"child {n}")) for n in range(10)))
        assert [f"child {n}".encode() in reply.body for n, reply in enumerate(replies)] == [True] * 10
    with BlockingClient(url, fabric_group=group) as own:
        own.complete(**say("blocking"))

async def main():
    async with DispatchClient(
        url, fabric_group=group, producer_id="parent", liveness_ms=1500, client=client_name
    ) as client:
        calls = [asyncio.create_task(client.complete(**say(f"parent {n}"))) for n in range(10)]
        await asyncio.sleep(0.05)
        children = [forks.Process(target=lambda: asyncio.run(child(client))) for _ in range(2)]
        for process in children:
            process.start()
        while any(process.is_alive() for process in children):
            await asyncio.sleep(0.02)
        for process in children:
            ended(process)
        replies = await asyncio.gather(*calls)
        assert [f"parent {n}".encode() in reply.body for n, reply in enumerate(replies)] == [True] * 10
        await client.complete(**say("again"))

asyncio.run(main())
"""

_INHERITED_BLOCKING = """
def child(number):
    replies = [client.complete(**say(f"child {number} {n}")) for n in range(5)]
    assert all(f"child {number} {n}".encode() in reply.body for n, reply in enumerate(replies))
    assert client.producer_id == f"parent.{os.getpid()}", client.producer_id
    client.close()

with BlockingClient(url, fabric_group=group, producer_id="parent", liveness_ms=1500) as client:
    found = []
    work = lambda n: found.append(client.complete(**say(f"parent {n}")))
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    children = [forks.Process(target=child, args=(number,)) for number in range(3)]
    for process in children:
        process.start()
    for process in children:
        ended(process)
    for thread in threads:
        thread.join()
    assert len(found) == 8
    client.complete(**say("again"))
    assert client.producer_id == "parent"
"""

_CHILD_THAT_ENDS_AT_ONCE = """
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()

def run(call):
    return asyncio.run_coroutine_threadsafe(call, loop).result(20)

client = DispatchClient(url, fabric_group=group, producer_id="parent", liveness_ms=1500, client=client_name)
run(client.__aenter__())
pending = asyncio.run_coroutine_threadsafe(client.complete(**say("pending")), loop)
for _ in range(3):
    child = os.fork()
    if child == 0:
        sys.exit(0)  # with everything an interpreter does at its end: finalisers, exit handlers, garbage
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert b"pending" in pending.result(20).body
assert b"again" in run(client.complete(**say("again"))).body
run(client.aclose())
"""


@dataclass
class Watch:
    """Looks at the parent's marker all the time, from a thread of its own."""

    url: str
    group: str
    owners: set[bytes | None] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while owner(self.url, self.group, "parent") is None:
            if self.over.wait(0.01):
                return
        while not self.over.wait(0.05):
            self.owners.add(owner(self.url, self.group, "parent"))


PROGRAMS = {
    "a new asynchronous client": (_NEW_CLIENTS_IN_CHILDREN, "glide"),
    "a new asynchronous client over redis": (_NEW_CLIENTS_IN_CHILDREN, "redis"),
    "the inherited blocking client": (_INHERITED_BLOCKING, "-"),
    "none": (_CHILD_THAT_ENDS_AT_ONCE, "glide"),
}


@pytest.mark.parametrize("child_uses", PROGRAMS)
async def test_a_forked_child_gets_its_own_session_and_does_not_disturb_its_parent(
    valkey: ValkeyProcess, group: str, connection: Connection, child_uses: str
) -> None:
    program, client_name = PROGRAMS[child_uses]
    watch = Watch(valkey.url, group)
    watching = threading.Thread(target=watch.run)
    watching.start()
    try:
        async with EchoGateway(connection, group, after(0.05, 0.3)) as gateway:
            command = [sys.executable, "-c", _HEAD + program, valkey.url, group, client_name]
            done = await anyio.run_process(command, check=False)
    finally:
        watch.over.set()
        watching.join()
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert set(gateway.runs.values()) == {1}
    assert set(endings(valkey.url, group).values()) == {"succeeded"}
    assert len(watch.owners - {None}) == 1  # one session of the parent's from beginning to end
    assert_settled(valkey.url, group)


_DIRECT = """
async def child(inherited):
    try:
        await inherited.complete(**say("with the parent's client"))
    except errors.StateConflict as error:
        assert "forked child" in str(error), error
    else:
        raise AssertionError("a child used its parent's client")

async def main():
    async with DispatchClient(direct=True, endpoint=url) as client:
        await client.complete(**say("first"))
        process = forks.Process(target=lambda: asyncio.run(child(client)))
        process.start()
        for _ in range(10):
            await client.complete(**(say("parent") | {"timeout": 5}))
        while process.is_alive():
            await asyncio.sleep(0.02)
        ended(process)

with BlockingClient(direct=True, endpoint=url) as blocking:
    blocking.complete(**say("first"))
    process = forks.Process(target=lambda: blocking.complete(**say("child")))
    process.start()
    blocking.complete(**say("parent"))
    ended(process)
asyncio.run(main())
"""


async def test_a_direct_client_is_not_used_in_a_forked_child() -> None:
    async with StubBackend(json_answer(COMPLETION)) as stub:
        command = [sys.executable, "-c", _HEAD + _DIRECT, f"{stub.url}/v1", "-", "-"]
        done = await anyio.run_process(command, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")

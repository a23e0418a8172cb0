"""What the behaviour tests share: gateways to start, calls to make on either client, and what must hold at the end."""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread

from dispatch import DispatchClient
from dispatch.config import GatewaySettings, edited, encode_document
from dispatch.contract import Reply
from dispatch.contract.envelope import RequestEnvelope
from dispatch.errors import RequestEnded
from dispatch.fabric import audit
from dispatch.fabric import functions as f
from dispatch.fabric.records import Lease
from dispatch.fabric.schema import key
from dispatch.fabric.sync import BlockingConnection
from dispatch.gateway import Executor, Gateway
from dispatch.sync import DispatchClient as BlockingClient
from tests.support.by_hand import ByHand
from tests.support.executors import HeldExecutor
from tests.support.gateway_process import GatewayProcess
from tests.support.leftovers import counters_above_zero, endings_by_request
from tests.support.producing import MESSAGES, eye, until

BOTH_CLIENTS = ("asynchronous", "blocking")

PATIENT: dict[str, Any] = {"breaker_failures": 1000}
"""Of an endpoint whose breaker never opens, for tests that are not about it."""

SHORT_HOLD: dict[str, Any] = {"hold_max_ms": 100}
"""Of a group in which a backend's 429 or 503 holds its endpoint for a moment only."""


def gateway_on(url: str, group: str, executor: Executor | None = None, **settings: Any) -> Gateway:
    """Make a gateway of this process; without an executor it calls the group's endpoints."""
    values: dict[str, Any] = {"valkey_url": url, "fabric_group": group, "drain_timeout_ms": 1000} | settings
    connection = values.pop("connection", None)
    return Gateway(GatewaySettings(**values), executor=executor, connection=connection)


@asynccontextmanager
async def gateway_process(url: str, group: str, **settings: Any) -> AsyncIterator[GatewayProcess]:
    """Run a gateway as a process of its own; its start may take long on a busy machine."""
    process = GatewayProcess(url, group, **settings).launch()
    try:
        await until(lambda: process.event("listening") is not None or process.code is not None, within_s=40)
        assert process.code is None, process.stderr
        yield process
    finally:
        process.close()


class Watching(HeldExecutor):
    """Counts what runs at once, by pool and by endpoint; takes `takes_s` unless it is held."""

    def __init__(self, *, held: bool = True, takes_s: float = 0.0) -> None:
        super().__init__(held=held)
        self.takes_s = takes_s
        self.order: list[str] = []
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    async def execute(self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float) -> Any:
        names = ("group", f"pool {lease.pool_id}", f"endpoint {lease.endpoint_id}")
        self.order.append(lease.request_id)
        self.now.update(names)
        self.peak |= self.now
        try:
            await anyio.sleep(self.takes_s)
            return await super().execute(lease, envelope, body, deadline_s)
        finally:
            self.now.subtract(names)


class Caller:
    """One of the two clients, asked in the same way: `await caller.complete(...)`."""

    def __init__(self, kind: str, url: str = "", **options: Any) -> None:
        blocking = kind == "blocking"
        self.blocking = BlockingClient(url, **options) if blocking else None
        self.asynchronous = None if blocking else DispatchClient(url, **options)

    async def __aenter__(self) -> Caller:
        if self.blocking is not None:
            await anyio.to_thread.run_sync(self.blocking.__enter__)
        if self.asynchronous is not None:
            await self.asynchronous.__aenter__()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client; repeatable."""
        if self.blocking is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.blocking.close)
        if self.asynchronous is not None:
            await self.asynchronous.aclose()

    async def complete(self, **call: Any) -> Reply:
        call = dict[str, Any](model="m", messages=MESSAGES, timeout=30) | call
        if self.blocking is not None:
            return await anyio.to_thread.run_sync(functools.partial(self.blocking.complete, **call))
        assert self.asynchronous is not None
        return await self.asynchronous.complete(**call)

    async def ended(self, **call: Any) -> Reply:
        """Make a call that does not succeed, and return its reply."""
        try:
            reply = await self.complete(**call)
        except RequestEnded as error:
            return error.reply
        raise AssertionError(f"it succeeded: {reply}")


def endings(url: str, group: str) -> dict[str, str]:
    """Return how each request ended, by the records of the endings stream."""
    return {record["request_id"]: record["ending"] for record in records(url, group)}


def records(url: str, group: str) -> list[dict[str, str]]:
    """Return the records of what was admitted and ended, the oldest first."""
    with eye(url) as client:
        found = client.xrange(key(group, "endings"))
    texts = [{name.decode(): value.decode() for name, value in record.items()} for _, record in found]
    return [text for text in texts if text["ending"] != "rejected"]


def section(url: str, group: str, name: str, **more: Any) -> Any:
    """Read a section of the group's snapshot."""
    with BlockingConnection(url) as connection:
        return connection.run(group, f.fabric_snapshot(name, **more))


def change(url: str, group: str, *assignments: str) -> None:
    """Bring another config into force (`pools.default.quantum=3`)."""
    with BlockingConnection(url) as connection:
        in_force = connection.run(group, f.fabric_snapshot("config"))
        call = f.group_configure(
            encode_document(edited(in_force["document"], assignments)),
            expected_generation=in_force["generation"],
            actor="test",
            reason="",
            nonce=uuid.uuid4().hex,
        )
        answer = connection.run(group, call)
        assert answer.status == "APPLIED", answer


def claim_nothing_left(url: str, group: str) -> None:
    """Let a gateway look once more: what was cancelled in the queue goes when somebody meets it."""
    with BlockingConnection(url) as connection:
        call = f.lease_claim("last", "last/1", nonce=uuid.uuid4().hex, want=1)
        assert connection.run(group, call).leases == ()


def assert_settled(url: str, group: str, within_s: float = 5.0) -> None:
    """Nothing waits, nothing runs, every counter is back to zero and true, and each request ended once."""
    end = time.monotonic() + within_s
    while (found := counters_above_zero(url, group)) and time.monotonic() < end:
        claim_nothing_left(url, group)
        time.sleep(0.02)
    assert found == {}
    with BlockingConnection(url) as connection:
        assert audit.differences(connection, group) == []
    assert set(endings_by_request(url, group).values()) <= {1}


def reads_while(hand: ByHand, work: Callable[[], Any]) -> list[str]:
    """Return every command on the group's keys that the server did meanwhile, those of its functions included."""
    with eye(hand.url) as client, client.monitor() as monitor:
        heard = monitor.listen()
        work()
        client.echo("that is all")
        seen: list[str] = []
        for line in heard:
            if line["command"].endswith("that is all"):
                return [command for command in seen if not command.startswith("FCALL")]
            if f"{{{hand.group}}}" in line["command"]:
                seen.append(line["command"])
    raise AssertionError


def at_once(work: Iterable[Callable[[], Any]]) -> list[Any]:
    """Do all of this at the same moment, each in a thread of its own; returns what each returned or raised."""
    tasks = list(work)
    outcomes: list[Any] = [None] * len(tasks)
    gate = threading.Barrier(len(tasks))

    def one(place: int) -> None:
        gate.wait()
        try:
            outcomes[place] = tasks[place]()
        except Exception as error:  # noqa: BLE001 - it is the outcome
            outcomes[place] = error

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes

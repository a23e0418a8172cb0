"""The world of a run: one Valkey server, three gateways, three producers, two backends, and a proxy before each.

The main thread starts, stops and kills; proxies and backends live on an event loop in a thread of their own, so that
they go on while a server is being started.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dispatch.errors import FabricError
from dispatch.fabric.deploy import load
from dispatch.fabric.functions import group_configure, pool_pause, request_cancel
from dispatch.fabric.library import current_library
from dispatch.fabric.schema import key
from dispatch.fabric.sync import BlockingConnection
from tests.chaos.backend import Backend
from tests.chaos.plan import BACKENDS, GATEWAYS, LIVENESS_MS, PRODUCERS, Plan
from tests.chaos.processes import GatewayMember, Member, ProducerMember
from tests.chaos.producer import Job
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyProcess

GROUP = "chaos"
SLOTS = 8
READY_S = 60.0

_OPERATOR_S = 0.5
_CANCELLED = 3

_CLIENTS = {"p0": "glide", "p1": "redis", "p2": "blocking"}
"""Each producer uses another client, so all of them are in each run."""


class World:
    """Everything that runs. Its context starts all but the producers, and ends all."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.valkey = ValkeyProcess(aof=True, options=("--aof-timestamp-enabled", "yes"))
        self.backends = {name: Backend(name, plan.seed) for name in BACKENDS}
        self.proxies: dict[str, TcpProxy] = {}
        self.gateways: dict[str, GatewayMember] = {}
        self.producers: dict[str, ProducerMember] = {}
        self.crashes: list[str] = []
        self._stack = ExitStack()
        self._chance = random.Random(f"names {plan.seed}")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind in (KeyboardInterrupt, SystemExit):  # told to stop: nobody will look at what was found so far
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self._stack.callback(self.valkey.close)
        self.valkey.start()
        portal = self._stack.enter_context(start_blocking_portal())
        for name in (*GATEWAYS, *PRODUCERS):
            self._proxy(portal, name, self.valkey.port)
        endpoints = {}
        for name, backend in self.backends.items():
            stub = self._stack.enter_context(portal.wrap_async_context_manager(backend.stub))
            endpoints[name] = f"http://127.0.0.1:{self._proxy(portal, name, stub.port).port}/v1"
        self.load_library()
        self._configure(endpoints)
        for name in GATEWAYS:
            settings = {
                "valkey_url": self._url(name), "fabric_group": GROUP, "port": "0", "log_format": "json",
                "slots": str(SLOTS), "drain_timeout_ms": "800",
            }  # fmt: skip
            gateway = self.gateways[name] = GatewayMember(name, self.folder, settings)
            self._stack.callback(gateway.kill)
            gateway.start()
        until(lambda: not self._waiting_for(), READY_S, lambda: f"not started: {self._waiting_for()}")

    def _waiting_for(self) -> list[str]:
        return [f"{one.name}: {last_lines(one.said)}" for one in self.gateways.values() if not one.listens]

    def start_producers(self, began: float) -> None:
        """Start the producers; their orders count from `began`."""
        for name in PRODUCERS:
            job = Job(
                url=self._url(name), group=GROUP, kind=_CLIENTS[name], began=began, liveness_ms=LIVENESS_MS,
                orders=self.plan.orders[name],
            )  # fmt: skip
            producer = self.producers[name] = ProducerMember(name, self.folder, job)
            self._stack.callback(producer.kill)
            producer.start()

    def load_library(self) -> None:
        """Write the library to the server."""
        with BlockingConnection(self.valkey.url) as connection:
            for report in load(connection, current_library()):
                if report.problem:
                    raise RuntimeError(f"the library cannot be loaded: {report.problem}")

    def flush_library(self) -> None:
        """Remove every function from the server."""
        with redis.Redis(host="127.0.0.1", port=self.valkey.port) as client:
            client.function_flush("SYNC")

    def cancel_some(self) -> bool:
        """Cancel a few of the requests that wait or run; returns whether the server answered."""
        try:
            with redis.Redis(host="127.0.0.1", port=self.valkey.port, socket_timeout=_OPERATOR_S) as client:
                found = client.zrandmember(key(GROUP, "deadlines"), _CANCELLED) or []
            with BlockingConnection(self.valkey.url, timeout_s=_OPERATOR_S) as connection:
                for request_id in found:
                    call = request_cancel(request_id.decode(), actor="chaos", reason="chaos")
                    connection.run(GROUP, call)
        except (FabricError, redis.RedisError):
            return False
        return True

    def pause(self, pool: str, *, action: str) -> bool:
        """Pause a pool or resume it; returns whether the server answered."""
        try:
            with BlockingConnection(self.valkey.url, timeout_s=_OPERATOR_S) as connection:
                connection.run(GROUP, pool_pause(pool, action, actor="chaos", reason="chaos"))
        except FabricError:
            return False
        return True

    def start_gateway(self, name: str) -> None:
        """Bring a gateway back, under its old name or a new one."""
        self.gateways[name].start(new_name=self._chance.random() < 0.5)

    def start_again(self) -> None:
        """Start what should run and does not: a gateway that found no Valkey when it started."""
        members: list[Member] = [*self.gateways.values(), *self.producers.values()]
        for member in members:
            if not member.wanted or member.running:
                continue
            if isinstance(member, ProducerMember):
                if not member.done:
                    self.crashes.append(f"{member.name} ended by itself: {last_lines(member.said)}")
                    member.wanted = False
                continue
            assert isinstance(member, GatewayMember)
            if member.listens:
                self.crashes.append(f"{member.name} ended by itself: {last_lines(member.said)}")
            member.start()

    def stop_gateways(self) -> None:
        """Stop all gateways in good order, and note those that do not."""
        for gateway in self.gateways.values():
            gateway.wanted = False
            gateway.signal(signal.SIGTERM)
        for gateway in self.gateways.values():
            served, code = gateway.listens, gateway.ended(20)
            if code != 0 and not (code == -signal.SIGTERM and not served):
                self.crashes.append(f"{gateway.name} ended with {code} when told to stop: {last_lines(gateway.said)}")

    def _proxy(self, portal: BlockingPortal, name: str, port: int) -> TcpProxy:
        proxy = self.proxies[name] = TcpProxy(port)
        self._stack.enter_context(portal.wrap_async_context_manager(proxy))
        return proxy

    def _url(self, name: str) -> str:
        return f"valkey://127.0.0.1:{self.proxies[name].port}"

    def _configure(self, endpoints: dict[str, str]) -> None:
        rows = [row | {"url": endpoints[row["endpoint_id"]]} for row in self.plan.document["endpoints"]]
        document = json.dumps(self.plan.document | {"endpoints": rows}).encode()
        call = group_configure(document, expected_generation=0, actor="chaos", reason="", nonce=uuid.uuid4().hex)
        with BlockingConnection(self.valkey.url) as connection:
            answer = connection.run(GROUP, call)
        if answer.status != "APPLIED":
            raise RuntimeError(f"the config of the run is not applied: {answer}")

    def keep_writes(self) -> None:
        """Keep what the server has written since it began, in order, with the time: how it came to what is there."""
        shutil.copytree(self.valkey._folder, self.folder / "valkey")


def until(holds: Callable[[], bool], within_s: float, otherwise: Callable[[], str]) -> None:
    """Wait until `holds()`; for states of other processes that announce nothing.

    Raises:
        RuntimeError: it did not come; says `otherwise()`.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise())
        time.sleep(0.05)


def last_lines(path: Path) -> str:
    """Return the end of a log."""
    return path.read_text("utf-8", "replace")[-600:]


def say(text: str) -> None:
    """Tell progress on stderr."""
    sys.stderr.write(f"chaos: {text}\n")

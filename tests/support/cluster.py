"""A small Valkey cluster on loopback."""

from __future__ import annotations

import contextlib
import time
from typing import Self

import redis

from tests.support.valkey import START_TIMEOUT_S, ValkeyProcess, free_port

_SLOTS = 16384


class ValkeyCluster:
    """`size` primaries that share the slots; no replicas."""

    def __init__(self, size: int = 2) -> None:
        self._buses = [free_port() for _ in range(size)]
        self.nodes = [
            ValkeyProcess(options=("--cluster-enabled", "yes", "--cluster-port", str(bus))) for bus in self._buses
        ]
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.nodes[0].port}?cluster=true"

    @property
    def addresses(self) -> set[str]:
        return {f"127.0.0.1:{node.port}" for node in self.nodes}

    def __enter__(self) -> Self:
        for node in self.nodes:
            self._stack.enter_context(node)
        clients = [self._stack.enter_context(redis.Redis(port=node.port)) for node in self.nodes]
        share = _SLOTS // len(clients)
        for at, client in enumerate(clients):
            last = _SLOTS - 1 if at == len(clients) - 1 else (at + 1) * share - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", at * share, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not all(_complete(client, len(clients)) for client in clients):
            assert time.monotonic() < deadline, "the cluster did not form"
            time.sleep(0.02)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _complete(client: redis.Redis, size: int) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    text = info.decode() if isinstance(info, bytes) else "\n".join(f"{k}:{v}" for k, v in info.items())
    return "cluster_state:ok" in text and f"cluster_known_nodes:{size}" in text

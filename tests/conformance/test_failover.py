"""A primary that becomes a replica while it is connected to, behind an address that leads to its successor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import redis

from dispatch.errors import FabricUnavailable
from dispatch.fabric import functions as f
from tests.support.producing import until
from tests.support.proxy import TcpProxy
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.anyio


async def test_a_connection_leaves_a_demoted_primary_by_itself(
    start_valkey: Callable[..., ValkeyProcess], open_connection: Any
) -> None:
    old, new = start_valkey(), start_valkey()
    with redis.Redis(port=old.port) as before, redis.Redis(port=new.port) as after:
        after.execute_command("REPLICAOF", "127.0.0.1", str(old.port))
        await until(lambda: after.info("replication")["master_link_status"] == "up", within_s=10)
        async with TcpProxy(old.port) as proxy:
            connection = await open_connection(f"valkey://127.0.0.1:{proxy.port}")
            await connection.put("{g}:before", b"1", ttl_ms=60_000)
            await until(lambda: after.exists("{g}:before") == 1)
            after.execute_command("REPLICAOF", "NO", "ONE")
            before.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
            proxy._target = new.port
            started = time.monotonic()
            with pytest.raises(FabricUnavailable, match="read-only replica"):
                await connection.put("{g}:x", b"1", ttl_ms=60_000)
            with anyio.fail_after(5):
                while True:
                    try:
                        await connection.put("{g}:after", b"1", ttl_ms=60_000)
                    except FabricUnavailable:
                        await anyio.sleep(0.05)
                    else:
                        break
            assert time.monotonic() - started < 2
            assert after.get("{g}:after") == b"1"
            assert await connection.get("{g}:before") == b"1"
            await connection.run("g", f.library_version())  # functions are replicated
            await connection.run_many("g", [f.library_version()] * 3)


async def test_a_pipeline_that_meets_a_replica_is_unavailable_and_the_next_one_is_not(
    start_valkey: Callable[..., ValkeyProcess], open_connection: Any
) -> None:
    old, new = start_valkey(), start_valkey()
    with redis.Redis(port=old.port) as before:
        async with TcpProxy(old.port) as proxy:
            connection = await open_connection(f"valkey://127.0.0.1:{proxy.port}")
            await connection.put("{g}:before", b"1", ttl_ms=60_000)
            before.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
            proxy._target = new.port
            claims = [f.lease_reap(limit=1)] * 3
            found = await _answers(connection, claims)
            assert all(isinstance(one, FabricUnavailable) for one in found)
            with anyio.fail_after(5):
                found = await _answers(connection, claims)
                while any(isinstance(one, FabricUnavailable) for one in found):
                    await anyio.sleep(0.05)
                    found = await _answers(connection, claims)


async def _answers(connection: Any, calls: list[Any]) -> list[Any]:
    try:
        return list(await connection.run_many("g", calls))
    except FabricUnavailable as error:
        return [error]

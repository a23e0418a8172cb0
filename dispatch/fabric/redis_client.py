"""The async connection over redis-py: the second client, for where GLIDE has no build, and the tests' other eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
from redis import asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dispatch.errors import DispatchError
from dispatch.fabric.address import Address
from dispatch.fabric.calls import FunctionCall, T
from dispatch.fabric.connection import REQUEST_TIMEOUT_S, WAIT_MARGIN_S, bounded_wait
from dispatch.fabric.demotion import AsyncConnection, AsyncTLSConnection
from dispatch.fabric.redis_shared import options, outcome, redis_errors
from dispatch.fabric.streams import Claimed, Reading, StreamEntry

POOL_SIZE = 64
"""Connections of one client at most; a call beyond waits for a free one."""


class RedisConnection:
    """`Connection` over redis-py; promises and errors are those of the protocol."""

    def __init__(self, address: Address) -> None:
        """Prepare a connection; the first call connects.

        Raises:
            ConfigurationError: the CA file cannot be read.
        """
        self._address = address
        self._client = _client(address)

    async def run(self, group: str, call: FunctionCall[T]) -> T:
        """Run one function for `group` and decode its answer."""
        with redis_errors(self._address, call.function):
            answer = await self._client.execute_command(*call.command(group))
        return call.decode(answer)

    async def run_many(self, group: str, calls: Sequence[FunctionCall[T]]) -> list[T | DispatchError]:
        """Run calls in one round trip, in order, not atomically; a call's own error stands at its place."""
        if not calls:
            return []
        with redis_errors(self._address):
            pipeline = self._pipeline()
            for call in calls:
                pipeline.execute_command(*call.command(group))
            answers = await pipeline.execute(raise_on_error=False)
        return [outcome(call, answer, self._address) for call, answer in zip(calls, answers, strict=True)]

    async def get(self, key: str) -> bytes | None:
        """Read a string."""
        value: bytes | None = await self._command("GET", key)
        return value

    async def put(self, key: str, value: bytes, *, ttl_ms: int) -> None:
        """Store a string with an expiry."""
        await self._command("SET", key, value, "PX", ttl_ms)

    async def read_frames(self, key: str, count: int) -> list[bytes]:
        """Read (not remove) the first `count` elements of a list."""
        frames: list[bytes] = await self._command("LRANGE", key, 0, count - 1)
        return frames

    async def run_then_read(self, group: str, call: FunctionCall[T], key: str, count: int) -> tuple[T, list[bytes]]:
        """Run one function, then read the first `count` elements of a list of `group`, in one round trip."""
        with redis_errors(self._address, call.function):
            pipeline = self._pipeline()
            pipeline.execute_command(*call.command(group))
            pipeline.execute_command("LRANGE", key, 0, count - 1)
            answer, frames = await pipeline.execute(raise_on_error=False)
            for found in (answer, frames):
                if isinstance(found, Exception):
                    raise found
        return call.decode(answer), frames

    async def keep_alive(
        self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int
    ) -> None:
        """Write a producer's liveness marker and renew the expiry of its reply list, in one round trip."""
        with redis_errors(self._address):
            pipeline = self._pipeline()
            pipeline.execute_command("SET", alive_key, session, "PX", alive_ms)
            pipeline.execute_command("PEXPIRE", replies_key, replies_ms)
            await pipeline.execute()

    async def push_token(self, key: str) -> None:
        """Hand a wake token on."""
        await self._command("RPUSH", key, 1)

    async def read_records(self, keys: Sequence[str], reading: Reading) -> list[StreamEntry]:
        """Read what no consumer of the group has read yet; it is pending until acknowledged."""
        streams: dict[Any, Any] = dict.fromkeys(keys, ">")
        with redis_errors(self._address):
            found = await self._client.xreadgroup(reading.reader, reading.consumer, streams, count=reading.count)
        return [_entry(name.decode(), *row) for name, rows in found for row in rows]

    async def claim_records(self, key: str, reading: Reading, *, idle_ms: int, cursor: str = "0-0") -> Claimed:
        """Take over what other consumers have read and not acknowledged for `idle_ms`, from `cursor` on."""
        with redis_errors(self._address):
            following, rows, deleted = await self._client.xautoclaim(
                key, reading.reader, reading.consumer, idle_ms, cursor, count=reading.count
            )
        return Claimed([_entry(key, *row) for row in rows], following.decode(), len(deleted))

    async def ack_records(self, key: str, reader: str, entry_ids: Sequence[str]) -> None:
        """Acknowledge records: nobody gets them again."""
        if entry_ids:
            await self._command("XACK", key, reader, *entry_ids)

    async def primaries(self) -> list[str]:
        """Return the addresses of all primaries."""
        if not self._address.cluster:
            return self._address.hosts()
        with redis_errors(self._address):
            await self._client.initialize()
            return [f"{node.host}:{node.port}" for node in self._client.get_primaries()]

    async def ping(self) -> None:
        """Connect if needed, and see whether the server answers.

        Raises:
            ConfigurationError: the login was refused.
            FabricUnavailable: no answer.
        """
        await self._command("PING")

    def waiter(self) -> RedisWaiter:
        """Return a waiter with a connection of its own to the same server."""
        return RedisWaiter(self._address)

    def subscriber(self, channel: str) -> RedisSubscriber:
        """Return a subscriber with a connection of its own to the same server."""
        return RedisSubscriber(self._address, channel)

    async def aclose(self) -> None:
        """Close everything. Repeatable."""
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def _command(self, *words: str | bytes | int) -> Any:
        with redis_errors(self._address):
            return await self._client.execute_command(*words)

    def _pipeline(self) -> Any:
        return self._client.pipeline() if self._address.cluster else self._client.pipeline(transaction=False)


class RedisWaiter:
    """`Waiter` over redis-py: one connection, made by the first wait and after every failed one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._wire: Any = None

    async def wait(self, key: str, seconds: float) -> bool:
        """Wait for a token on `key`, at most about `seconds`; returns whether one came."""
        seconds = bounded_wait(seconds)
        try:
            with redis_errors(self._address), anyio.fail_after(seconds + WAIT_MARGIN_S):
                if self._wire is None:
                    self._wire = await _wire_for(self._address, key)
                await self._wire.send_command("BLPOP", key, seconds)
                return await self._wire.read_response() is not None
        except BaseException:
            # An abandoned pop would take the next token along: its connection has to go.
            await self.aclose()
            raise

    async def wait_then_read(self, key: str, seconds: float, list_key: str, count: int) -> list[bytes]:
        """Wait as `wait` does, then read the first `count` elements of a list, in one round trip."""
        seconds = bounded_wait(seconds)
        commands = [("BLPOP", key, seconds), ("LRANGE", list_key, 0, count - 1)]
        try:
            with redis_errors(self._address), anyio.fail_after(seconds + WAIT_MARGIN_S):
                if self._wire is None:
                    self._wire = await _wire_for(self._address, key)
                await self._wire.send_packed_command(self._wire.pack_commands(commands))
                await self._wire.read_response()
                elements: list[bytes] = await self._wire.read_response()
        except BaseException:
            await self.aclose()
            raise
        return elements

    async def aclose(self) -> None:
        """Close the connection; a wait under way ends with `FabricUnavailable`, the next one opens a new one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            with anyio.CancelScope(shield=True):
                await wire.disconnect(nowait=True)


class RedisSubscriber:
    """`Subscriber` over redis-py: one connection, made by the first wait and after every failed one."""

    def __init__(self, address: Address, channel: str) -> None:
        self._address = address
        self._channel = channel
        self._wire: Any = None

    async def next(self, seconds: float) -> bytes | None:
        """Return the next message, or None when none came for about `seconds`."""
        ends_at = anyio.current_time() + bounded_wait(seconds)
        try:
            with redis_errors(self._address):
                if self._wire is None:
                    self._wire = await _wire_for(self._address, self._channel)
                    await self._wire.send_command("SUBSCRIBE", self._channel)
                while (left_s := ends_at - anyio.current_time()) > 0:
                    # What was read of a message stays in the parser when the time is over or the task is cancelled.
                    heard = await self._wire.read_response(timeout=left_s, disconnect_on_error=False)
                    if heard is not None and heard[0] == b"message":
                        return bytes(heard[2])
        except Exception:
            await self.aclose()
            raise
        return None

    async def aclose(self) -> None:
        """Close the connection; the next wait opens a new one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            with anyio.CancelScope(shield=True):
                await wire.disconnect(nowait=True)


def _entry(key: str, entry_id: bytes, fields: dict[bytes, bytes]) -> StreamEntry:
    return StreamEntry(key, entry_id.decode(), fields)


# A connection never repeats a call: only its caller knows what may be repeated.
_NO_RETRIES = Retry(NoBackoff(), retries=0)


def _client(address: Address) -> Any:
    if address.cluster:
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in address.nodes],
            max_connections=POOL_SIZE,
            retry=_NO_RETRIES,
            **options(address, REQUEST_TIMEOUT_S),
        )
    host, port = address.nodes[0]
    return redis.Redis.from_pool(_pool(address, host, port, REQUEST_TIMEOUT_S))


def _pool(address: Address, host: str, port: int, timeout_s: float | None) -> redis.BlockingConnectionPool:
    found = options(address, timeout_s)
    kind = AsyncTLSConnection if found.pop("ssl", False) else AsyncConnection
    return redis.BlockingConnectionPool(
        max_connections=POOL_SIZE,
        timeout=REQUEST_TIMEOUT_S,
        connection_class=kind,
        host=host,
        port=port,
        db=address.database,
        retry=_NO_RETRIES,
        **found,
    )


async def _wire_for(address: Address, key: str) -> Any:
    host, port = address.nodes[0]
    if address.cluster:
        async with _client(address) as cluster:
            node = cluster.get_node_from_key(key)
            host, port = node.host, int(node.port)
    pool: Any = _pool(address, host, port, None)  # the wait's own time limits its reads
    return pool.make_connection()

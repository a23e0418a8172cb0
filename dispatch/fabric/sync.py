"""The blocking connection: redis-py, for the sync SDK and the admin tool. The same surface as `Connection`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from dispatch.errors import DispatchError
from dispatch.fabric import demotion
from dispatch.fabric.address import Address, parse_url
from dispatch.fabric.calls import FunctionCall, T
from dispatch.fabric.connection import REQUEST_TIMEOUT_S, WAIT_MARGIN_S, bounded_wait
from dispatch.fabric.redis_shared import options, outcome, redis_errors

# A connection never repeats a call: only its caller knows what may be repeated.
_NO_RETRIES = Retry(NoBackoff(), retries=0)
_cluster_node: Any = ClusterNode  # redis-py leaves it without types


class BlockingConnection:
    """One logical connection to a fabric's Valkey for blocking code, safe for many threads at once.

    Promises and errors are those of `Connection`; calls are never repeated by the connection itself.
    """

    def __init__(self, url: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Prepare a connection to `url`; the first call connects (a cluster is looked up here).

        Raises:
            ConfigurationError: the URL is malformed or the login was refused.
            FabricUnavailable: no node of the cluster answered.
        """
        self.address = parse_url(url)
        self._timeout_s = timeout_s
        self._client = _open(self.address, timeout_s)

    def run(self, group: str, call: FunctionCall[T]) -> T:
        """Run one function for `group` and decode its answer."""
        with redis_errors(self.address, call.function):
            answer = self._client.execute_command(*call.command(group))
        return call.decode(answer)

    def run_many(self, group: str, calls: Sequence[FunctionCall[T]]) -> list[T | DispatchError]:
        """Run calls in one round trip, in order, not atomically; a call's own error stands at its place."""
        if not calls:
            return []
        with redis_errors(self.address):
            pipeline = self._client.pipeline(transaction=False)
            for call in calls:
                pipeline.execute_command(*call.command(group))
            answers = pipeline.execute(raise_on_error=False)
        return [outcome(call, answer, self.address) for call, answer in zip(calls, answers, strict=True)]

    def get(self, key: str) -> bytes | None:
        """Read a string."""
        value: bytes | None = self._command("GET", key)
        return value

    def put(self, key: str, value: bytes, *, ttl_ms: int) -> None:
        """Store a string with an expiry."""
        self._command("SET", key, value, "PX", ttl_ms)

    def read_frames(self, key: str, count: int) -> list[bytes]:
        """Read (not remove) the first `count` elements of a list."""
        frames: list[bytes] = self._command("LRANGE", key, 0, count - 1)
        return frames

    def run_then_read(self, group: str, call: FunctionCall[T], key: str, count: int) -> tuple[T, list[bytes]]:
        """Run one function, then read the first `count` elements of a list of `group`, in one round trip."""
        with redis_errors(self.address, call.function):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.execute_command(*call.command(group))
            pipeline.execute_command("LRANGE", key, 0, count - 1)
            answer, frames = pipeline.execute(raise_on_error=False)
            for found in (answer, frames):
                if isinstance(found, Exception):
                    raise found
        return call.decode(answer), frames

    def keep_alive(self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int) -> None:
        """Write a producer's liveness marker and renew the expiry of its reply list, in one round trip."""
        with redis_errors(self.address):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.execute_command("SET", alive_key, session, "PX", alive_ms)
            pipeline.execute_command("PEXPIRE", replies_key, replies_ms)
            pipeline.execute()

    def renew_alive(self, alive_key: str, replies_key: str, *, alive_ms: int, replies_ms: int) -> bool:
        """Renew the expiry of a producer's marker and reply list; returns whether the marker was there.

        Writes nothing, so a server whose memory is full does it, too.
        """
        with redis_errors(self.address):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.execute_command("PEXPIRE", alive_key, alive_ms)
            pipeline.execute_command("PEXPIRE", replies_key, replies_ms)
            found, _ = pipeline.execute()
        return bool(found)

    def push_token(self, key: str) -> None:
        """Hand a wake token on."""
        self._command("RPUSH", key, 1)

    def primaries(self) -> list[str]:
        """Return the addresses of all primaries."""
        return [f"{host}:{port}" for host, port in self._nodes()]

    def primary_clients(self) -> list[tuple[str, Any]]:
        """Return every primary with a redis-py client of its own, which the caller closes."""
        return [
            (f"{host}:{port}", _standalone(self.address, host, port, self._timeout_s)) for host, port in self._nodes()
        ]

    def waiter(self) -> BlockingWaiter:
        """Return a waiter with a connection of its own to the same server."""
        return BlockingWaiter(self.address)

    def close(self) -> None:
        """Close everything. Repeatable."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _nodes(self) -> list[tuple[str, int]]:
        if not self.address.cluster:
            return [self.address.nodes[0]]
        with redis_errors(self.address):
            return [(node.host, int(node.port)) for node in self._client.get_primaries()]

    def _command(self, *words: str | bytes | int) -> Any:
        with redis_errors(self.address):
            return self._client.execute_command(*words)


class BlockingWaiter:
    """A connection of its own for one blocking wait on wake tokens; for one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._wire: Any = None

    def wait(self, key: str, seconds: float) -> bool:
        """Wait for a token on `key`, at most about `seconds`; returns whether one came (see `Waiter.wait`)."""
        seconds = bounded_wait(seconds)
        try:
            with redis_errors(self._address):
                if self._wire is None:
                    self._wire = _wire_for(self._address, key)
                self._wire.send_command("BLPOP", key, seconds)
                return self._wire.read_response(timeout=seconds + WAIT_MARGIN_S) is not None
        except BaseException:
            # An abandoned pop would take the next token along: its connection has to go.
            self.close()
            raise

    def wait_then_read(self, key: str, seconds: float, list_key: str, count: int) -> list[bytes]:
        """Wait, then read the first `count` elements of a list, in one round trip (see `Waiter.wait_then_read`)."""
        seconds = bounded_wait(seconds)
        commands = [("BLPOP", key, seconds), ("LRANGE", list_key, 0, count - 1)]
        try:
            with redis_errors(self._address):
                if self._wire is None:
                    self._wire = _wire_for(self._address, key)
                self._wire.send_packed_command(self._wire.pack_commands(commands))
                self._wire.read_response(timeout=seconds + WAIT_MARGIN_S)
                elements: list[bytes] = self._wire.read_response()
        except BaseException:
            self.close()
            raise
        return elements

    def close(self) -> None:
        """Close the connection; the next wait opens a new one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.disconnect()


def _open(address: Address, timeout_s: float) -> Any:
    if not address.cluster:
        host, port = address.nodes[0]
        return _standalone(address, host, port, timeout_s)
    with redis_errors(address):
        return redis.RedisCluster(
            startup_nodes=[_cluster_node(host, port) for host, port in address.nodes],
            retry=_NO_RETRIES,
            **options(address, timeout_s),
        )


def _standalone(address: Address, host: str, port: int, timeout_s: float) -> Any:
    found = options(address, timeout_s)
    kind = demotion.BlockingTLSConnection if found.pop("ssl", False) else demotion.BlockingConnection
    return redis.Redis.from_pool(
        redis.ConnectionPool(
            connection_class=kind, host=host, port=port, db=address.database, retry=_NO_RETRIES, **found
        )
    )


def _wire_for(address: Address, key: str) -> Any:
    host, port = address.nodes[0]
    if address.cluster:
        with _open(address, REQUEST_TIMEOUT_S) as cluster:
            node = cluster.get_node_from_key(key)
            host, port = node.host, int(node.port)
    return _standalone(address, host, port, REQUEST_TIMEOUT_S).connection_pool.make_connection()

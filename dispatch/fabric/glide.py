"""The async connection over valkey-glide, the client of the data path.

GLIDE multiplexes all calls over one connection per node, in native threads. What has to be known about it:

- Its own bounds (250 ms a request, 1,000 requests in flight) would fail a busy gateway; ours are set below.
- `create` blocks the event loop until connected, so clients are made lazily: the first call connects.
- A blocking pop holds up everything behind it, so each waiter has a client of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import glide

from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric.address import Address
from dispatch.fabric.calls import FunctionCall, T
from dispatch.fabric.connection import (
    CONNECT_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    SUBSCRIBED_MAX,
    WAIT_MARGIN_S,
    bounded_wait,
)
from dispatch.fabric.faults import ServerFault, to_error
from dispatch.fabric.streams import Claimed, Reading, StreamEntry

LONG_CALL_ARGS = 32
"""From how many arguments on a lone call is sent as a batch of one, which GLIDE converts in two thirds of the time."""

IN_FLIGHT_LIMIT = 1_000_000
"""Effectively none: slots and queues decide how much is outstanding, and a refusal here would look like a fault."""

_RENEW_PAUSE_S = 0.5
"""Between two new connections away from a server that has become a replica."""

_RECONNECT = glide.BackoffStrategy(num_of_retries=5, factor=50, exponent_base=2, jitter_percent=20)
"""50 ms to 1.6 s between attempts, for ever."""

# GLIDE's own log writes to the process's terminal; what went wrong reaches the caller as an exception.
glide.Logger.set_logger_config(glide.LogLevel.OFF)


class GlideConnection:
    """`Connection` over valkey-glide; promises and errors are those of the protocol."""

    def __init__(self, address: Address, client: Any) -> None:
        self._address = address
        self._client = client
        self._renewal: asyncio.Task[None] | None = None
        self._renew_from = 0.0

    @classmethod
    async def open(cls, address: Address) -> GlideConnection:
        """Prepare a connection; the first call connects.

        Raises:
            ConfigurationError: the CA file cannot be read.
        """
        return cls(address, await _create(address))

    async def run(self, group: str, call: FunctionCall[T]) -> T:
        """Run one function for `group` and decode its answer."""
        if len(call.args) >= LONG_CALL_ARGS:
            batch = _batch(self._address)
            batch.custom_command(_words(call.command(group)))
            (answer,) = await self._exec(batch, call.function)
            return self._answer(call, answer)
        with self._errors(call.function):
            answer = await self._client.custom_command(_words(call.command(group)))
        return call.decode(answer)

    async def run_many(self, group: str, calls: Sequence[FunctionCall[T]]) -> list[T | DispatchError]:
        """Run calls in one round trip, in order, not atomically; a call's own error stands at its place."""
        if not calls:
            return []
        batch = _batch(self._address)
        for call in calls:
            batch.custom_command(_words(call.command(group)))
        answers = await self._exec(batch)
        return [self._outcome(call, answer) for call, answer in zip(calls, answers, strict=True)]

    async def get(self, key: str) -> bytes | None:
        """Read a string."""
        with self._errors():
            value: bytes | None = await self._client.get(key)
        return value

    async def put(self, key: str, value: bytes, *, ttl_ms: int) -> None:
        """Store a string with an expiry."""
        with self._errors():
            await self._client.set(key, value, expiry=glide.ExpirySet(glide.ExpiryType.MILLSEC, ttl_ms))

    async def read_frames(self, key: str, count: int) -> list[bytes]:
        """Read (not remove) the first `count` elements of a list."""
        with self._errors():
            frames: list[bytes] = await self._client.lrange(key, 0, count - 1)
        return frames

    async def run_then_read(self, group: str, call: FunctionCall[T], key: str, count: int) -> tuple[T, list[bytes]]:
        """Run one function, then read the first `count` elements of a list of `group`, in one round trip."""
        batch = _batch(self._address)
        batch.custom_command(_words(call.command(group)))
        batch.lrange(key, 0, count - 1)
        answer, frames = await self._exec(batch, call.function)
        value = self._answer(call, answer)
        if isinstance(frames, glide.RequestError):
            raise self._fault(frames)
        return value, frames

    async def keep_alive(
        self, alive_key: str, session: str, replies_key: str, *, alive_ms: int, replies_ms: int
    ) -> None:
        """Write a producer's liveness marker and renew the expiry of its reply list, in one round trip."""
        batch = _batch(self._address)
        batch.set(alive_key, session, expiry=glide.ExpirySet(glide.ExpiryType.MILLSEC, alive_ms))
        batch.pexpire(replies_key, replies_ms)
        with self._errors():
            await self._client.exec(batch, raise_on_error=True)

    async def push_token(self, key: str) -> None:
        """Hand a wake token on."""
        with self._errors():
            await self._client.rpush(key, ["1"])

    async def read_records(self, keys: Sequence[str], reading: Reading) -> list[StreamEntry]:
        """Read what no consumer of the group has read yet; it is pending until acknowledged."""
        options = glide.StreamReadGroupOptions(count=reading.count)
        with self._errors():
            found = await self._client.xreadgroup(dict.fromkeys(keys, ">"), reading.reader, reading.consumer, options)
        return [entry for name, rows in (found or {}).items() for entry in _entries(name.decode(), rows)]

    async def claim_records(self, key: str, reading: Reading, *, idle_ms: int, cursor: str = "0-0") -> Claimed:
        """Take over what other consumers have read and not acknowledged for `idle_ms`, from `cursor` on."""
        with self._errors():
            following, rows, deleted = await self._client.xautoclaim(
                key, reading.reader, reading.consumer, idle_ms, cursor, reading.count
            )
        return Claimed(_entries(key, rows), following.decode(), len(deleted))

    async def ack_records(self, key: str, reader: str, entry_ids: Sequence[str]) -> None:
        """Acknowledge records: nobody gets them again."""
        if entry_ids:
            with self._errors():
                await self._client.xack(key, reader, list(entry_ids))

    async def primaries(self) -> list[str]:
        """Return the addresses of all primaries."""
        if not self._address.cluster:
            return self._address.hosts()
        with self._errors():
            slots = await self._client.custom_command(["CLUSTER", "SLOTS"], glide.RandomNode())
        primaries = (row[2] for row in slots)
        return list(dict.fromkeys(f"{host.decode()}:{port}" for host, port, *_ in primaries))

    async def ping(self) -> None:
        """Connect if needed, and see whether the server answers.

        Raises:
            ConfigurationError: the login was refused.
            FabricUnavailable: no answer.
        """
        with self._errors():
            await self._client.ping()

    def waiter(self) -> GlideWaiter:
        """Return a waiter with a client of its own to the same server."""
        return GlideWaiter(self._address)

    def subscriber(self, channel: str) -> GlideSubscriber:
        """Return a subscriber with a client of its own to the same server."""
        return GlideSubscriber(self._address, channel)

    async def aclose(self) -> None:
        """Close everything; calls under way end with `FabricUnavailable`. Repeatable."""
        if self._renewal is not None:
            await asyncio.wait({self._renewal})
        await self._client.close()

    async def _exec(self, batch: Any, function: str = "") -> list[Any]:
        with self._errors(function):
            answers: list[Any] = await self._client.exec(batch, raise_on_error=False)
        return answers

    def _answer(self, call: FunctionCall[T], answer: Any) -> T:
        if isinstance(answer, glide.RequestError):
            raise self._fault(answer, call.function)
        return call.decode(answer)

    def _outcome(self, call: FunctionCall[T], answer: Any) -> T | DispatchError:
        if isinstance(answer, glide.RequestError):
            return self._fault(answer, call.function)
        return call.outcome(answer)

    @contextmanager
    def _errors(self, function: str = "") -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise _timed_out(self._address) from error
        except glide.GlideError as error:
            raise self._fault(error, function) from error

    def _fault(self, error: glide.GlideError, function: str = "") -> DispatchError:
        """Return what `error` means; a server that has become a replica is left: the address may lead to another."""
        fault = _read(error, self._address, function)
        if isinstance(fault, ServerFault):
            if fault.code == "READONLY" and not self._address.cluster and anyio.current_time() >= self._renew_from:
                self._renew_from = anyio.current_time() + _RENEW_PAUSE_S
                self._renewal = asyncio.get_running_loop().create_task(self._renew())
            return to_error(fault)
        return fault

    async def _renew(self) -> None:
        fresh = await _create(self._address)
        old, self._client = self._client, fresh
        await old.close()


class GlideWaiter:
    """`Waiter` over valkey-glide: a client of its own, made by the first wait and after every failed one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client: Any = None

    async def wait(self, key: str, seconds: float) -> bool:
        """Wait for a token on `key`, at most about `seconds`; returns whether one came."""
        seconds = bounded_wait(seconds)
        return await self._ask(seconds, lambda client: client.blpop([key], seconds)) is not None

    async def wait_then_read(self, key: str, seconds: float, list_key: str, count: int) -> list[bytes]:
        """Wait as `wait` does, then read the first `count` elements of a list, in one round trip."""
        seconds = bounded_wait(seconds)
        batch = _batch(self._address).blpop([key], seconds).lrange(list_key, 0, count - 1)
        bound_ms = int((seconds + WAIT_MARGIN_S) * 1000)  # a batch knows of no commands that wait
        options = (glide.ClusterBatchOptions if self._address.cluster else glide.BatchOptions)(timeout=bound_ms)
        answers = await self._ask(seconds, lambda client: client.exec(batch, raise_on_error=True, options=options))
        return list(answers[1])

    async def _ask(self, seconds: float, send: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            if self._client is None:
                self._client = await _create(self._address)
            with _waiting_errors(self._address), anyio.fail_after(seconds + WAIT_MARGIN_S):
                return await send(self._client)
        except BaseException:
            # An abandoned pop would take the next token along: its connection has to go.
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the client; a wait under way ends with `FabricUnavailable`, the next one opens a new client."""
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True):
                await client.close()


class GlideSubscriber:
    """`Subscriber` over valkey-glide: a client of its own, made by the first wait; it reconnects by itself."""

    def __init__(self, address: Address, channel: str) -> None:
        self._address = address
        self._channel = channel
        self._client: Any = None
        self._heard: deque[bytes] = deque(maxlen=SUBSCRIBED_MAX)
        self._came = asyncio.Event()

    async def next(self, seconds: float) -> bytes | None:
        """Return the next message, or None when none came for about `seconds`."""
        if self._client is None:
            await self._open()
        if not self._heard:
            self._came.clear()
            with anyio.move_on_after(bounded_wait(seconds)):
                await self._came.wait()
        return self._heard.popleft() if self._heard else None

    async def aclose(self) -> None:
        """Close the client; the next wait opens a new one."""
        client, self._client = self._client, None
        self._heard.clear()
        if client is not None:
            with anyio.CancelScope(shield=True):
                await client.close()

    async def _open(self) -> None:
        try:
            self._client = await _create(self._address, self._subscription())
            with _waiting_errors(self._address):
                await self._client.ping()  # clients connect with their first command
        except BaseException:
            await self.aclose()
            raise

    def _subscription(self) -> Any:
        kind = glide.GlideClusterClientConfiguration if self._address.cluster else glide.GlideClientConfiguration
        exact = {kind.PubSubChannelModes.Exact: {self._channel}}
        return kind.PubSubSubscriptions(exact, callback=self._on_message, context=None)

    def _on_message(self, message: Any, _context: Any) -> None:
        self._heard.append(message.message)
        self._came.set()


def _batch(address: Address) -> Any:
    return glide.ClusterBatch(is_atomic=False) if address.cluster else glide.Batch(is_atomic=False)


async def _create(address: Address, subscription: Any = None) -> Any:
    nodes = [glide.NodeAddress(host, port) for host, port in address.nodes]
    login = glide.ServerCredentials(address.password, address.username) if address.password is not None else None
    tls = glide.TlsAdvancedConfiguration(root_pem_cacerts=address.ca_pem()) if address.ca_file else None
    common: dict[str, Any] = {
        "addresses": nodes,
        "use_tls": address.tls,
        "credentials": login,
        "request_timeout": int(REQUEST_TIMEOUT_S * 1000),
        "reconnect_strategy": _RECONNECT,
        "inflight_requests_limit": IN_FLIGHT_LIMIT,
        "lazy_connect": True,
        "pubsub_subscriptions": subscription,
    }
    connect_ms = int(CONNECT_TIMEOUT_S * 1000)
    if address.cluster:
        advanced = glide.AdvancedGlideClusterClientConfiguration(connect_ms, tls)
        return await glide.GlideClusterClient.create(
            glide.GlideClusterClientConfiguration(**common, advanced_config=advanced)
        )
    return await glide.GlideClient.create(
        glide.GlideClientConfiguration(
            **common,
            database_id=address.database,
            advanced_config=glide.AdvancedGlideClientConfiguration(connect_ms, tls),
        )
    )


def _entries(key: str, rows: dict[bytes, list[list[bytes]] | None]) -> list[StreamEntry]:
    """Return the records of a stream; one of which only the id is left is none."""
    return [StreamEntry(key, name.decode(), {cell[0]: cell[1] for cell in row}) for name, row in rows.items() if row]


def _words(command: Sequence[str | bytes | int]) -> list[str | bytes]:
    return [str(word) if isinstance(word, int) else word for word in command]


# "CODE: text" for codes GLIDE does not know, and its own name of the kind for those it knows.
_SERVER_ERROR = re.compile(
    r"^(?:An error was signalled by the server: ?- (?P<kind>\w+)|(?P<code>[A-Z][A-Z0-9_]*))(?:: (?P<text>.*))?$",
    re.DOTALL,
)
_AT_CONNECT = re.compile(r"Received error for address `[^`]*`: (?P<rest>.*)", re.DOTALL)
_NO_TEXT = "Unknown extension error encountered"
_CODES = {
    "ResponseError": "ERR",
    "PermissionDenied": "NOPERM",
    "AuthenticationFailed": "WRONGPASS",
    "ReadOnly": "READONLY",
    "BusyLoadingError": "LOADING",
    "MasterDown": "MASTERDOWN",
    "ClusterDown": "CLUSTERDOWN",
    "TryAgain": "TRYAGAIN",
}


@contextmanager
def _waiting_errors(address: Address) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise _timed_out(address) from error
    except glide.GlideError as error:
        fault = _read(error, address)
        raise (to_error(fault) if isinstance(fault, ServerFault) else fault) from error


def _timed_out(address: Address) -> FabricUnavailable:
    return FabricUnavailable(f"Valkey at {address} does not answer: it took too long")


def _read(error: glide.GlideError, address: Address, function: str = "") -> ServerFault | FabricUnavailable:
    text = str(error).strip()
    if at_connect := _AT_CONNECT.search(text):
        text = at_connect["rest"].strip()
    if found := _SERVER_ERROR.match(text):
        code = found["code"] or _CODES.get(found["kind"], found["kind"])
        rest = (found["text"] or "").replace(_NO_TEXT, "")
        return ServerFault(code, rest, function, str(address))
    reason = "it took too long" if text == "timed out" else text
    return FabricUnavailable(f"Valkey at {address} does not answer: {reason}")

"""The asynchronous client."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import anyio

from dispatch.contract import Call, Reply, Scalar
from dispatch.errors import BackendError, DispatchError, RequestEnded, StateConflict
from dispatch.fabric.connecting import connect
from dispatch.fabric.connection import Connection
from dispatch.producer.batch import CONCURRENCY, Item, Progress, run_batch
from dispatch.producer.completion import build_completion
from dispatch.producer.detached import Handle, Submits
from dispatch.producer.options import DEFAULT_POOL, CallOptions, ClientKeywords, ClientOptions, require_url
from dispatch.producer.queued import QueuedPath
from dispatch.producer.streaming import ChunkStream, StreamSource


class CallPath(Protocol):
    """How a call gets to an endpoint and back: through the queue, or directly."""

    async def call(self, call: Call, options: CallOptions) -> Reply:
        """Make one call; returns the reply whatever its ending."""
        ...

    def stream(self, call: Call, options: CallOptions) -> StreamSource:
        """Return the stream of one call; nothing is sent before it is opened."""
        ...

    async def aclose(self) -> None:
        """End; repeatable."""
        ...


class DispatchClient(Submits):
    """Sends OpenAI-compatible calls through a fabric group and gives back their replies.

        async with DispatchClient("valkey://127.0.0.1:6379", fabric_group="default") as client:
            reply = await client.complete(
                model="m", messages=[{"role": "user", "content": "Hi"}], pool="interactive", timeout=60
            )
            print(reply.text())

    One client serves any number of concurrent calls of one event loop. It may be opened and closed in different tasks.

    - Cancelling a task that waits for a reply cancels its request, in the background and within 5 s.
    - Closing cancels what is outstanding and waits for that at most `close_ms` (2 s); callers still waiting get a
      reply that ended `cancelled`, or `StateConflict`.
    - A call with a `request_id` is made once: the same call again gets the first one's reply (`reply.replayed`), or
      `RequestInProgress` while that one runs; another call under that id is an `IdempotencyConflict`.
    - Nobody waits for ever: at the latest 2 s after a request's deadline there is an outcome.
    - The producer's liveness is refreshed from a thread of its own, so code that blocks the event loop does not cost
      the producer its queue. A process that stands still longer than `liveness_ms` does: its requests end
      `producer_gone`.
    - A forked child cannot use its parent's client (`StateConflict`); it opens its own. `dispatch.sync.DispatchClient`
      goes on in a child as a producer of its own.

    `connection` is used instead of opening one, and is then not closed here; `url` is needed all the same (liveness).
    With `direct=True` and `endpoint=...` the same calls go straight to the endpoint: no queue, no Valkey, no `url`.
    """

    def __init__(
        self, url: str = "", *, connection: Connection | None = None, **options: Unpack[ClientKeywords]
    ) -> None:
        """Prepare a client; `async with` opens it. Keywords: the members of `ClientOptions`.

        Raises:
            ConfigurationError, InvalidRequest: an option is wrong; names it.
        """
        self._options = ClientOptions(**options)
        self._url = url if self._options.direct else require_url(url)
        self._connection = connection
        self._owned: Connection | None = None
        self._path: CallPath | None = None
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        """Connect, check the server's library and start the background work.

        Raises:
            FabricUnavailable, LibraryProblem, ConfigurationError: the group cannot be used; says what to do.
        """
        if self._path is not None:
            self._check_process()
            raise StateConflict("this client is open already")
        self._pid = os.getpid()
        if self._options.direct:
            # The HTTP stack is loaded only by clients that need it.
            from dispatch.producer.direct import DirectPath  # noqa: PLC0415 - see above

            self._path = await DirectPath.open(self._options)
            return self
        connection = self._connection
        if connection is None:
            connection = self._owned = await connect(self._url, client=self._options.client)
        self._path = path = QueuedPath(self._url, self._options, connection)
        try:
            await path.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is outstanding (see the class) and close. Repeatable; cannot be cancelled."""
        path, self._path = self._path, None
        if os.getpid() != self._pid:
            return  # a forked child: connections, tasks and requests are its parent's
        try:
            if path is not None:
                await path.aclose()
        finally:
            await self._close_owned()

    @property
    def producer_id(self) -> str | None:
        """The name under which the group knows this client; None while it is not open here, and for a direct one."""
        path = self._path
        return path.session.producer_id if isinstance(path, QueuedPath) and os.getpid() == self._pid else None

    async def complete(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        pool: str = DEFAULT_POOL,
        metadata: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it travels with the request: the group ends it, not this task
        **more: Any,
    ) -> Reply:
        """Make one chat completion and return its reply, which succeeded.

        `timeout` is in seconds from admission (None = the pool's default). `metadata` (scalars) is for operators and
        the cost rule and no part of the body. Of `more`, `request_id` names the request, `cost` is its estimated cost
        in units, `fairness_key` says for whom it is (the keys of one pool share it evenly), `priority` is its level
        among those of its key (0 first to 3), `max_wait` (seconds) is the longest it may be queued,
        `wait_for_room=True` submits it again while its pool or group is full, within `timeout`, `extra_body` is merged
        into the body last; everything else is a member of the body (`temperature`, `tools`, ...).

        Raises:
            InvalidRequest: an argument is wrong, cannot be JSON or is not finite; nothing was sent.
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict: nothing was queued.
            RequestEnded: it was queued and did not succeed; `reply` says how. `BackendError` for a direct call.
            FabricUnavailable: Valkey does not answer; whether it was queued is not known, and it is cancelled if so.
            OutcomeUnknown: it was queued, and how it ended cannot be learnt any more.
        """
        named = {"model": model, "messages": messages, "pool": pool, "metadata": metadata, "timeout": timeout}
        return await self._complete(named | more)

    def stream(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        pool: str = DEFAULT_POOL,
        metadata: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> ChunkStream:
        """Make one chat completion and return its chunks as they come (see `ChunkStream`).

        Arguments are those of `complete()`; `"stream": true` is added to the body, and nothing else is: usage comes
        with `stream_options={"include_usage": True}`. A `request_id` only names the request, as a stream cannot be
        repeated.

        Raises:
            InvalidRequest: an argument is wrong, cannot be JSON or is not finite; nothing was sent.
            StateConflict: the client is not open.
        """
        named = {"model": model, "messages": messages, "pool": pool, "metadata": metadata, "timeout": timeout}
        call, options = build_completion(named | more, stream=True)
        return ChunkStream(self._opened().stream(call, options), BackendError if self._options.direct else RequestEnded)

    async def call(self, call: Call, options: CallOptions | None = None) -> Reply:
        """Make one call and return its terminal reply, whatever its ending.

        Raises:
            InvalidRequest, RequestRefused, PoolUnknown, GroupUnknown, StateConflict: nothing was queued. A body that
                asks for a stream is an `InvalidRequest`.
            FabricUnavailable, OutcomeUnknown: as of `complete`.
        """
        return await self._opened().call(call, options or CallOptions())

    def stream_call(self, call: Call, options: CallOptions | None = None) -> ChunkStream:
        """Return the chunks of one call whose body asks for a stream, as they come.

        The chunks end whatever the ending, which stands in the stream's `reply`.

        Raises:
            InvalidRequest: the body does not ask for a stream, or the call cannot be queued.
            StateConflict: the client is not open.
        """
        return ChunkStream(self._opened().stream(call, options or CallOptions()), None)

    async def submit_call(self, call: Call, options: CallOptions | None = None) -> Handle:
        """Queue one call of any operation, to be fetched later.

        Raises:
            InvalidRequest: it asks for a stream, or cannot be queued.
            RequestRefused, PoolUnknown, GroupUnknown, StateConflict, FabricUnavailable: as of `complete()`.
        """
        return await self._queue().submit(call, options or CallOptions())

    async def batch_generate(
        self, items: Sequence[Item], progress: Progress | None = None, *, concurrency: int = CONCURRENCY
    ) -> list[Reply | DispatchError]:
        """Make many chat completions, at most `concurrency` at a time, and return their outcomes in order.

        Each item is a mapping of `complete()`'s arguments. At its place stands the reply that succeeded, or the error
        that `complete()` would have raised. `progress(finished, total)`, sync or async, is called after each.
        Cancelling this cancels every request of it that is under way.

        Raises:
            Exception: what `progress` raised; the rest is cancelled.
        """
        return await run_batch(items, self._complete, progress, concurrency)

    async def _complete(self, arguments: Mapping[str, Any]) -> Reply:
        call, options = build_completion(arguments)
        reply = await self.call(call, options)
        if not reply.succeeded:
            raise BackendError(reply) if self._options.direct else RequestEnded(reply)
        return reply

    def _opened(self) -> CallPath:
        if self._path is None:
            raise StateConflict("this client is not open: use it inside 'async with DispatchClient(...)'")
        self._check_process()
        return self._path

    def _queue(self) -> QueuedPath:
        path = self._opened()
        if not isinstance(path, QueuedPath):
            raise StateConflict("a client with direct=True has no queue: nothing can be submitted or asked after")
        return path

    def _fabric(self) -> tuple[Connection, str]:
        path = self._queue()
        return path.connection, path.session.group

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateConflict(
                f"this client was opened in process {self._pid} and cannot be used in a forked child, as an event loop "
                "cannot: open a new DispatchClient there, inside asyncio.run(), or use dispatch.sync.DispatchClient, "
                "which goes on in a child"
            )

    async def _close_owned(self) -> None:
        connection, self._owned = self._owned, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await connection.aclose()

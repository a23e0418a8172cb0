"""The blocking client: the twin of `dispatch.producer.client.DispatchClient` for code without an event loop."""

from __future__ import annotations

import dataclasses
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

from dispatch.contract import Call, Reply, Scalar
from dispatch.errors import BackendError, DispatchError, RequestEnded, StateConflict
from dispatch.producer.batch import CONCURRENCY, Item, check_concurrency
from dispatch.producer.blocking import BlockingQueuedPath
from dispatch.producer.blocking_detached import BlockingSubmits
from dispatch.producer.blocking_stream import BlockingChunkStream, BlockingSource
from dispatch.producer.completion import build_completion
from dispatch.producer.options import DEFAULT_POOL, CallOptions, ClientKeywords, ClientOptions, require_url

_NAME_MAX = 128


class Begun(Protocol):
    """A call under way. `until` on the monotonic clock = when to take the outcome although `ready` is not done."""

    @property
    def ready(self) -> Future[Any]:
        """Done when there is an outcome to take."""
        ...

    @property
    def until(self) -> float:
        """When to go on without it."""
        ...


B = TypeVar("B", bound=Begun)


class BlockingPath(Protocol[B]):
    """How a call gets to an endpoint and back: through the queue, or directly."""

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that opened it."""
        ...

    def open(self) -> None:
        """Connect and start."""
        ...

    def prepare(self, call: Call, options: CallOptions) -> B:
        """Make a request of a call; nothing is sent yet, so an interruption here leaves nothing behind."""
        ...

    def begin(self, begun: B) -> None:
        """Send it off. On any exception the caller calls `leave`."""
        ...

    def finish(self, begun: B) -> Reply:
        """Wait for its reply, whatever its ending."""
        ...

    def leave(self, begun: B) -> None:
        """Stop waiting, and stop the request."""
        ...

    def stream(self, call: Call, options: CallOptions) -> BlockingSource:
        """Return the stream of one call; nothing is sent before it is opened."""
        ...

    def close(self) -> None:
        """End; repeatable."""
        ...


class DispatchClient(BlockingSubmits):
    """Sends OpenAI-compatible calls through a fabric group and gives back their replies; blocks while it waits.

        with DispatchClient("valkey://127.0.0.1:6379", fabric_group="default") as client:
            reply = client.complete(model="m", messages=[{"role": "user", "content": "Hi"}], pool="interactive")

    One client serves any number of threads. Arguments, replies and errors are those of the asynchronous
    `dispatch.DispatchClient`, with these differences:

    - An exception in the waiting thread (Ctrl-C) cancels the request before it goes on, in one attempt.
    - In a forked child the client goes on as a producer of its own: the first call there opens new connections under a
      new producer id (a given one gets the process id behind it). Requests of the parent stay the parent's.
    - `direct=True` runs an event loop in a thread of the client's.
    """

    def __init__(self, url: str = "", **options: Unpack[ClientKeywords]) -> None:
        """Prepare a client; `with` opens it. Keywords: the members of `ClientOptions` (`client` has no meaning here).

        Raises:
            ConfigurationError, InvalidRequest: an option is wrong; names it.
        """
        self._options = ClientOptions(**options)
        self._url = url if self._options.direct else require_url(url)
        self._path: BlockingPath[Any] | None = None
        # By process: a fork copies a lock as it is, also one that another thread of the parent holds.
        self._reopening: dict[int, threading.Lock] = {}

    def __enter__(self) -> Self:
        """Connect, check the server's library and start the background threads.

        Raises:
            FabricUnavailable, LibraryProblem, ConfigurationError: the group cannot be used; says what to do.
        """
        if self._path is not None:
            raise StateConflict("this client is open already")
        self._path = self._open(self._options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is outstanding, wait for that at most about `close_ms`, and close. Repeatable.

        Threads still waiting get a reply that ended `cancelled`, or `StateConflict`.
        """
        path, self._path = self._path, None
        if path is not None and not path.forked:
            path.close()

    @property
    def producer_id(self) -> str | None:
        """The name under which the group knows this client; None while it is not open here, and for a direct one."""
        path = self._path
        return path.session.producer_id if isinstance(path, BlockingQueuedPath) and not path.forked else None

    def complete(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        pool: str = DEFAULT_POOL,
        metadata: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> Reply:
        """Make one chat completion and return its reply, which succeeded.

        Arguments and errors are those of the asynchronous `DispatchClient.complete`.
        """
        named = {"model": model, "messages": messages, "pool": pool, "metadata": metadata, "timeout": timeout}
        return self._succeeded(self.call(*build_completion(named | more)))

    def stream(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        pool: str = DEFAULT_POOL,
        metadata: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> BlockingChunkStream:
        """Make one chat completion and return its chunks as they come (see `BlockingChunkStream`).

        Arguments and errors are those of the asynchronous `DispatchClient.stream`.
        """
        named = {"model": model, "messages": messages, "pool": pool, "metadata": metadata, "timeout": timeout}
        call, options = build_completion(named | more, stream=True)
        raising = BackendError if self._options.direct else RequestEnded
        return BlockingChunkStream(self._current().stream(call, options), raising)

    def call(self, call: Call, options: CallOptions | None = None, *, within_s: float = math.inf) -> Reply:
        """Make one call and return its terminal reply, whatever its ending.

        `within_s` bounds how long this thread waits; unlike the call's timeout it says nothing to the group.

        Raises:
            InvalidRequest, RequestRefused, PoolUnknown, GroupUnknown, StateConflict: nothing was queued. A body that
                asks for a stream is an `InvalidRequest`.
            FabricUnavailable, OutcomeUnknown: as of the asynchronous client.
            TimeoutError: `within_s` is over; the request is cancelled.
        """
        until = time.monotonic() + within_s
        path = self._current()
        begun = path.prepare(call, options or CallOptions())
        try:
            path.begin(begun)
            if until < begun.until:
                _wait_for(begun, until)
            return path.finish(begun)
        except BaseException:
            path.leave(begun)
            raise

    def stream_call(self, call: Call, options: CallOptions | None = None) -> BlockingChunkStream:
        """Return the chunks of one call whose body asks for a stream, as they come.

        The chunks end whatever the ending, which stands in the stream's `reply`.

        Raises:
            InvalidRequest: the body does not ask for a stream, or the call cannot be queued.
            StateConflict: the client is not open.
        """
        return BlockingChunkStream(self._current().stream(call, options or CallOptions()), None)

    def batch_generate(
        self,
        items: Sequence[Item],
        progress: Callable[[int, int], object] | None = None,
        *,
        concurrency: int = CONCURRENCY,
    ) -> list[Reply | DispatchError]:
        """Make many chat completions, at most `concurrency` at a time, and return their outcomes in order.

        Each item is a mapping of `complete()`'s arguments. At its place stands the reply that succeeded, or the error
        that `complete()` would have raised. `progress(finished, total)` is called in this thread after each.

        Raises:
            Exception: what `progress` raised. On any exception the requests under way are cancelled.
        """
        check_concurrency(concurrency)
        batch = _Batch(self._current(), self._succeeded)
        results: dict[int, Reply | DispatchError] = {}
        for place, outcome in batch.outcomes(items, concurrency):
            results[place] = outcome
            if progress is not None:
                progress(len(results), len(items))
        return [results[place] for place in range(len(items))]

    def _succeeded(self, reply: Reply) -> Reply:
        if not reply.succeeded:
            raise BackendError(reply) if self._options.direct else RequestEnded(reply)
        return reply

    def _queue(self) -> BlockingQueuedPath:
        path = self._current()
        if not isinstance(path, BlockingQueuedPath):
            raise StateConflict("a client with direct=True has no queue: nothing can be submitted or asked after")
        return path

    def _current(self) -> BlockingPath[Any]:
        path = self._path
        if path is not None and path.forked:
            with self._reopening.setdefault(os.getpid(), threading.Lock()):
                if self._path is path:  # the first thread of this child
                    self._path = self._open(_for_child(self._options))
                path = self._path
        if path is None:
            raise StateConflict("this client is not open: use it inside 'with DispatchClient(...)'")
        return path

    def _open(self, options: ClientOptions) -> BlockingPath[Any]:
        path: BlockingPath[Any]
        if options.direct:
            # The HTTP stack is loaded only by clients that need it.
            from dispatch.producer.blocking_direct import BlockingDirectPath  # noqa: PLC0415 - see above

            path = BlockingDirectPath(options)
        else:
            path = BlockingQueuedPath(self._url, options)
        path.open()
        return path


class _Batch:
    """One batch, driven by the thread that asked for it."""

    def __init__(self, path: BlockingPath[Any], succeeded: Callable[[Reply], Reply]) -> None:
        self._path = path
        self._succeeded = succeeded
        self._active: dict[int, Begun] = {}
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()

    def outcomes(self, items: Sequence[Item], concurrency: int) -> Iterator[tuple[int, Reply | DispatchError]]:
        """Yield (place, outcome) as items end. When left early, what is under way is cancelled."""
        rest = iter(enumerate(items))
        try:
            while True:
                while len(self._active) < concurrency and (entry := next(rest, None)) is not None:
                    if (error := self._begin(*entry)) is not None:
                        yield entry[0], error
                if not self._active:
                    return
                for place in self._ended():
                    yield place, self._finish(place)
        finally:
            for begun in self._active.values():
                self._path.leave(begun)

    def _begin(self, place: int, item: Item) -> DispatchError | None:
        try:
            self._active[place] = begun = self._path.prepare(*build_completion(item))
            self._path.begin(begun)
        except DispatchError as error:
            if (begun := self._active.pop(place, None)) is not None:
                self._path.leave(begun)
            return error
        begun.ready.add_done_callback(lambda _: self._ready.put(place))
        return None

    def _ended(self) -> list[int]:
        """Wait until an item has an outcome, or is overdue."""
        nearest = min(begun.until for begun in self._active.values()) - time.monotonic()
        try:
            place = self._ready.get(timeout=max(0.0, min(nearest, threading.TIMEOUT_MAX)))
        except queue.Empty:
            now = time.monotonic()
            return [place for place, begun in self._active.items() if begun.until <= now]
        return [place] if place in self._active else []  # one that was overdue may have got its outcome after all

    def _finish(self, place: int) -> Reply | DispatchError:
        begun = self._active.pop(place)
        try:
            reply = self._path.finish(begun)
        except BaseException as error:
            self._path.leave(begun)
            if isinstance(error, DispatchError):
                return error
            raise
        try:
            return self._succeeded(reply)
        except DispatchError as error:
            return error


def _wait_for(begun: Begun, until: float) -> None:
    """Wait for an outcome until `until`.

    Raises:
        TimeoutError: there is none.
    """
    wait([begun.ready], max(0.0, until - time.monotonic()))
    if not begun.ready.done():
        raise TimeoutError("no reply came in the time that the caller gave; the request is cancelled")


def _for_child(options: ClientOptions) -> ClientOptions:
    if options.producer_id is None:
        return options
    suffix = f".{os.getpid()}"
    return dataclasses.replace(options, producer_id=options.producer_id[: _NAME_MAX - len(suffix)] + suffix)

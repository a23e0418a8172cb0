"""The direct path for blocking code: the asynchronous one, in one event loop thread for the client's whole life."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from dispatch.contract import Call, Chunk, Reply
from dispatch.errors import StateConflict
from dispatch.producer.direct import DirectPath
from dispatch.producer.direct_stream import DirectStream
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.whereabouts import Whereabouts

T = TypeVar("T")


@dataclass(slots=True)
class Running:
    """A call under way; it ends by its own deadline."""

    call: Call
    options: CallOptions
    future: Future[Reply] | None = None
    until: float = math.inf

    @property
    def ready(self) -> Future[Reply]:
        """Done when there is an outcome to take with `finish`; only after `begin`."""
        if self.future is None:
            raise StateConflict("the call was not begun")
        return self.future


@dataclass(frozen=True, slots=True)
class _World:
    """The event loop's thread and what lives in its loop."""

    portal: BlockingPortal
    path: DirectPath
    thread: threading.Thread


class BlockingDirectStream:
    """A stream that the event loop's thread reads."""

    def __init__(self, portal: BlockingPortal, stream: DirectStream) -> None:
        self._portal = portal
        self._stream = stream

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._stream.request_id

    @property
    def reply(self) -> Reply | None:
        """How it ended, None until then."""
        return self._stream.reply

    def open(self) -> None:
        """Make the call.

        Raises:
            StateConflict: the client is closed.
        """
        self._in_loop(self._stream.open)

    def read(self, within_s: float) -> list[Chunk]:
        """Return the chunks that are there; waits for one. None come: the time is over, or the stream (`reply`).

        Raises:
            StateConflict: the client was closed.
        """
        return self._in_loop(self._stream.read, within_s)

    def whereabouts(self) -> Whereabouts:
        """Say since when it runs."""
        return self._in_loop(self._stream.whereabouts)

    def leave(self) -> None:
        """Stop reading: the connection is closed. Repeatable."""
        with suppress(StateConflict):
            self._in_loop(self._leave)

    def leave_soon(self) -> None:
        """The same without waiting for it; from any place, also from a finaliser."""
        self._stream.leave_soon()

    async def _leave(self) -> None:
        self._stream.leave()

    def _in_loop(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            future = self._portal.start_task_soon(work, *args)
        except RuntimeError as error:
            raise StateConflict("the client is closed") from error
        return future.result()


class BlockingDirectPath:
    """Calls one endpoint from many threads."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._pid = os.getpid()
        self._world: _World | None = None

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that opened the path: its event loop did not come along."""
        return os.getpid() != self._pid

    def open(self) -> None:
        """Start the event loop's thread.

        Raises:
            ConfigurationError: the endpoint's URL is wrong.
        """
        # No `start_blocking_portal()`: in a forked child, which has its generator without its thread, that would wait
        # for the thread when the generator is collected.
        started: Future[_World] = Future()
        threading.Thread(target=self._serve, args=(started,), name="direct-calls", daemon=True).start()
        self._world = started.result()

    def prepare(self, call: Call, options: CallOptions) -> Running:
        """Note a call; nothing is sent yet."""
        return Running(call, options)

    def begin(self, running: Running) -> None:
        """Start the call.

        Raises:
            StateConflict: the client is closed.
        """
        world = self._world
        if world is None:
            raise StateConflict("the client is closed")
        running.future = world.portal.start_task_soon(world.path.call, running.call, running.options)

    def finish(self, running: Running) -> Reply:
        """Wait for the reply, whatever its ending.

        Raises:
            InvalidRequest: the call would not be accepted by the queued path either.
        """
        return running.ready.result()

    def leave(self, running: Running) -> None:
        """Stop the call: its connection is closed."""
        if running.future is not None:
            running.future.cancel()

    def stream(self, call: Call, options: CallOptions) -> BlockingDirectStream:
        """Return the stream of `call`; nothing is sent before it is opened.

        Raises:
            InvalidRequest: the call would not be accepted by the queued path either, or does not ask for a stream.
            StateConflict: the client is closed.
        """
        world = self._world
        if world is None:
            raise StateConflict("the client is closed")
        return BlockingDirectStream(world.portal, world.portal.call(world.path.stream, call, options))

    def close(self) -> None:
        """Close the connections and end the thread; calls under way fail. Repeatable."""
        world, self._world = self._world, None
        if world is not None:
            world.portal.call(world.path.aclose)
            world.portal.call(world.portal.stop)
            world.thread.join()

    def _serve(self, started: Future[_World]) -> None:
        try:
            anyio.run(self._live, started)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _live(self, started: Future[_World]) -> None:
        path = await DirectPath.open(self._options)
        async with BlockingPortal() as portal:
            started.set_result(_World(portal, path, threading.current_thread()))
            await portal.sleep_until_stopped()

"""The direct path for blocking code: the asynchronous one, in one event loop thread for the client's whole life."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from anyio.from_thread import BlockingPortal, start_blocking_portal

from dispatch.contract import Call, Reply
from dispatch.errors import StateConflict
from dispatch.producer.direct import DirectPath
from dispatch.producer.options import CallOptions, ClientOptions


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


class BlockingDirectPath:
    """Calls one endpoint from many threads."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._pid = os.getpid()
        self._resources = ExitStack()
        self._portal: BlockingPortal | None = None
        self._path: DirectPath | None = None

    @property
    def forked(self) -> bool:
        """Whether this is another process than the one that opened the path: its event loop did not come along."""
        return os.getpid() != self._pid

    def open(self) -> None:
        """Start the event loop's thread.

        Raises:
            ConfigurationError: the endpoint's URL is wrong.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            self._path = portal.call(DirectPath.open, self._options)
            stack.callback(portal.call, self._path.aclose)
            self._portal = portal
            self._resources = stack.pop_all()

    def prepare(self, call: Call, options: CallOptions) -> Running:
        """Note a call; nothing is sent yet."""
        return Running(call, options)

    def begin(self, running: Running) -> None:
        """Start the call.

        Raises:
            StateConflict: the client is closed.
        """
        if self._portal is None or self._path is None:
            raise StateConflict("the client is closed")
        running.future = self._portal.start_task_soon(self._path.call, running.call, running.options)

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

    def close(self) -> None:
        """Close the connections and end the thread; calls under way fail. Repeatable."""
        self._portal = None
        self._resources.close()

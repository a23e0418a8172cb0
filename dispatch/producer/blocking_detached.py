"""The blocking twin of `dispatch.producer.detached`: submit now, fetch later, without an event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from dispatch.contract import Call, Reply, Scalar
from dispatch.errors import FabricUnavailable, OutcomeUnknown, RequestEnded, RequestInProgress
from dispatch.fabric import functions
from dispatch.fabric.frames import Frame
from dispatch.fabric.records import Estimate
from dispatch.fabric.sync import BlockingConnection
from dispatch.producer.blocking import BlockingQueuedPath
from dispatch.producer.bodies import body_key, with_body
from dispatch.producer.completion import build_completion
from dispatch.producer.detached import (
    Found,
    Handle,
    Patience,
    RequestState,
    detached,
    found_in,
    handle_of,
    handle_of_earlier,
    may_be_kept,
    result_key,
)
from dispatch.producer.options import DEFAULT_POOL, CallOptions
from dispatch.producer.overdue import end_overdue
from dispatch.producer.recovery import state_of


def look(connection: BlockingConnection, group: str, request_id: str) -> Found:
    """Ask what the group knows of a request.

    Raises:
        FabricError: what the connection says.
    """
    answer = connection.run(group, state_of(request_id))
    raw = connection.get(result_key(group, request_id)) if may_be_kept(answer) else None
    return found_in(request_id, answer, raw)


def wait_for_reply(connection: BlockingConnection, group: str, request_id: str, seconds: float | None) -> Reply:
    """Wait until the request has ended and return its reply, whatever its ending. Errors: those of the async twin."""
    patience = Patience(request_id, seconds)
    while True:
        try:
            found = look(connection, group, request_id)
            patience.heard()
            if (frame := found.kept()) is not None:
                return _whole_reply(connection, group, frame)
            if found.overdue:
                connection.run(group, end_overdue())
        except OutcomeUnknown:
            raise
        except FabricUnavailable as error:
            patience.bear(error)
        time.sleep(patience.pause())


def submit(path: BlockingQueuedPath, call: Call, options: CallOptions) -> Handle:
    """Queue `call` for nobody to wait for. On an exception the request is cancelled, soon, if it was queued.

    Errors are those of `QueuedPath.submit`.
    """
    waiting = path.waiting(call, detached(call, options), Future())
    try:
        path.admit(waiting.errand)
    except RequestInProgress as earlier:
        return handle_of_earlier(waiting.errand, earlier)
    except BaseException:
        path.leave_soon(waiting)
        raise
    return handle_of(waiting.errand)


class BlockingSubmits:
    """What a client can do for requests that are fetched later. Mixed into the blocking client.

    Arguments, answers and errors are those of the asynchronous client's methods.
    """

    def submit(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        pool: str = DEFAULT_POOL,
        metadata: Mapping[str, Scalar] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> Handle:
        """Queue one chat completion and return at once: it is fetched with `result`, also by another process."""
        named = {"model": model, "messages": messages, "pool": pool, "metadata": metadata, "timeout": timeout}
        return self.submit_call(*build_completion(named | more))

    def submit_call(self, call: Call, options: CallOptions | None = None) -> Handle:
        """Queue one call of any operation, to be fetched later."""
        return submit(self._queue(), call, options or CallOptions())

    def result(self, request_id: str, timeout: float | None = None) -> Reply:
        """Wait for the reply of a submitted request and return it; it succeeded."""
        path = self._queue()
        reply = wait_for_reply(path.connection, path.session.group, request_id, timeout)
        if not reply.succeeded:
            raise RequestEnded(reply)
        return reply

    def status(self, request_id: str) -> RequestState:
        """Say where a request is."""
        path = self._queue()
        return look(path.connection, path.session.group, request_id).state()

    def estimate(self, pool: str = DEFAULT_POOL) -> Estimate:
        """Say how long a request that is submitted to `pool` now would wait."""
        path = self._queue()
        return path.connection.run(path.session.group, functions.pool_estimate(pool))

    def _queue(self) -> BlockingQueuedPath:
        """Return the way through the queue.

        Raises:
            StateConflict: the client is not open, or has no queue.
        """
        raise NotImplementedError


def _whole_reply(connection: BlockingConnection, group: str, frame: Frame) -> Reply:
    return with_body(frame, connection.get(body_key(group, frame))) if frame.by_reference else frame.reply

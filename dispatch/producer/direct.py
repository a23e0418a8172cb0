"""The direct path: the same calls, straight to an endpoint, through the gateway's own adapter. No queue, no Valkey."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

import anyio

from dispatch.backend.client import EndpointClient
from dispatch.backend.endpoint import Endpoint
from dispatch.backend.execution import Execution
from dispatch.contract import Call, Reply
from dispatch.errors import StateConflict
from dispatch.producer.direct_stream import DirectStream
from dispatch.producer.draft import check_call, require_stream, require_whole
from dispatch.producer.inheritance import keep_in_children
from dispatch.producer.options import CallOptions, ClientOptions

ENDPOINT_ID = "direct"
DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a call without a timeout; equal to the default of a pool."""


class DirectPath:
    """Calls one endpoint. Bodies and replies are those of the queued path; `queue_ms` is None."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._client = EndpointClient()
        self._closed = False
        self._readers: set[asyncio.Task[Execution]] = set()
        keep_in_children(self)

    @classmethod
    async def open(cls, options: ClientOptions) -> DirectPath:
        """Make the path; nothing is connected yet.

        Raises:
            ConfigurationError: the endpoint's URL is wrong.
        """
        return cls(endpoint_of(options))

    async def call(self, call: Call, options: CallOptions) -> Reply:
        """Make one call; returns the reply whatever its ending.

        Raises:
            InvalidRequest: the call would not be accepted by the queued path either.
            StateConflict: the client is closed.
        """
        require_whole(call)
        self._check(call, options)
        execution = await self._client.execute(self._endpoint, call, deadline_s=_deadline_s(options))
        return Reply(
            request_id=options.request_id or uuid.uuid4().hex,
            pool_id=options.pool_id,
            ending=execution.outcome,
            head=execution.head,
            body=execution.body,
            queue_ms=None,
            execution_ms=execution.execution_ms,
        )

    def stream(self, call: Call, options: CallOptions) -> DirectStream:
        """Return the stream of `call`; nothing is sent before it is opened.

        Raises:
            InvalidRequest: the call would not be accepted by the queued path either.
            StateConflict: the client is closed.
        """
        require_stream(call, options)
        self._check(call, options)
        stream = self._client.stream(self._endpoint, call, deadline_s=_deadline_s(options))
        return DirectStream(self, stream, options.request_id or uuid.uuid4().hex, options.pool_id)

    def start(self, reading: Coroutine[Any, Any, Execution]) -> asyncio.Task[Execution]:
        """Read a stream in a task that ends with this path, at the latest.

        Raises:
            StateConflict: the client is closed.
        """
        if self._closed:
            reading.close()
            raise _closed()
        task = asyncio.create_task(reading)
        self._readers.add(task)
        task.add_done_callback(self._read)
        return task

    async def aclose(self) -> None:
        """Close the connections; calls under way fail. Repeatable."""
        self._closed = True
        readers = list(self._readers)
        for reader in readers:
            reader.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*readers, return_exceptions=True)
            await self._client.aclose()

    def _read(self, reader: asyncio.Task[Execution]) -> None:
        self._readers.discard(reader)
        if not reader.cancelled():
            reader.exception()  # whoever reads the stream is told; if nobody does, it is no error of the event loop's

    def _check(self, call: Call, options: CallOptions) -> None:
        check_call(call, options)
        if self._closed:
            raise _closed()


def endpoint_of(options: ClientOptions) -> Endpoint:
    """Return the endpoint that `options` name.

    Raises:
        ConfigurationError: its URL is wrong.
    """
    endpoint = options.endpoint
    return endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint_id=ENDPOINT_ID, url=endpoint or "")


def _deadline_s(options: CallOptions) -> float:
    return DEFAULT_TIMEOUT_S if options.timeout_ms is None else options.timeout_ms / 1000


def _closed() -> StateConflict:
    return StateConflict("the client is closed")

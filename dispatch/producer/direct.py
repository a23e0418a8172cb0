"""The direct path: the same calls, straight to an endpoint, through the gateway's own adapter. No queue, no Valkey."""

from __future__ import annotations

import uuid

from dispatch.backend.client import EndpointClient
from dispatch.backend.endpoint import Endpoint
from dispatch.contract import Call, Reply
from dispatch.errors import StateConflict
from dispatch.producer.draft import check_call
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
        check_call(call, options)
        if self._closed:
            raise StateConflict("the client is closed")
        deadline_s = DEFAULT_TIMEOUT_S if options.timeout_ms is None else options.timeout_ms / 1000
        execution = await self._client.execute(self._endpoint, call, deadline_s=deadline_s)
        return Reply(
            request_id=options.request_id or uuid.uuid4().hex,
            pool_id=options.pool_id,
            ending=execution.outcome,
            head=execution.head,
            body=execution.body,
            queue_ms=None,
            execution_ms=execution.execution_ms,
        )

    async def aclose(self) -> None:
        """Close the connections; calls under way fail. Repeatable."""
        self._closed = True
        await self._client.aclose()


def endpoint_of(options: ClientOptions) -> Endpoint:
    """Return the endpoint that `options` name.

    Raises:
        ConfigurationError: its URL is wrong.
    """
    endpoint = options.endpoint
    return endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint_id=ENDPOINT_ID, url=endpoint or "")

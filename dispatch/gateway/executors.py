"""Who does the work of a lease: the seam between claiming and calling."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from dispatch.backend.client import EndpointClient
from dispatch.backend.execution import Execution
from dispatch.backend.streaming import BackendStream
from dispatch.contract.call import Call
from dispatch.contract.envelope import RequestEnvelope
from dispatch.contract.reply import ReplyHead
from dispatch.fabric.records import Lease
from dispatch.gateway.endpoints import Endpoints
from dispatch.telemetry.identity import Request, attempt_part, traceparent_of


class Executor(Protocol):
    """Runs one request.

    Duties:

    1. Answer an `Execution` for whatever the endpoint does; an exception is settled as `failed` (a fault of ours).
    2. Keep `deadline_s` (seconds from now); a run that is late by much is cancelled and settled as `expired`.
    3. When cancelled, break the work off and let the cancellation through.
    """

    async def execute(self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float) -> Execution:
        """Run the request of `lease`."""
        ...

    async def aclose(self) -> None:
        """Let go of what is held between requests. Repeatable."""
        ...


@runtime_checkable
class StreamingExecutor(Protocol):
    """An executor that can stream, too. The duties are the same; the stream says how it ended."""

    async def stream(
        self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float
    ) -> AbstractAsyncContextManager[BackendStream]:
        """Return the stream of the request of `lease`; entering it makes the call."""
        ...


class EndpointExecutor:
    """Calls the endpoint that the lease names, by the group's config. The client is closed by who gave it."""

    def __init__(self, group: str, endpoints: Endpoints, client: EndpointClient) -> None:
        self._group = group
        self._endpoints = endpoints
        self._client = client

    async def execute(self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float) -> Execution:
        """Call the endpoint.

        Raises:
            EndpointUnusable: the config has no such endpoint, or its key cannot be read here.
        """
        endpoint = await self._endpoints.find(lease.endpoint_id)
        return await self._client.execute(endpoint, self._call(lease, envelope, body), deadline_s=deadline_s)

    async def stream(
        self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float
    ) -> AbstractAsyncContextManager[BackendStream]:
        """Return the stream of a call to the endpoint.

        Raises:
            EndpointUnusable: as of `execute`.
        """
        endpoint = await self._endpoints.find(lease.endpoint_id)
        return self._client.stream(endpoint, self._call(lease, envelope, body), deadline_s=deadline_s)

    async def aclose(self) -> None:
        """Nothing of its own to close."""

    def _call(self, lease: Lease, envelope: RequestEnvelope, body: bytes) -> Call:
        return Call(
            operation=envelope.operation,
            body=body,
            model=envelope.model,
            stream=envelope.stream,
            message_count=envelope.message_count,
            image_count=envelope.image_count,
            traceparent=self._traceparent(lease, envelope),
            tracestate=envelope.tracestate,
        )

    def _traceparent(self, lease: Lease, envelope: RequestEnvelope) -> str | None:
        """Return the context that the endpoint continues: this attempt's span, if its producer has a trace."""
        if envelope.traceparent is None:
            return None
        request = Request(self._group, lease.request_id, lease.submitted_ms, envelope.traceparent)
        return traceparent_of(request, attempt_part(lease.attempt))


class NoopExecutor:
    """Answers at once with the same bytes: what is left is the cost of the queue itself."""

    def __init__(self, body: bytes = b"{}") -> None:
        self._execution = Execution(outcome="succeeded", head=ReplyHead(status=200), body=body, verdict="good")

    async def execute(self, lease: Lease, envelope: RequestEnvelope, body: bytes, deadline_s: float) -> Execution:  # noqa: ARG002 - the protocol's
        """Do nothing, successfully."""
        return self._execution

    async def aclose(self) -> None:
        """Nothing to close."""

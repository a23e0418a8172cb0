"""Making settlements: what an attempt came to, in the form `lease_settle` takes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dispatch.backend.execution import ErrorType, Execution
from dispatch.contract.reply import ReplyError, ReplyHead, Usage
from dispatch.fabric.records import Lease, Outcome, Settlement, Verdict
from dispatch.gateway.detailing import details_of, details_of_stopped
from dispatch.gateway.holdings import Held, Phase, StopReason
from dispatch.gateway.identity import Identity

_ENCODER = msgspec.json.Encoder()

_OUTCOMES = {word.value: word for word in Outcome}
_VERDICTS = {word.value: word for word in Verdict}
# Looked up: making an enum member of its word takes ten times as long.

_STOPPED = {
    StopReason.CANCELLED: (Outcome.CANCELLED, "cancelled", "the request was cancelled while it ran"),
    StopReason.EXPIRED: (Outcome.EXPIRED, "deadline_exceeded", "the request's deadline passed while it ran"),
    StopReason.GONE: (Outcome.PRODUCER_GONE, "producer_gone", "the producer stopped refreshing its liveness"),
    StopReason.SLOW: (Outcome.FAILED, "slow_consumer", "too little of the stream was read while it came"),
    StopReason.DRAINED: (Outcome.LOST, "lost", "the gateway shut down before the endpoint had answered"),
}

_NO_USAGE = Usage()


_MAY_GO_BACK = frozenset({StopReason.DRAINED, StopReason.PROBE_OVER})


class Settler:
    """Signs every result with the gateway's and the dispatcher's name."""

    REFUSED = "settle_refused"

    def __init__(
        self,
        identity: Identity,
        is_given_back: Callable[[str], bool],
        address_of: Callable[[str], str | None],
    ) -> None:
        """`is_given_back` says whether a pool's requests may be run again (delivery `at_least_once`).

        `address_of` an endpoint is where it is, for the record of a run that it did not end.
        """
        self._is_given_back = is_given_back
        self._address_of = address_of
        self.gateway_id = identity.gateway_id
        self._dispatcher_id = identity.dispatcher_id
        self._failed_head = ReplyHead(gateway_id=self.gateway_id, dispatcher_id=self._dispatcher_id)

    def executed(
        self, lease: Lease, execution: Execution, asked: bytes = b"", *, by_reference: bool = False
    ) -> Settlement:
        """Settle with what the executor says; `by_reference` when the body was stored by itself.

        `asked`: the body of the call, for the record.
        """
        head = msgspec.structs.replace(execution.head, gateway_id=self.gateway_id, dispatcher_id=self._dispatcher_id)
        error, usage = head.error, head.usage
        return Settlement(
            request_id=lease.request_id,
            fence=lease.fence,
            outcome=_OUTCOMES[execution.outcome],
            status=head.status,
            error_type="" if error is None else error.type,
            error_message="" if error is None else error.message,
            verdict=_VERDICTS[execution.verdict],
            hold_ms=execution.hold_ms,
            input_tokens=None if usage is None else usage.input_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            head=_ENCODER.encode(head),
            body=b"" if by_reference else execution.body,
            by_reference=by_reference,
            retryable=execution.retryable,
            details=details_of(execution, asked),
        )

    def failed(self, lease: Lease, error_type: str, message: str) -> Settlement:
        """Settle as failed by our own doing: the endpoint was not called, or cannot be blamed."""
        return self._own(lease, Outcome.FAILED, error_type, message)

    def stopped(self, held: Held) -> Settlement:
        """Settle a run that was stopped (not one that was lost: that one is not ours to settle).

        A drained one goes back with no attempt counted if its endpoint call has not begun, or if its pool is
        `at_least_once` and nothing has gone to the caller; else its caller is told. A probe whose time was over before
        its call began goes back, too: the endpoint was not asked.
        """
        reason = held.stop or StopReason.DRAINED
        if reason in _MAY_GO_BACK and held.phase is not Phase.CALLING:
            return self.released(held.lease)
        if reason is StopReason.DRAINED and not held.told and self._is_given_back(held.lease.pool_id):
            return self.released(held.lease)
        if reason is StopReason.PROBE_OVER:
            settlement = self._probe_over(held.lease)
        else:
            settlement = self._own(held.lease, *_STOPPED[reason])
        if held.phase is not Phase.CALLING:
            return settlement
        usage = held.usage or _NO_USAGE
        details = details_of_stopped(self._address_of(held.lease.endpoint_id), usage)
        tokens = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
        return msgspec.structs.replace(settlement, details=details, **tokens)

    def lost(self, lease: Lease) -> Settlement:
        """Settle a lease whose call may have come to no end; its pool's delivery mode says what follows."""
        message = "the gateway lost touch with the fabric group while the request ran, and broke it off"
        return self._own(lease, Outcome.LOST, "lost", message)

    def released(self, lease: Lease) -> Settlement:
        """Give a lease back unexecuted."""
        return Settlement(request_id=lease.request_id, fence=lease.fence, outcome=Outcome.RELEASE)

    def refused(self, item: Settlement) -> Settlement:
        """Return a plain stand-in for a result the server did not take as it was."""
        error = ReplyError(type=self.REFUSED, message="the result could not be delivered", source="dispatch")
        return Settlement(
            request_id=item.request_id,
            fence=item.fence,
            outcome=Outcome.FAILED,
            error_type=error.type,
            error_message=error.message,
            head=_ENCODER.encode(msgspec.structs.replace(self._failed_head, error=error)),
        )

    def _probe_over(self, lease: Lease) -> Settlement:
        message = "the endpoint had not answered when the time of the breaker's probe was over"
        error = ReplyError(type=ErrorType.TIMEOUT.value, message=message, source="endpoint")
        return Settlement(
            request_id=lease.request_id,
            fence=lease.fence,
            outcome=Outcome.FAILED,
            error_type=error.type,
            error_message=message,
            verdict=Verdict.FAILURE,
            head=self._head(lease, error),
        )

    def _head(self, lease: Lease, error: ReplyError) -> bytes:
        head = msgspec.structs.replace(self._failed_head, error=error, endpoint_id=lease.endpoint_id or None)
        return _ENCODER.encode(head)

    def _own(self, lease: Lease, outcome: Outcome, error_type: str, message: str) -> Settlement:
        error = ReplyError(type=error_type, message=message, source="dispatch")
        return Settlement(
            request_id=lease.request_id,
            fence=lease.fence,
            outcome=outcome,
            error_type=error_type,
            error_message=message,
            head=self._head(lease, error),
        )

"""One call of the asynchronous client while it is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dispatch.contract.reply import Reply, ReplyError, ReplyHead
from dispatch.errors import DispatchError, FabricUnavailable
from dispatch.fabric.records import Admitted
from dispatch.producer.draft import Admission, Draft
from dispatch.producer.inbox import Outcome
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.pipeline import Ticket
from dispatch.producer.promise import Promise

GRACE_S = 2.0
"""How long after its deadline a request's reply may still be on its way."""


@dataclass(slots=True)
class Errand:
    """A draft, where its reply goes, and what is known about whether the group has it."""

    draft: Draft
    timeout_ms: int | None
    admission_s: float
    slot: Promise[Outcome] = field(default_factory=Promise)
    started: float = field(default_factory=time.monotonic)
    ticket: Ticket[Admission] | None = None
    stored: bool = False
    """Its body stands under its key."""
    uncertain: bool = False
    """The answer of an earlier attempt to submit was lost."""

    @classmethod
    def of(cls, draft: Draft, options: CallOptions, client: ClientOptions) -> Errand:
        """Make the errand of one call. Admission is bounded by the call, else by the client, and by its timeout."""
        bound = options.admission_ms or client.admission_ms
        if options.timeout_ms is not None:
            bound = min(bound, options.timeout_ms)
        return cls(draft, options.timeout_ms, bound / 1000)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.draft.request_id

    def admission_left_s(self) -> float:
        """Return how long the submit may still be repeated."""
        return self.started + self.admission_s - time.monotonic()

    def timeout_left_ms(self) -> int | None:
        """Return what is left of the caller's timeout, at least 1; None = the pool's default."""
        if self.timeout_ms is None or self.ticket is None:
            return self.timeout_ms
        return max(1, self.timeout_ms - int((time.monotonic() - self.started) * 1000))

    def surely_not_queued(self) -> bool:
        """Whether it is certain that the group does not have the request."""
        ticket = self.ticket
        if ticket is None:
            return True
        if not ticket.answer.done():
            return ticket.withdraw() and not self.uncertain
        answer = ticket.answer.result()
        if isinstance(answer, FabricUnavailable):
            return not (ticket.sent or self.uncertain)
        return not isinstance(answer, Admitted)


def no_word(draft: Draft, silent_s: float) -> Reply | DispatchError:
    """Make the outcome of a request of which nothing came until its deadline and the grace after it.

    `silent_s` = since when the server has not answered this client at all.
    """
    if silent_s > GRACE_S:
        return FabricUnavailable(
            f"no reply to request {draft.request_id} by its deadline, and Valkey has not answered for {silent_s:.1f} "
            "s; it is not known how the request ended"
        )
    message = f"no reply came by the deadline and {GRACE_S:.0f} s after it; the request was told to stop"
    head = ReplyHead(error=ReplyError(type="expired", message=message, source="dispatch"))
    return Reply(request_id=draft.request_id, pool_id=draft.submission.pool_id, ending="expired", head=head)

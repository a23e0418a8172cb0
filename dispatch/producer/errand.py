"""One call while it is under way: what is known about whether the group has it. No I/O; both clients use it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from dispatch.contract.reply import Reply, ReplyError, ReplyHead
from dispatch.errors import DispatchError, FabricUnavailable, OutcomeUnknown, RequestRefused
from dispatch.fabric.frames import Frame, decode_frame
from dispatch.fabric.functions import Admission
from dispatch.fabric.records import Admitted, Refused, Replayed
from dispatch.producer.draft import Draft, refusal
from dispatch.producer.inbox import Outcome, Slot
from dispatch.producer.options import CallOptions, ClientOptions
from dispatch.producer.room import NO_ROOM, pause_s

GRACE_S = 1.8
"""How long after its deadline a request's reply may still be on its way: nobody waits longer than 2 s, the time to tell
it included."""

ADMISSION_MAX_S = 50.0
"""How long a submit may go on at most, also while others are answered; a group remembers an ended request for 60 s."""

REPLAY_S = 30.0
"""How long reading a stored reply may take."""

ASK_S = 0.1
"""How long after its deadline a request without a reply is asked after: one that runs is ended by its gateway."""

ASK_AGAIN_S = 0.5
"""Pause before it is asked after again."""

_ASKS_MAX = 3
"""How often in a row, before its deadline has passed."""

LATE_S = 0.1
"""A waiter that wakes later than this was held up by its own process, and so was whoever brings the replies."""

RETRY_MIN_S, RETRY_MAX_S = 0.02, 0.5
"""Pause between two attempts to submit, doubled each time."""


class OutcomeSlot(Slot, Protocol):
    """A slot that can be read."""

    def result(self) -> Outcome:
        """Return the outcome; only after `done()`."""
        ...


class Attempt(Protocol):
    """One submit on its way. `sent` (since `sent_at` on the monotonic clock): from now on it may be done."""

    sent: bool
    sent_at: float

    def withdraw(self) -> bool:
        """Take the submit back if it was not sent yet; returns whether it was in time."""
        ...

    def answered(self) -> Admission | DispatchError | None:
        """Return the answer, None while there is none."""
        ...


SlotT = TypeVar("SlotT", bound=OutcomeSlot)
AttemptT = TypeVar("AttemptT", bound=Attempt)


@dataclass(slots=True, kw_only=True)
class Errand(Generic[SlotT, AttemptT]):
    """A draft, where its reply goes, and how far it came."""

    draft: Draft
    slot: SlotT
    timeout_ms: int | None
    admission_s: float
    waits_for_room: bool = False
    refusals: int = 0
    """How often it was refused for want of room."""
    began: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)
    """When the present try to submit began; `began`: the first one."""
    asked: float = field(default_factory=time.monotonic)
    """From when on the server's silence counts."""
    attempt: AttemptT | None = None
    stored: bool = False
    """Its body stands under its key."""
    uncertain: bool = False
    """The answer of an earlier attempt to submit was lost."""
    lapsed: bool = False
    """The producer's liveness had run out when the request came."""
    replay: Outcome | None = None
    """The stored reply of an earlier call, which stands for this one."""
    overdue_at: float = 0.0
    """When its reply is overdue, on the monotonic clock; `ask_at`: when the group is to be asked after it."""
    ask_at: float = 0.0
    asks: int = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.draft.request_id

    @property
    def must_store(self) -> bool:
        """Whether the body has to be stored before the next attempt.

        Never again once a submit may have been done: admission has set the body's expiry, and storing it anew would
        shorten that. Unless the server says that it has no body, hence no such request.
        """
        return self.draft.body_key is not None and not self.stored

    def admission_left_s(self) -> float:
        """Return how long the submit may still be repeated while the server is silent."""
        return self.asked + self.admission_s - time.monotonic()

    def overdue(self) -> bool:
        """Whether the submit took too long altogether: a repeat must come while the group remembers the first one."""
        return time.monotonic() - self.started > max(self.admission_s, ADMISSION_MAX_S)

    def timeout_left_ms(self) -> int | None:
        """Return what is left of the caller's timeout, at least 1; None = the pool's default."""
        if self.timeout_ms is None or self.attempt is None:
            return self.timeout_ms
        return max(1, self.timeout_ms - int((time.monotonic() - self.began) * 1000))

    def judge(self, answer: Admission | DispatchError) -> float | None:
        """Return how many seconds the reply may take from now on; None = submit again after a pause.

        Raises:
            RequestRefused, StateConflict, PoolUnknown, ...: nothing was queued.
        """
        if isinstance(answer, Admitted):
            self.lapsed = answer.lapsed
            # Counted from when the submit was sent: how long the answer took has passed on the server's clock, too.
            took = 0.0 if self.attempt is None else time.monotonic() - self.attempt.sent_at
            return max(0.0, max(0, answer.deadline_ms - answer.server_ms) / 1000 + GRACE_S - took)
        if isinstance(answer, Replayed):
            self.replay = _replayed(answer)
            return REPLAY_S
        if isinstance(answer, FabricUnavailable):
            self.uncertain = self.uncertain or (self.attempt is not None and self.attempt.sent)
            return GRACE_S if self.slot.done() else None  # the reply may be faster than the answer
        if isinstance(answer, DispatchError):
            raise answer
        if self.stored and isinstance(answer, Refused) and answer.reason == "body_missing":
            self.stored = False  # it expired before the submit came through
            return None
        raise refusal(self.draft, answer)

    def room_in_s(self, refusal: RequestRefused) -> float:
        """Return how long to wait before a new try after `refusal`, of which nothing is left in the group.

        Raises:
            RequestRefused: that one, if it will not pass, is not to be waited for, or the next try would come too late.
        """
        if not self.waits_for_room or refusal.reason not in NO_ROOM:
            raise refusal
        self.refusals += 1
        pause = pause_s(refusal, self.refusals)
        if (self.timeout_left_ms() or 0) <= pause * 1000:
            raise refusal
        self.stored = self.uncertain = False
        self.started = self.asked = time.monotonic() + pause
        return pause

    def check(self) -> None:
        """Make sure that it can still be answered.

        Raises:
            DispatchError: it cannot: the client was closed, or something else owns its name.
        """
        if self.slot.done() and isinstance(outcome := self.slot.result(), DispatchError):
            raise outcome

    def expect(self, reply_s: float) -> None:
        """Note when the reply is overdue, if it may take `reply_s` (what `judge` returned), and when to ask after it.

        It is asked after when its deadline has passed, and before when it was queued for as long as it may be.
        """
        now = time.monotonic()
        self.overdue_at = self.ask_at = now + max(0.0, reply_s - GRACE_S) + ASK_S
        if (wait_ms := self.draft.submission.max_wait_ms) is not None:
            self.ask_at = min(self.overdue_at, now + wait_ms / 1000 + ASK_S)

    def asked_now(self) -> None:
        """Note that it was asked after. One that is not ended before its deadline, though asked after, is running."""
        self.asks += 1
        again_at = time.monotonic() + ASK_AGAIN_S
        self.ask_at = again_at if self.asks < _ASKS_MAX else max(again_at, self.overdue_at)

    def unanswered(self, answer: Admission | DispatchError) -> FabricUnavailable:
        """Make the error for a submit that got no answer within its bound; `answer` is what the last attempt met."""
        known = "it is not queued"
        if self.uncertain:
            after = "repeat it with the same key" if self.draft.lasting else "if it was, it is cancelled"
            known = f"it is not known whether it was queued; {after}"
        cause = answer if isinstance(answer, DispatchError) else "its body could not be stored"
        return FabricUnavailable(
            f"request {self.request_id} was not admitted in {self.admission_s:g} s: {cause}; {known}"
        )

    def has_ended(self) -> bool:
        """Whether its reply came (to the slot: perhaps nobody has taken it)."""
        return self.slot.done() and isinstance(self.slot.result(), Reply | Frame)

    def surely_not_queued(self) -> bool:
        """Whether it is certain that the group does not have the request; a submit not sent yet is taken back."""
        attempt = self.attempt
        if attempt is None:
            return True
        answer = attempt.answered()
        if answer is None:
            return attempt.withdraw() and not self.uncertain
        if isinstance(answer, FabricUnavailable):
            return not (attempt.sent or self.uncertain)
        return not isinstance(answer, Admitted)

    def surely_ours(self) -> bool:
        """Whether a request of this id in the group can only be this one."""
        return self.draft.own_id or (self.attempt is not None and isinstance(self.attempt.answered(), Admitted))

    def no_word(self, silent_s: float) -> Reply:
        """Make the reply of a request of which nothing came until its deadline and the grace after it.

        `silent_s` = since when the server has not answered this client at all.

        Raises:
            OutcomeUnknown: it cannot be said how the request ended.
        """
        name = f"request {self.request_id}"
        if self.has_ended():
            raise OutcomeUnknown(f"{name} ended, but its reply's body could not be read in time")
        if silent_s > GRACE_S:
            raise OutcomeUnknown(
                f"no reply to {name} by its deadline, and Valkey has not answered for {silent_s:.1f} s; it is not "
                "known how the request ended"
            )
        message = f"no reply came by the deadline and {GRACE_S:g} s after it; the request was told to stop"
        head = ReplyHead(error=ReplyError(type="expired", message=message, source="dispatch"))
        pool_id = self.draft.submission.pool_id
        return Reply(request_id=self.request_id, pool_id=pool_id, ending="expired", head=head)


def _replayed(answer: Replayed) -> Outcome:
    """Return the stored reply, marked as such.

    Raises:
        ContractError: it cannot be read.
    """
    frame = decode_frame(answer.frame)
    reply = msgspec.structs.replace(frame.reply, replayed=True)
    return msgspec.structs.replace(frame, reply=reply) if frame.by_reference else reply


def admission_bound_s(options: CallOptions, client: ClientOptions) -> float:
    """Return how long a submit may be repeated: the call's bound, else the client's; never above the call's timeout."""
    bound = options.admission_ms or client.admission_ms
    return (bound if options.timeout_ms is None else min(bound, options.timeout_ms)) / 1000

"""One call of a thread while it is under way."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from dispatch.errors import DispatchError
from dispatch.fabric.functions import Admission
from dispatch.producer.errand import Errand
from dispatch.producer.inbox import Outcome


@dataclass(slots=True)
class Submit:
    """One submit of a blocking caller: it is sent at once, and answered unless the call was interrupted."""

    answer: Admission | DispatchError | None = None
    sent: bool = True
    sent_at: float = field(default_factory=time.monotonic)

    def withdraw(self) -> bool:
        """Refuse: it is sent."""
        return False

    def answered(self) -> Admission | DispatchError | None:
        """Return the answer, None if the call was interrupted."""
        return self.answer


class BlockingErrand(Errand["Future[Outcome]", Submit]):
    """The errand of a thread."""

    __slots__ = ()


@dataclass(slots=True)
class Waiting:
    """A request that was admitted.

    On the monotonic clock: `until` = when its reply is overdue and `finish` asks for it, `end` = when that gives up.
    `left` = its caller has been let go; whatever is still to be done about it is under way.
    """

    errand: BlockingErrand
    until: float = 0.0
    end: float = 0.0
    left: bool = False

    @property
    def ready(self) -> Future[Outcome]:
        """Done when there is an outcome to take with `finish`."""
        return self.errand.slot

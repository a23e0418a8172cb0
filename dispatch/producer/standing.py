"""Whether a session can still be used, and what its callers are told when it cannot. Both clients use it."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dispatch.errors import DispatchError
from dispatch.producer.inbox import Inbox
from dispatch.producer.session import Session

_log = structlog.get_logger(__name__)


class Standing:
    """Usable until it was closed, broke, or another session took the producer over; the first reason stays.

    `silencers` are called when the session was taken over: from then on it must neither read replies nor give signs of
    life, which would take the producer away from its owner.
    """

    def __init__(self, session: Session, inbox: Inbox) -> None:
        self._session = session
        self._inbox = inbox
        self._why: Callable[[], DispatchError] | None = None
        self.silencers: tuple[Callable[[], None], ...] = ()

    @property
    def good(self) -> bool:
        """Whether it can be used."""
        return self._why is None

    def check(self) -> None:
        """Make sure that it can be used.

        Raises:
            DispatchError: it cannot; says why.
        """
        if self._why is not None:
            raise self._why()

    def end(self, why: Callable[[], DispatchError]) -> None:
        """Refuse new calls with `why` from now on, unless there is a reason already."""
        self._why = self._why or why

    def taken_over(self) -> None:
        """Give the producer up: another session owns it. From any thread; repeatable."""
        if self._why is None:
            _log.error("producer_taken_over", producer_id=self._session.producer_id)
            self._why = self._session.taken_over
            for silence in self.silencers:
                silence()
            self._inbox.fail_all(self._session.taken_over)

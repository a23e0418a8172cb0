"""What the history adds to a command that looks at live state, if one is named. Never an error: it may be away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dispatch.errors import ConfigurationError, HistoryError
from dispatch.studio.findings import HistoryFacts

if TYPE_CHECKING:  # these take a while to load, and most groups are looked at without a history
    from dispatch.telemetry.history.queries import History
    from dispatch.telemetry.history.records import RequestStory

T = TypeVar("T")

_ANSWER_S = 2.0
_HOUR_MS = 3_600_000


class Past:
    """The history of one group; `url` "" = there is none."""

    def __init__(self, url: str, password_env: str, group: str) -> None:
        self._url = url
        self._password_env = password_env
        self._group = group
        self.problem = ""
        """Why the last question had no answer; "" = it had one, or there is no history."""

    @property
    def named(self) -> bool:
        """Whether there is a history to ask."""
        return bool(self._url)

    def facts(self, now_ms: int) -> HistoryFacts:
        """Say what verdicts rest on: how long runs of the last hour took, and when rows were written."""
        if not self.named:
            return HistoryFacts(configured=False)

        def ask(history: History) -> HistoryFacts:
            from dispatch.telemetry.history.records import Filter  # noqa: PLC0415 - see above

            stats = history.stats(Filter(since_ms=now_ms - _HOUR_MS, ending="succeeded"))
            writers = {row.gateway_id or "": row.recorded_ms for row in history.gateways()}
            usual = {row.pool_id: row.execution.p95 for row in stats.pools if row.pool_id and row.execution}
            return HistoryFacts(run_p95_ms=usual, writers=writers, last_row_ms=max(writers.values(), default=None))

        found = self._ask(ask)
        return HistoryFacts(problem=self.problem) if found is None else found

    def story(self, request_id: str) -> RequestStory | None:
        """Tell of one request that has ended; None = there is no row, or no answer (see `problem`)."""
        return self._ask(lambda history: history.request(request_id)) if self.named else None

    def _ask(self, question: Callable[[History], T]) -> T | None:
        from dispatch.telemetry.history.queries import History  # noqa: PLC0415 - see above
        from dispatch.telemetry.history.store import HistoryStore  # noqa: PLC0415 - see above

        self.problem = ""
        try:
            with HistoryStore(self._url, password_env=self._password_env, answer_s=_ANSWER_S) as store:
                return question(History(store, self._group))
        except (HistoryError, ConfigurationError) as error:
            self.problem = str(error)
            return None

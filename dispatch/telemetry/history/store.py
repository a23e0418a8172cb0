"""One history: spans are written to it and questions asked of it, through ClickHouse's client, from any thread."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from opentelemetry.sdk.trace import ReadableSpan

from dispatch.errors import ConfigurationError, HistoryError, HistoryUnavailable
from dispatch.telemetry.history import schema
from dispatch.telemetry.history.rows import COLUMNS, columns_of
from dispatch.telemetry.history.target import target_of

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

INIT_COMMAND = "dispatch history init"
_INSTALL = {"clickhouse_connect": "pip install 'fabric-dispatch[history]'", "chdb": "pip install chdb"}
_CONNECT_S = 2
_SHOWN_MAX = 300
_ANSWER_MARGIN_S = 2
_LOGIN_REFUSED = {192, 193, 194, 516}
_ABSENT = {60, 81}
"""ClickHouse's codes of a table and of a database that are not there."""
_TOO_SLOW = 159

Row = dict[str, Any]


class _Absent(HistoryUnavailable):
    """There is no such table or database."""


class HistoryStore:
    """The history at a URL. Nothing is opened before it is needed; what broke is opened anew.

    All methods block, and may be called from several threads at once. An embedded history (`chdb:///path`) belongs to
    one process, which answers one question at a time.
    """

    def __init__(self, url: str, *, password_env: str = "", batch_rows: int = 2_000, answer_s: float = 10.0) -> None:
        """Read the URL. `batch_rows` spans go into one insert; `answer_s` bounds each question and each insert.

        Raises:
            ConfigurationError: the URL is none, or the variable that is to hold the password is not set.
        """
        self._target = target_of(url, password_env)
        self._batch_rows = batch_rows
        self._answer_s = answer_s
        self._opening = threading.Lock()
        self._client: Client | None = None

    @property
    def address(self) -> str:
        """Where it is, fit to be shown."""
        return self._target.address

    def init(self, ttl_days: int) -> list[str]:
        """Make what is missing and set how long rows are kept; returns what was changed, for people. Repeatable.

        Raises:
            HistoryUnavailable: it does not answer, or does not let us.
        """
        try:
            before = self._tables()
        except _Absent:
            self._make_database()
            before = {}
        for statement in schema.statements(ttl_days):
            self.command(statement)
        done = [f"{table.name}: made" for table in schema.TABLES if table.name not in before]
        for table in schema.TABLES:
            comment, definition = before.get(table.name, ("", ""))
            if comment == schema.OWN_COMMENT and f"toIntervalDay({ttl_days})" not in definition:
                self.command(table.alter_ttl(ttl_days))
                done.append(f"{table.name}: rows are kept for {ttl_days} days")
        return done

    def write(self, spans: Sequence[ReadableSpan]) -> None:
        """Insert spans. Writing one again is harmless, so after an error all may be written again.

        Raises:
            HistoryUnavailable: not all of them were written, or it is not known; a later attempt may help.
            HistoryError: these spans cannot be written.
        """
        types = [kind for kind, _ in COLUMNS.values()]
        for at in range(0, len(spans), self._batch_rows):
            columns = columns_of(spans[at : at + self._batch_rows])
            with self._answering() as client:
                client.insert(
                    schema.TRACES, columns, column_names=list(COLUMNS), column_type_names=types, column_oriented=True
                )

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Return the rows that answer `sql`, in which `{name:Type}` stands for a parameter.

        Raises:
            HistoryUnavailable: it does not answer in time, has no tables, or refuses.
        """
        # Repeats of a row have its day, too, by which the tables are parted: days need not be held against each other.
        bound = {"max_execution_time": self._answer_s, "do_not_merge_across_partitions_select_final": 1}
        with self._answering() as client:
            return list(client.query(sql, parameters=dict(parameters or {}), settings=bound).named_results())

    def command(self, sql: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Run a statement that has no answer.

        Raises:
            HistoryUnavailable: it does not answer, or refuses.
        """
        with self._answering() as client:
            client.command(sql, parameters=dict(parameters or {}))

    def close(self) -> None:
        """Close what was opened. Repeatable; a later question opens it anew."""
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _make_database(self) -> None:
        with self._answering(database="default") as client:
            client.command(f"CREATE DATABASE IF NOT EXISTS {self._target.options['database']}")
        self.close()  # it was opened in another database than its own

    def _tables(self) -> dict[str, tuple[str, str]]:
        """Return comment and definition of each of our tables that is there."""
        found = self.query(
            "SELECT name, comment, create_table_query FROM system.tables"
            " WHERE database = currentDatabase() AND name IN {names:Array(String)}",
            {"names": [table.name for table in schema.TABLES]},
        )
        return {row["name"]: (row["comment"], row["create_table_query"]) for row in found}

    @contextlib.contextmanager
    def _answering(self, **options: str) -> Iterator[Client]:
        """Give the client (opened with other `options`); what the library raises inside becomes an error of ours."""
        exceptions = _library("clickhouse_connect.driver.exceptions")
        try:
            yield self._opened(options)
        except (exceptions.OperationalError, OSError) as error:
            self._forget()
            raise HistoryUnavailable(f"the history at {self.address} does not answer: {_reason(error)}") from error
        except exceptions.ClickHouseError as error:
            if getattr(error, "code", None) in _ABSENT:
                raise _Absent(f"the history at {self.address} has no tables yet; run: {INIT_COMMAND}") from error
            if isinstance(error, exceptions.DatabaseError) and getattr(error, "code", None):
                raise HistoryUnavailable(self._refusal(error)) from error
            raise HistoryError(f"the history's client does not take it: {_reason(error)}") from error

    def _opened(self, options: Mapping[str, str]) -> Client:
        with self._opening:
            if self._client is None:
                if self._target.embedded:
                    _library("chdb")
                self._client = _library("clickhouse_connect").get_client(**self._options() | dict(options))
            return self._client

    def _options(self) -> dict[str, Any]:
        if self._target.embedded:
            return dict(self._target.options)
        timeout = max(1, round(self._answer_s + _ANSWER_MARGIN_S))
        # Without a session, questions of several threads may be asked at once.
        own = {"connect_timeout": _CONNECT_S, "send_receive_timeout": timeout, "autogenerate_session_id": False}
        # Uncompressed: a network is cheaper than the time of a gateway's processor.
        return {**self._target.options, **own, "query_retries": 0, "compress": False}

    def _forget(self) -> None:
        if not self._target.embedded:
            self.close()

    def _refusal(self, error: Any) -> str:
        code = getattr(error, "code", None)
        if code in _LOGIN_REFUSED:
            return f"the history at {self.address} refuses the login: check its user and DISPATCH_HISTORY_PASSWORD_ENV"
        if code == _TOO_SLOW:
            return f"the history at {self.address} has not answered within {self._answer_s:g} s; ask for less time"
        return f"the history at {self.address} refuses: {_reason(error).rpartition('server response: ')[2]}"


def _library(name: str) -> Any:
    """Import what only histories need, which takes a second: nothing else may wait for it.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        root = name.partition(".")[0]
        raise ConfigurationError(f"{root} is not installed, which a history needs: {_INSTALL[root]}") from error
    # What it warns of, it raises as well, and addresses with user names stand in its lines.
    logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)
    return found


def _reason(error: BaseException) -> str:
    """What it comes from, in one line: the operating system's words, else the first line of the library's."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "reason", None)
        seen = cause if isinstance(cause, BaseException) else seen.__cause__ or seen.__context__
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        if isinstance(seen, TimeoutError):
            return "it takes too long"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:_SHOWN_MAX]

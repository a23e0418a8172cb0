"""An embedded ClickHouse (chdb) behind the part of ClickHouse's HTTP interface that a history needs.

So a machine without a ClickHouse server has the same history by the same way: gateways and commands reach it by URL.
One process owns the folder. The import costs a second and 300 MB: only `dispatch history serve` does it.
"""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dispatch.errors import ConfigurationError, HistoryUnavailable

_INSERT = re.compile(rb"\s*INSERT\s+INTO\s+[^\s(]+\s*(\([^)]*\))?\s*FORMAT\s+(?P<format>\w+)\s*\n", re.IGNORECASE)
_CODE = re.compile(r"Code: (?P<code>\d+)\.")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARAMETER = "param_"
_OF_THE_INTERFACE = frozenset(
    {
        "query", "database", "query_id", "session_id", "session_timeout", "session_check", "quota_key", "role",
        "compress", "decompress", "buffer_size", "wait_end_of_query", "client_protocol_version",
        "send_progress_in_http_headers", "http_headers_progress_interval_ms", "enable_http_compression",
        "default_format", "user", "password",
    }
)  # fmt: skip
"""Names in a URL that speak of the exchange; all others are settings of the query."""


class QueryRefused(Exception):
    """The engine refuses a statement. `code` is ClickHouse's number of the reason."""

    def __init__(self, text: str) -> None:
        start = text.find("Code: ")
        super().__init__(text[max(start, 0) :].strip())
        found = _CODE.search(text)
        self.code = int(found["code"]) if found else 0


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: its text (and the rows that stand behind an INSERT), and what the URL says beside it."""

    text: bytes
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, str]:
        """Values of `{name:Type}` in the text."""
        return {
            name.removeprefix(_PARAMETER): value for name, value in self.given.items() if name.startswith(_PARAMETER)
        }

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the query."""
        return {
            name: value
            for name, value in self.given.items()
            if name not in _OF_THE_INTERFACE and not name.startswith(_PARAMETER)
        }


class Engine:
    """The embedded ClickHouse of a folder. Questions may be asked from several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, which is made if it is not there.

        Raises:
            ConfigurationError: chdb is not installed.
            HistoryUnavailable: the folder cannot be used, for example because another process has it.
        """
        try:
            self._chdb = importlib.import_module("chdb")
        except ImportError as error:
            raise ConfigurationError(
                "chdb is not installed, which an embedded history needs: pip install chdb"
            ) from error
        self._path = str(folder.resolve())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._keeping = self._chdb.connect(self._path)  # the engine lives as long as one connection does
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:300]
            raise HistoryUnavailable(f"the embedded history in {folder} cannot be opened: {reason}") from error

    def run(self, statement: Statement) -> bytes:
        """Run one statement and return its answer.

        Raises:
            QueryRefused: the engine does not take it, or stopped it.
        """
        connection = self._chdb.connect(self._path)  # a millisecond; settings and database are the connection's
        try:
            self._prepare(connection, statement)
            if insert := _INSERT.match(statement.text):
                return self._insert(connection, statement, insert)
            return self._ask(connection, statement.text.decode(), statement.parameters)
        finally:
            connection.close()

    def close(self) -> None:
        """Close the folder."""
        self._keeping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, connection: Any, statement: Statement) -> None:
        if database := statement.given.get("database"):
            self._ask(connection, f"USE {_quoted(database, '`')}")
        for name, value in statement.settings.items():
            if not _NAME.fullmatch(name):
                raise QueryRefused(f"Code: 115. {name!r} is no setting")
            self._ask(connection, f"SET {name} = {_quoted(value, chr(39))}")

    def _insert(self, connection: Any, statement: Statement, insert: re.Match[bytes]) -> bytes:
        """Insert the rows behind the statement: the engine reads them from a file."""
        kind = insert["format"].decode()
        head = insert[0].decode().strip()
        target = head[: head.upper().rindex("FORMAT")]
        with tempfile.NamedTemporaryFile(suffix=".rows") as rows:
            rows.write(statement.text[insert.end() :])
            rows.flush()
            return self._ask(connection, f"{target} FROM INFILE {_quoted(rows.name, chr(39))} FORMAT {kind}")

    def _ask(self, connection: Any, text: str, parameters: Mapping[str, str] | None = None) -> bytes:
        try:
            answer: bytes = connection.query(text, "TabSeparated", params=dict(parameters or {})).bytes()
        except Exception as error:
            raise QueryRefused(str(error)) from error
        return answer


def read_statement(query: Iterable[tuple[str, str]], body: bytes, content_type: str = "") -> Statement:
    """Read what a request says: a statement in the URL, in the body, or begun in the one and ended in the other.

    Clients send what is too long for a URL as a form.
    """
    given = dict(query)
    if content_type.startswith("multipart/form-data"):
        given |= dict(_fields(content_type, body))
        body = b""
    head = given.get("query", "").encode()
    return Statement(head + b"\n" + body if head and body else head or body, given)


def _fields(content_type: str, body: bytes) -> Iterator[tuple[str, str]]:
    form = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n" + body)
    for part in form.iter_parts():
        name, value = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(value, bytes):
            yield name, value.decode()


def _quoted(text: str, quote: str) -> str:
    return quote + text.replace("\\", "\\\\").replace(quote, "\\" + quote) + quote

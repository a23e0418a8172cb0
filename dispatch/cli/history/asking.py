"""Whom the commands ask: the history itself, or a gateway that asks it for them. Both give the same answers."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from dispatch.cli.operating import FabricGroup, fabric_group, trouble_as_exit_code
from dispatch.cli.remote import RemoteConnection, is_gateway
from dispatch.errors import ConfigurationError, HistoryOff, InvalidRequest, RequestUnknown
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import check_group
from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.records import (
    ErrorCount,
    Filter,
    GatewayRows,
    RequestList,
    RequestStory,
    Series,
    Shares,
    Stats,
    TokenCount,
    Verification,
)
from dispatch.telemetry.history.store import HistoryStore
from dispatch.telemetry.history.target import FORMS
from dispatch.telemetry.history.verify import verification

T = TypeVar("T")

_OFF = f"no history is named: give --history (DISPATCH_HISTORY_URL, {FORMS}) or --gateway URL"
_TIMEOUT_S = 15.0
_PAGE = 200
_AGO = re.compile(r"(?P<count>[0-9]{1,9})(?P<unit>[smhd])")
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True)
class Where:
    """What the options say. `url`: Valkey's, which only shares and verify need, or a gateway's."""

    history: str
    password_env: str
    url: str
    group: str


class Direct(History):
    """The history itself, and Valkey for what only it knows."""

    def __init__(self, store: HistoryStore, where: Where) -> None:
        super().__init__(store, where.group)
        self._where = where

    def shares(self, wanted: Filter, step_s: int, weights: dict[str, int] | None = None) -> Shares:
        """Hold service against the weights that the group has now."""
        if weights is None:
            with self._fabric() as fabric:
                weights = {row["pool_id"]: row["quantum"] for row in fabric.rows("pools")}
        return super().shares(wanted, step_s, weights)

    def verify(self, cursor: str) -> Verification:
        """Verify a part of the endings stream."""
        with self._fabric() as fabric:
            page = fabric.run(fabric_snapshot("endings", cursor=cursor, limit=_PAGE))
            pools = [] if cursor else list(fabric.rows("pools"))
        return verification(self, page, pools, first=not cursor)

    @contextmanager
    def _fabric(self) -> Iterator[FabricGroup]:
        with fabric_group(self._where.url, self._where.group) as fabric:
            yield fabric


class Remote:
    """A gateway's control API."""

    def __init__(self, connection: RemoteConnection, group: str) -> None:
        self._connection = connection
        self._group = group

    def requests(self, wanted: Filter, *, limit: int, cursor: str = "") -> RequestList:
        """List requests."""
        return self._read("requests", _query(wanted) | {"limit": limit, "cursor": cursor}, RequestList)

    def request(self, request_id: str) -> RequestStory | None:
        """Tell of one request."""
        try:
            return self._read(f"requests/{quote(request_id, safe='')}", {}, RequestStory)
        except (RequestUnknown, InvalidRequest):
            return None

    def stats(self, wanted: Filter) -> Stats:
        """Count and measure."""
        return self._read("stats", _query(wanted), Stats)

    def series(self, wanted: Filter, step_s: int) -> Series:
        """Count step by step."""
        return self._read("series", _query(wanted) | {"step_s": step_s}, Series)

    def errors(self, wanted: Filter) -> list[ErrorCount]:
        """Count failures."""
        return self._read("errors", _query(wanted), list[ErrorCount])

    def tokens(self, wanted: Filter) -> list[TokenCount]:
        """Sum tokens."""
        return self._read("tokens", _query(wanted), list[TokenCount])

    def gateways(self) -> list[GatewayRows]:
        """Say when last rows were written."""
        return self._read("gateways", {}, list[GatewayRows])

    def shares(self, wanted: Filter, step_s: int) -> Shares:
        """Hold service against weights."""
        return self._read("shares", _query(wanted) | {"step_s": step_s}, Shares)

    def verify(self, cursor: str) -> Verification:
        """Verify a part of the endings stream."""
        return self._read("verify", {"cursor": cursor, "limit": _PAGE}, Verification)

    def _read(self, path: str, query: dict[str, Any], kind: type[T]) -> T:
        given = {
            name: value for name, value in query.items() if value is not None and value is not False and value != ""
        }
        asked = {name: "true" if value is True else value for name, value in given.items()}
        return msgspec.convert(self._connection.read(self._group, f"/history/{path}", asked), kind)


Source = Direct | Remote


@contextmanager
def source(where: Where) -> Iterator[Source]:
    """Open what the options name; what goes wrong inside ends the command with a sentence and exit code 2."""
    with contextlib.ExitStack() as exits:
        exits.enter_context(trouble_as_exit_code())
        check_group(where.group)
        if is_gateway(where.url):
            yield Remote(exits.enter_context(RemoteConnection(where.url, timeout_s=_TIMEOUT_S)), where.group)
            return
        if not where.history:
            raise HistoryOff(_OFF)
        store = HistoryStore(where.history, password_env=where.password_env)
        yield Direct(exits.enter_context(store), where)


def now_ms() -> int:
    """Return the time of this machine."""
    return time.time_ns() // 1_000_000


def read_time(option: str, text: str, now: int) -> int | None:
    """Read a time: so long ago (90s, 15m, 2h, 7d), or a date and time of day (UTC where none is said); "" = None.

    Raises:
        ConfigurationError: it is none.
    """
    if not text:
        return None
    if found := _AGO.fullmatch(text):
        return max(0, now - int(found["count"]) * _UNITS_MS[found["unit"]])
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        message = f"{option} {text[:60]!r} is no time: 90s, 15m, 2h or 7d (ago), or 2026-12-01T10:00Z"
        raise ConfigurationError(message) from None
    return int((given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp() * 1000)


def _query(wanted: Filter) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(wanted)
    del facts["pools"]  # a gateway knows them by the key
    facts["pool"] = facts.pop("pool_id")
    return facts

"""The two ways to a history, each opened once: an embedded one in this process, and one over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dispatch.telemetry.history.queries import History
from dispatch.telemetry.history.store import HistoryStore
from tests.support.groups import unique_group
from tests.support.history import PASSWORD, PASSWORD_ENV, served_history

KINDS = ["embedded", "http"]


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], HistoryStore]]:
    """Open each kind once: an engine takes seconds to start, and a process may have one folder open."""
    with ExitStack() as exits:
        exits.enter_context(pytest.MonkeyPatch.context()).setenv(PASSWORD_ENV, PASSWORD)
        opened: dict[str, HistoryStore] = {}

        def store(kind: str) -> HistoryStore:
            if kind not in opened:
                folder: Path = tmp_path_factory.mktemp(kind) / "history"
                if kind == "http":
                    url = exits.enter_context(served_history(folder)).url
                    opened[kind] = HistoryStore(f"{url}/tests", password_env=PASSWORD_ENV, batch_rows=7)
                else:
                    opened[kind] = HistoryStore(f"chdb://{folder}", batch_rows=7)
                exits.callback(opened[kind].close)
                opened[kind].init(90)
            return opened[kind]

        yield store


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, stores: Callable[[str], HistoryStore]) -> HistoryStore:
    return stores(request.param)


@pytest.fixture
def history(store: HistoryStore) -> History:
    """The history of a group of the test's own."""
    return History(store, unique_group())

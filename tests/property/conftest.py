"""What histories that are written by hand run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatch.fabric.sync import BlockingConnection
from tests.property.history import History
from tests.support.valkey import ValkeyProcess


@pytest.fixture
def history(valkey: ValkeyProcess) -> Iterator[History]:
    """A group on the session's server beside its twin."""
    with BlockingConnection(valkey.url) as connection:
        made = History(connection, valkey.port)
        yield made
        made.close()

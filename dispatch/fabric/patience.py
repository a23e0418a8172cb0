"""How long one thread waits for the answers of blocking connections, where that is less than their own bound.

A blocking call cannot be given up from outside, so who must be back by a certain time says so before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LEAST_S = 0.001

_bounds = threading.local()


@contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """Take the server for silent (`FabricUnavailable`) when a call of this thread is not answered in `seconds`."""
    before, _bounds.until = getattr(_bounds, "until", None), time.monotonic() + seconds
    try:
        yield
    finally:
        _bounds.until = before


class Impatient:
    """Makes a blocking redis-py connection keep to the bound of the thread that reads from it."""

    def read_response(self, *args: Any, **more: Any) -> Any:
        """Read one response."""
        until = getattr(_bounds, "until", None)
        if until is not None and "timeout" not in more:
            usual: float | None = self.socket_timeout  # type: ignore[attr-defined]  # of the connection it is mixed into
            left = max(_LEAST_S, until - time.monotonic())
            more["timeout"] = left if usual is None else min(left, usual)
        return super().read_response(*args, **more)  # type: ignore[misc]  # mixed into a connection

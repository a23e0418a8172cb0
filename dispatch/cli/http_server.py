"""The HTTP server of a command that has more to stop than HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: whoever runs it has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

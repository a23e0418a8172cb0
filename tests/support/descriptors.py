"""A process that the system gives no more sockets, files or pipes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Let every new descriptor of this process be refused (EMFILE); what is open works on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open("/dev/null") as lowest:  # noqa: PTH123 - a descriptor is what is wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""The folder of one `dispatch dev`, which goes with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "dispatch-dev-"
_LOCK = "lock"


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """Make a temporary folder and remove it at the end; also remove those that killed runs left behind.

    The folder of a living run is known by a lock that the kernel drops with the process, so no other is touched.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Named only when it is held: a folder without a lock file is one that is just being made.
        (folder / f"{_LOCK}.new").rename(folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, gone meanwhile, or in use
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

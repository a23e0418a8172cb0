"""Single keys from a terminal, without waiting for a line."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}


def interactive() -> bool:
    """Say whether somebody is there to press keys, on a terminal that can be set to single keys."""
    try:
        import termios  # noqa: F401, PLC0415 - not on every system
    except ImportError:
        return False
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def single_keys() -> Iterator[None]:
    """Set the terminal to single keys, and back, whatever happens."""
    import termios  # noqa: PLC0415 - not on every system
    import tty  # noqa: PLC0415 - not on every system

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def next_key(seconds: float) -> str:
    """Return the next key, "" when none was pressed for so long. A terminal that is gone says `q`."""
    number = sys.stdin.fileno()
    ready, _, _ = select.select([number], [], [], max(0.0, seconds))
    if not ready:
        return ""
    pressed = os.read(number, 16)
    return _ARROWS.get(pressed, pressed[:1].decode("ascii", "ignore")) if pressed else "q"

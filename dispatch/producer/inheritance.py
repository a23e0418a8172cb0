"""What a forked child inherits stays as it is there: it is neither used nor, at the child's end, finalised.

A child shares its parent's sockets and the epoll set of its event loop. A finaliser that closes a connection in the
child takes the socket out of that set, and the parent never hears of it again.
"""

from __future__ import annotations

import ctypes
import os
import weakref

_open: weakref.WeakSet[object] = weakref.WeakSet()


def keep_in_children(path: object) -> None:
    """Never finalise `path`, and what it refers to, in a child that is forked from now on."""
    _open.add(path)


def _keep() -> None:
    # A reference of one's own is not enough: modules are emptied when an interpreter ends.
    for path in tuple(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(path))


os.register_at_fork(after_in_child=_keep)

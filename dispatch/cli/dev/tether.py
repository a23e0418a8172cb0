"""Become another program that the kernel kills when its parent dies: `tether.py <parent pid> <program> [argument...]`.

`dispatch dev` stops its children in good order when it can. When it is killed itself (SIGKILL, out of memory) nobody is
left to do that, so each child asks the kernel for it before it becomes its program. Only Linux knows this; elsewhere
the program simply runs.

Run by path with `-I -S`: it needs nothing but the standard library, and starts in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)
    os.execv(program[0], program)  # noqa: S606 - no shell is wanted; the caller is our own


if __name__ == "__main__":
    main()

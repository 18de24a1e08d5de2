"""Becomes a worker that ends with the process that started it: `child.py PARENT PROGRAM ARGUMENT...`.

The kernel tells the worker to stop when its parent has died, however that came about. So a run that was killed leaves
nothing behind that still trains, and its workers write a last checkpoint.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by the program."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it died before the kernel was asked
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

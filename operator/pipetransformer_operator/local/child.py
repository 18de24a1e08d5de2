"""Becomes a worker that ends with its parent process: `child.py PARENT PROGRAM ARGUMENT...`.

The kernel sends the worker SIGTERM when its parent dies for any reason. So the workers of a killed run write a last
checkpoint and end.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process with the program."""
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent died before the call above
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

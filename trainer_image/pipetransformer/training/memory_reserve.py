"""Memory that a worker has at hand before it knows its role, so that finding it is in nobody's pause.

Fresh memory is slow: the kernel clears it page by page, and under a virtual machine the host may have to look for it
first, which took 3 s a GB here. So a worker touches as much as a stage may need while it waits, and frees it; the C
library is told to keep what is freed until the first step is done. Receive buffers, gradients and the first activations
are then made of it.
"""

import ctypes

import torch

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER_TRIM = -1
#: From the first call of `mallopt` on glibc adjusts nothing by itself. These are what it would come to.
_MMAP_THRESHOLD, _MMAP_MAX = 32 << 20, 1 << 16


class Reserve:
    """Host memory of this process: filled once, before the first generation. Without glibc it does nothing."""

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None

    def fill(self, num_bytes: int) -> None:
        """Have so many bytes at hand.

        Raises:
            RuntimeError: there is not as much memory.
        """
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallopt"):
            return
        self._libc = libc
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
        torch.empty(num_bytes, dtype=torch.uint8).zero_()

    def release(self) -> None:
        """Give back what is not in use: after the first step of each generation, since what a role frees lies between
        what it keeps."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
            self._libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)
            self._libc.mallopt(_M_MMAP_MAX, _MMAP_MAX)
            self._libc.malloc_trim(0)

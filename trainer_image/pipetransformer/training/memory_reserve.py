"""Host memory that a worker on a CPU takes from the kernel while it waits, so that a pause gets its memory quickly.

The kernel clears fresh memory page by page: 256 MB take 0.5 s. From the reserve they take 0.05 s. So a waiting worker
writes to as much memory as a stage may need, and frees it. glibc keeps it until the first step is done.
Receive buffers, gradients and activations then use it. CUDA's caching allocator needs no reserve.
"""

import ctypes

import torch

# Parameters of `mallopt`, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER_TRIM = -1
#: Once `mallopt` was called, glibc no longer adjusts these two limits by itself. It would choose these values.
_MMAP_THRESHOLD, _MMAP_MAX = 32 << 20, 1 << 16


class Reserve:
    """The reserve of this process. It is filled once, before the first generation. Without glibc it does nothing."""

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None

    def fill(self, num_bytes: int) -> None:
        """Take `num_bytes` from the kernel. glibc keeps them for later allocations.

        Raises:
            RuntimeError: the host has too little memory.
        """
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallopt"):
            return
        self._libc = libc
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
        torch.empty(num_bytes, dtype=torch.uint8).zero_()

    def release(self) -> None:
        """Return unused memory to the kernel. Call this after the first step of each generation."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
            self._libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)
            self._libc.mallopt(_M_MMAP_MAX, _MMAP_MAX)
            self._libc.malloc_trim(0)

"""Host memory that a worker on a CPU takes before it knows its role, so that a pause does not wait for the kernel.

The kernel clears fresh memory page by page: 256 MB take 0.5 s, and 0.05 s from the reserve. So a waiting worker touches
as much as a stage may need and frees it, and glibc keeps it until the first step is done. Receive buffers, gradients
and activations then use it. CUDA's caching allocator needs no reserve.
"""

import ctypes

import torch

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER_TRIM = -1
#: After the first call of `mallopt`, glibc no longer adjusts these by itself. It would choose these values.
_MMAP_THRESHOLD, _MMAP_MAX = 32 << 20, 1 << 16


class Reserve:
    """This process's host memory, filled once before the first generation. Without glibc it does nothing."""

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None

    def fill(self, num_bytes: int) -> None:
        """Take `num_bytes` from the kernel and keep them.

        Raises:
            RuntimeError: there is not that much memory.
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

"""The two tiers of a store: host memory, and files that one thread reads and writes in order.

A full tier keeps its entries, and accepts a new one only after another was removed. An epoch uses each sample once, so
no other rule could give more hits, and this one writes least.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .digest import Key
from .disk import DiskFiles

#: Entries that wait to be written are in memory, up to this many bytes, or one that is larger. If the disk is slower,
#: entries are dropped.
_LARGEST_BACKLOG_BYTES = 64 << 20
#: Entries are read ahead until they have this many bytes.
_LARGEST_READ_AHEAD_BYTES = 128 << 20


class Tier(ABC):
    """Keeps CPU tensors by key, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._sizes: dict[Key, int] = {}
        self._numbers: Counter[tuple[bytes, str]] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._sizes

    def all_keys(self) -> list[Key]:
        return list(self._sizes)

    def num_entries(self, prefix: bytes, split: str) -> int:
        return self._numbers[prefix, split]

    def add(self, key: Key, entry: Tensor) -> bool:
        """Keep an entry. Returns False if there is no room for it now."""
        if self.used + entry.nbytes > self.limit or not self._hold(key, entry):
            return False
        self._sizes[key] = entry.nbytes
        self._numbers[key.prefix, key.split] += 1
        self.used += entry.nbytes
        return True

    def remove(self, key: Key) -> None:
        """Drop an entry of this tier."""
        self._release(key)
        self._numbers[key.prefix, key.split] -= 1
        self.used -= self._sizes.pop(key)

    @abstractmethod
    def stage(self, key: Key) -> bool:
        """Begin to read an entry that will be needed soon. Returns False if too many reads are under way."""

    @abstractmethod
    def unstage(self) -> None:
        """Forget entries that were staged, but not fetched yet."""

    @abstractmethod
    def fetch(self, key: Key) -> Tensor | None:
        """The entry of a key of this tier; None if it is damaged. It is no longer staged afterwards."""

    @abstractmethod
    def read(self, key: Key) -> Future[Tensor | None]:
        """Read an entry like `fetch`, without waiting. An entry that is staged stays staged."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _hold(self, key: Key, entry: Tensor) -> bool: ...

    @abstractmethod
    def _release(self, key: Key) -> None: ...


class MemoryTier(Tier):
    """Entries in host memory."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._entries: dict[Key, Tensor] = {}

    def stage(self, key: Key) -> bool:
        return True

    def unstage(self) -> None:
        pass

    def fetch(self, key: Key) -> Tensor | None:
        return self._entries[key]

    def read(self, key: Key) -> Future[Tensor | None]:
        result: Future[Tensor | None] = Future()
        result.set_result(self._entries[key])
        return result

    def close(self) -> None:
        self._entries.clear()

    def _hold(self, key: Key, entry: Tensor) -> bool:
        self._entries[key] = entry
        return True

    def _release(self, key: Key) -> None:
        del self._entries[key]


class DiskTier(Tier):
    """Entries in files. Only the tier's own thread uses the files, and only the caller's thread everything else.

    Attributes:
        failed_writes: number of failed writes. After a failure the tier does not grow beyond its size at that time.
    """

    def __init__(self, limit: int, scratch: Path | None) -> None:
        """
        Args:
            limit: limit of the entries in bytes.
            scratch: folder of the files; by default TMPDIR.
        """
        super().__init__(limit)
        self.failed_writes = 0
        self._files = DiskFiles(scratch)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-disk")
        self._shapes: dict[Key, tuple[torch.Size, torch.dtype]] = {}
        self._writing: deque[tuple[Key, int, Future[bool]]] = deque()
        self._backlog = 0
        self._staged: dict[Key, Future[Tensor | None]] = {}
        self._staged_bytes = 0

    def stage(self, key: Key) -> bool:
        if key in self._staged:
            return True
        if self._staged_bytes >= _LARGEST_READ_AHEAD_BYTES:
            return False
        self._staged[key] = self.read(key)
        self._staged_bytes += self._sizes[key]
        return True

    def unstage(self) -> None:
        self._staged.clear()
        self._staged_bytes = 0

    def fetch(self, key: Key) -> Tensor | None:
        staged = self._unstage(key)
        return (staged or self.read(key)).result()

    def read(self, key: Key) -> Future[Tensor | None]:
        return self._thread.submit(self._files.read, key, *self._shapes[key])

    def close(self) -> None:
        self._thread.submit(self._files.close)
        self._thread.shutdown()

    def settle(self) -> None:
        """Drop entries whose writes failed."""
        while self._writing and self._writing[0][2].done():
            key, size, written = self._writing.popleft()
            self._backlog -= size
            if not written.result():
                self.failed_writes += 1
                if key in self:
                    self.remove(key)
                self.limit = min(self.limit, self.used)

    def _hold(self, key: Key, entry: Tensor) -> bool:
        self.settle()
        if self._backlog and self._backlog + entry.nbytes > _LARGEST_BACKLOG_BYTES:
            return False
        self._backlog += entry.nbytes
        self._shapes[key] = (entry.shape, entry.dtype)
        self._writing.append((key, entry.nbytes, self._thread.submit(self._files.write, key, entry)))
        return True

    def _release(self, key: Key) -> None:
        self._unstage(key)
        del self._shapes[key]
        self._thread.submit(self._files.remove, key)

    def _unstage(self, key: Key) -> Future[Tensor | None] | None:
        staged = self._staged.pop(key, None)
        if staged is not None:
            self._staged_bytes -= self._sizes[key]
        return staged

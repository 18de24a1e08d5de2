"""A store of cache entries with limits: entries go to memory first, and to disk once memory is full."""

import threading
from collections.abc import Container
from pathlib import Path

from torch import Tensor

from .digest import Key
from .tiers import DiskTier, MemoryTier, Tier


class TieredStore:
    """Entries by key, within limits in bytes. Several threads may use it. A failing disk raises no errors."""

    def __init__(self, memory_bytes: int, disk_bytes: int, scratch: Path | None) -> None:
        """
        Args:
            memory_bytes: limit of the entries in memory.
            disk_bytes: limit of the entries on disk; 0 for no disk.
            scratch: folder of the files; None for TMPDIR.
        """
        self.memory = MemoryTier(memory_bytes)
        self.disk = DiskTier(disk_bytes, scratch) if disk_bytes > 0 else None
        self._tiers: list[Tier] = [self.memory] if self.disk is None else [self.memory, self.disk]
        #: The tiers that take new entries.
        self._open = self._tiers
        self._lock = threading.Lock()
        self._torn = 0

    def take_failures(self) -> tuple[int, int]:
        """The numbers of damaged entries and of failed writes to disk since the last call."""
        with self._lock:
            torn, self._torn = self._torn, 0
            failed = 0
            if self.disk is not None:
                self.disk.settle()
                failed, self.disk.failed_writes = self.disk.failed_writes, 0
            return torn, failed

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes in memory and on disk."""
        return self.memory.used, 0 if self.disk is None else self.disk.used

    def num_entries(self, prefix: bytes, split: str) -> int:
        """Number of entries of a prefix and a split."""
        with self._lock:
            return sum(tier.num_entries(prefix, split) for tier in self._tiers)

    def all_keys(self) -> list[Key]:
        """Keys of all entries."""
        with self._lock:
            return [key for tier in self._tiers for key in tier.all_keys()]

    def tier_of(self, key: Key) -> Tier | None:
        """The tier that holds the entry; None if none does."""
        return next((tier for tier in self._tiers if key in tier), None)

    def put(self, key: Key, entry: Tensor) -> bool:
        """Keep an entry, if its key is new and there is room. Returns whether it is kept. `entry` is a CPU tensor that
        owns its storage."""
        with self._lock:
            return self.tier_of(key) is None and any(tier.add(key, entry) for tier in self._open)

    def get(self, key: Key) -> Tensor | None:
        """The entry of a key; None if it is missing or damaged. If the entry is on disk, this waits for it."""
        with self._lock:
            tier = self.tier_of(key)
            entry = None if tier is None else tier.fetch(key)
            if tier is not None and entry is None:
                self._torn += 1
                tier.remove(key)
            return entry

    def peek(self, key: Key) -> Tensor | None:
        """Read an entry like `get`, but do not hold the lock while the disk reads, so that the training thread can
        continue. Entries that were read ahead stay so."""
        with self._lock:
            tier = self.tier_of(key)
            reading = None if tier is None else tier.read(key)
        return None if reading is None else reading.result()

    def stage(self, key: Key) -> bool:
        """Begin to read an entry that will be needed soon. Returns False if too many reads are under way."""
        with self._lock:
            tier = self.tier_of(key)
            return tier is None or tier.stage(key)

    def unstage(self) -> None:
        """Forget entries that were read ahead, but not used yet."""
        with self._lock:
            for tier in self._tiers:
                tier.unstage()

    def remove(self, key: Key) -> None:
        """Drop an entry, if the store has it."""
        with self._lock:
            tier = self.tier_of(key)
            if tier is not None:
                tier.remove(key)

    def keep_only(self, prefixes: Container[bytes]) -> None:
        """Drop all entries whose prefix is not in `prefixes`."""
        for key in self.all_keys():
            if key.prefix not in prefixes:
                self.remove(key)

    def stop_disk(self) -> None:
        """Drop the entries on disk, and use only memory until `use_disk`."""
        with self._lock:
            self._open = [self.memory]
            if self.disk is not None:
                for key in self.disk.all_keys():
                    self.disk.remove(key)

    def use_disk(self) -> None:
        """Use the disk again, if there is one."""
        with self._lock:
            self._open = self._tiers

    def close(self) -> None:
        """Delete all entries."""
        with self._lock:
            for tier in self._tiers:
                tier.close()

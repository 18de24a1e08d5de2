"""A bounded store of entries: in memory first, then on disk."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from .digest import Key
from .tiers import DiskTier, MemoryTier, Tier


class TieredStore:
    """Entries by key within byte limits. Used from one thread; nothing in it raises for a disk that fails."""

    def __init__(self, memory_bytes: int, disk_bytes: int, name: str, scratch: Path | None = None) -> None:
        """`name` is part of the name of the disk tier's folder, which is made below `scratch` (by default TMPDIR)."""
        self.memory = MemoryTier(memory_bytes)
        self.disk = DiskTier(disk_bytes, name, scratch) if disk_bytes > 0 else None
        self._tiers: list[Tier] = [self.memory] if self.disk is None else [self.memory, self.disk]
        self._torn = 0

    def take_failures(self) -> tuple[int, int]:
        """Since the last call: entries found not to be whole, and entries that the disk did not take."""
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

    def prefixes(self) -> set[bytes]:
        """Digests of the prefixes that there are entries of."""
        return {key.prefix for tier in self._tiers for key in tier.all_keys()}

    def tier_of(self, key: Key) -> Tier | None:
        """The tier that holds the entry."""
        return next((tier for tier in self._tiers if key in tier), None)

    def put(self, key: Key, entry: Tensor) -> None:
        """Keep `entry`, on the CPU and with storage of its own, if there is room for it.

        `key` must not be in the store yet.
        """
        any(tier.add(key, entry) for tier in self._tiers)

    def get(self, key: Key) -> Tensor | None:
        """The entry, or None when there is none that is whole. Waits for the disk where it has to."""
        tier = self.tier_of(key)
        entry = None if tier is None else tier.fetch(key)
        if tier is not None and entry is None:
            self._torn += 1
            tier.remove(key)
        return entry

    def stage(self, key: Key) -> bool:
        """Begin to read an entry that will be used soon; False when enough are under way."""
        tier = self.tier_of(key)
        return tier is None or tier.stage(key)

    def unstage(self) -> None:
        """Forget what was read ahead and not used."""
        for tier in self._tiers:
            tier.unstage()

    def remove(self, key: Key) -> None:
        """Give up an entry, if it is here."""
        tier = self.tier_of(key)
        if tier is not None:
            tier.remove(key)

    def keep_only(self, wanted: Callable[[Key], bool]) -> None:
        """Give up the entries that are not wanted."""
        for tier in self._tiers:
            for key in tier.all_keys():
                if not wanted(key):
                    tier.remove(key)

    def forgo_disk(self) -> None:
        """Go on with memory alone."""
        if self.disk is not None:
            for key in self.disk.all_keys():
                self.disk.remove(key)
            self.disk.limit = 0

    def close(self) -> None:
        """Delete everything."""
        for tier in self._tiers:
            tier.close()

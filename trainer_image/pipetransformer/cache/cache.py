"""One worker's cache, for as long as the worker lives.

It is told which units are frozen on the first stage whenever that changes. Their digests are made in the background;
until they are known nothing is looked up. Entries of a shorter prefix stay valid and are carried on from where they
end; entries of anything else are given up.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from pipetransformer_contract.spec import Cache, CacheDtype, CachePolicy

from .choice import Choice
from .digest import Key, PrefixDigests
from .store import TieredStore

_DTYPES = {CacheDtype.FLOAT16: torch.float16, CacheDtype.BFLOAT16: torch.bfloat16}


class ActivationCache:
    """Entries, their names, and whether they are worth it. Used by the training thread alone."""

    def __init__(self, settings: Cache, *, job: str, worker: str, scratch: Path | None = None) -> None:
        """
        Args:
            settings: limits, dtype and policy, which is not `Never`.
            job: text of all that the job's prefixes have in common: model, data, precision.
            worker: names the folder of the disk tier.
            scratch: where that folder is made; TMPDIR by default.
        """
        self._counts: Counter[str] = Counter()
        self.choice = Choice(always=True)
        self.store = TieredStore(settings.memory_bytes, settings.disk_bytes, worker, scratch)
        self._always = settings.policy is CachePolicy.ALWAYS
        self._dtype = None if settings.dtype is None else _DTYPES[settings.dtype]
        self._digests = PrefixDigests(hashlib.sha256(job.encode()).digest())
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="cache-digest")
        self._pending: Future[list[bytes]] | None = None
        self._prefixes: list[bytes] = []
        self._lengths: list[int] = []

    def use(self, units: Sequence[nn.Module]) -> None:
        """From now on `units`, the model's first ones, are frozen here; none when this worker needs no entries."""
        self._prefixes = []
        self.choice = Choice(self._always)
        self.store.unstage()
        self._pending = self._hashing.submit(self._digest, list(units))

    def ready(self) -> bool:
        """Whether entries of the present prefix can be used and kept in this round."""
        if self._pending is not None and (self._pending.done() or self._always):
            self._prefixes = self._pending.result()
            self._pending = None
            valid = set(self._prefixes)
            self.store.keep_only(lambda key: key.prefix in valid)
            found = self.store.prefixes()
            self._lengths = [
                length
                for length in range(len(self._prefixes), 0, -1)
                if length == len(self._prefixes) or self._prefixes[length - 1] in found
            ]
        if self._prefixes and not self.choice.memory_pays:
            self._prefixes = []
            self.store.keep_only(lambda key: False)
        elif not self.choice.disk_pays:
            self.store.forgo_disk()
        return bool(self._prefixes)

    def find(self, split: str, sample: int, augmentation: int) -> tuple[int, Key] | None:
        """The longest prefix of the sample that is here: its number of units, and its entry's key."""
        for length in self._lengths:
            key = Key(self._prefixes[length - 1], split, sample, augmentation)
            if self.store.tier_of(key) is not None:
                return length, key
        return None

    def read(self, key: Key) -> Tensor | None:
        """The entry that `find` named; None when it is not whole."""
        of_disk = self.store.tier_of(key) is self.store.disk
        begun = time.perf_counter()
        entry = self.store.get(key)
        if of_disk:
            self.choice.waiting.append(time.perf_counter() - begun)
        return entry

    def keep(self, split: str, sample: int, augmentation: int, entry: Tensor, replaced: Key | None) -> None:
        """Keep what the whole prefix made of a sample, instead of `replaced`. `entry` owns its storage."""
        if replaced is not None:
            self.store.remove(replaced)
        if self._dtype is not None:
            entry = entry.to(self._dtype)
            if not bool(torch.isfinite(entry).all()):
                self._counts["outOfRange"] += 1
                return
        key = Key(self._prefixes[-1], split, sample, augmentation)
        self.store.put(key, entry)

    def count(self, outcome: str, samples: int) -> None:
        """Note that so many samples were `hits`, `advanced` or `computed`."""
        self._counts[outcome] += samples

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call; empty when nothing was asked for.

        Samples are `hits` (read), `advanced` (read at an earlier boundary and carried on from there) or `computed` from
        their inputs; entries are `outOfRange` of `cache.dtype` and not kept, `torn` and computed again, or
        `failedWrites` that the disk did not take. `memoryBytes` and `diskBytes` are held now.
        """
        counts, self._counts = self._counts, Counter()
        if not counts:
            return {}
        torn, failed_writes = self.store.take_failures()
        memory_bytes, disk_bytes = self.store.used_bytes
        names = ("hits", "advanced", "computed", "outOfRange")
        return {name: counts[name] for name in names} | {
            "torn": torn,
            "failedWrites": failed_writes,
            "memoryBytes": memory_bytes,
            "diskBytes": disk_bytes,
        }

    def close(self) -> None:
        """Delete everything."""
        self._hashing.shutdown()
        self.store.close()

    def _digest(self, units: list[nn.Module]) -> list[bytes]:
        self._digests.keep_only(units)
        return self._digests.of(units)

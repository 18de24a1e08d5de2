"""One worker's cache, which lives as long as the worker.

An entry is the output of a prefix, the model's first frozen units, of one sample. When the frozen units of the first
stage change, a thread computes their digests. Until they are known, the cache is not used. Entries of a shorter prefix
stay valid: the computation continues from them. Other entries are dropped. After a regroup, entries are sent to the
workers that now use their samples.
"""

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipetransformer_contract.spec import Cache, CacheDtype, CachePolicy

from .choice import Choice
from .digest import Key, PrefixDigests, UnitContent
from .peers import EntryReceiver, EntrySender
from .store import TieredStore

#: A change of the units waits this long for their digests, which is enough for about 250 MB. The next round would
#: otherwise compute the outputs of all its samples, and keep none of them.
_DIGESTS_AT_MOST_SECONDS = 0.2
_DTYPES = {CacheDtype.FLOAT16: torch.float16, CacheDtype.BFLOAT16: torch.bfloat16}


class Found(NamedTuple):
    """The place of an entry that `ActivationCache.find` found.

    Attributes:
        num_units: number of units that its sample has passed.
        key: its key.
    """

    num_units: int
    key: Key


class ActivationCache:
    """Keeps entries, finds them by key, and measures whether reading them is faster than computing.

    The training thread calls its methods, except `accept`. Its own threads exchange entries with other workers.
    """

    def __init__(self, settings: Cache, *, job: str, scratch: Path | None = None) -> None:
        """
        Args:
            settings: the spec's section `cache`: limits, dtype and policy. The policy is not `Never`.
            job: a text that says everything that all entries of the job depend on: model, data, precision.
            scratch: folder of the files on disk; TMPDIR by default.
        """
        self._counts: Counter[str] = Counter()
        self.choice = Choice(always=True)
        self.store = TieredStore(settings.memory_bytes, settings.disk_bytes, scratch)
        self._always = settings.policy is CachePolicy.ALWAYS
        self._dtype = None if settings.dtype is None else _DTYPES[settings.dtype]
        self._digests = PrefixDigests(hashlib.sha256(job.encode()).digest())
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="cache-digest")
        self._pending: Future[list[bytes]] | None = None
        self._prefixes: list[bytes] = []
        self._in_use = False
        self._largest_entry = max(settings.memory_bytes, settings.disk_bytes)
        self._receiver: EntryReceiver | None = None
        self._sender: EntrySender | None = None

    def use(self, units: Sequence[nn.Module]) -> None:
        """Set the frozen units whose outputs this cache keeps, from the model's first on; empty to keep none."""
        self._prefixes = []
        self._in_use = bool(units)
        self.choice = Choice(self._always)
        self.store.use_disk()  # with more frozen units, computing may take longer than the disk
        self.store.unstage()
        # Without units the entries stay until they are handed over.
        self._pending = self._hashing.submit(self._digest, [UnitContent(unit) for unit in units])
        if units:
            wait([self._pending], _DIGESTS_AT_MOST_SECONDS)

    def settle(self) -> bool:
        """Begin a round: take over digests that are computed, and drop entries if reading them is slower than
        computing. Returns `is_ready`."""
        if self._pending is not None and (self._pending.done() or self._always):
            prefixes, self._pending = self._pending.result(), None
            self._take(prefixes)
        if self._prefixes and not self.choice.memory_pays:
            self._prefixes = []
            self.store.keep_only(())
        elif not self.choice.disk_pays:
            self.store.stop_disk()
        return self.is_ready

    @property
    def is_ready(self) -> bool:
        """Whether this round can read and keep entries. False while digests are computed, or if reading is slower."""
        return bool(self._prefixes)

    def find(self, split: str, sample: int, augmentation: int | None) -> Found | None:
        """Find the entry of a sample that has passed the most units; None if there is no entry.

        Args:
            split: name of the sample's split.
            sample: id of the sample.
            augmentation: number of the sample's variant; None if the variant never comes again, so that it has no
                entry.
        """
        if augmentation is None:
            return None
        for length in range(len(self._prefixes), 0, -1):
            key = Key(self._prefixes[length - 1], split, sample, augmentation)
            if self.store.tier_of(key) is not None:
                return Found(length, key)
        return None

    def read(self, key: Key) -> Tensor | None:
        """Read the entry of a key that `find` returned; None if it is damaged."""
        of_disk = self.store.disk is not None and key in self.store.disk
        begun = time.perf_counter()
        entry = self.store.get(key)
        if of_disk:
            self.choice.waiting.append(time.perf_counter() - begun)
        return entry

    def keep(self, split: str, sample: int, augmentation: int, entry: Tensor, replaced: Key | None) -> None:
        """Keep the output of all frozen units for a sample.

        Args:
            split: name of the sample's split.
            sample: id of the sample.
            augmentation: number of the sample's variant.
            entry: the output, on the CPU. It must own its storage.
            replaced: key of an older entry of the sample, which is dropped; None if there is none.
        """
        if replaced is not None:
            self.store.remove(replaced)
        if self._dtype is not None:
            entry = entry.to(self._dtype)
            if not bool(torch.isfinite(entry).all()):
                self._counts["outOfRange"] += 1
                return
        key = Key(self._prefixes[-1], split, sample, augmentation)
        self.store.put(key, entry)

    def holds(self, split: str, samples: int, num_units: int, uses: Callable[[int], bool]) -> bool:
        """Whether the cache has entries for all samples that this worker's pipeline uses, and reading was measured to
        be faster than computing.

        Args:
            split: `train` or `test`.
            samples: number of samples of the split that the pipeline uses.
            num_units: an entry counts only if its sample has passed at least this many units.
            uses: returns whether the pipeline uses a sample. The cache may still hold entries for other pipelines,
                which are not sent yet.
        """
        prefixes = self._prefixes[num_units - 1 :]
        if not (prefixes and self.choice.is_made):
            return False
        if sum(self.store.num_entries(prefix, split) for prefix in prefixes) < samples:
            return False
        # Only now look at each entry, because there may be many.
        keys = (key for key in self.store.all_keys() if key.split == split and key.prefix in prefixes)
        return len({key.sample for key in keys if uses(key.sample)}) >= samples

    def measure_again(self) -> None:
        """Measure again how long computing takes, because the frozen units moved to host memory or back."""
        self.choice.forget_computing()

    def count(self, outcome: str, samples: int) -> None:
        """Count samples by what happened to them: `hits`, `advanced` or `computed` (see `take_counts`)."""
        self._counts[outcome] += samples

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call, by name; empty if nothing was counted.

        - `hits`: samples whose output was read.
        - `advanced`: samples whose entry had passed fewer units, so that the rest was computed.
        - `computed`: samples that were computed from their inputs.
        - `outOfRange`: outputs that do not fit `cache.dtype` and were not kept.
        - `torn`: damaged entries, whose samples were computed again.
        - `failedWrites`: entries that could not be written to disk.
        - `memoryBytes`, `diskBytes`: bytes that entries use now.
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

    def listen(self, host: str) -> str:
        """Accept entries from other workers. Returns the address that they need to send them."""
        if self._receiver is None:
            self._receiver = EntryReceiver(host, self._largest_entry, self)
        return self._receiver.address

    def hand_over(self, owner: Callable[[Key], int], own: int | None, address_of: Callable[[int], str]) -> None:
        """Begin to move entries to the pipelines that now use their samples. They are dropped here.

        Args:
            owner: returns the pipeline that uses the entry of a key.
            own: the pipeline whose first worker this is; None if this worker is not the first of its pipeline.
            address_of: returns the address of a pipeline's first worker, which its `listen` returned; empty if it has
                no cache.
        """
        if self._sender is not None:
            self._sender.stop()
        moved: dict[int, list[Key]] = defaultdict(list)
        for key in self.store.all_keys():
            pipeline = owner(key)
            if pipeline != own:
                moved[pipeline].append(key)
        by_address = {address_of(pipeline): keys for pipeline, keys in moved.items()}
        self._sender = EntrySender(by_address, self.store) if by_address else None

    def wait_until_handed_over(self, seconds: float) -> None:
        """Wait until all entries of `hand_over` are sent, at most `seconds`."""
        if self._sender is not None:
            self._sender.wait(seconds)

    def close(self) -> None:
        """Stop all threads and delete all entries."""
        self._in_use = False  # a peer may still send entries
        self._prefixes, self._pending = [], None  # and a runner may still ask
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.stop()
        self._hashing.shutdown()
        self.store.close()

    def _take(self, prefixes: list[bytes]) -> None:
        self._prefixes = prefixes
        self.store.keep_only(set(prefixes))

    def _digest(self, units: list[UnitContent]) -> list[bytes]:
        self._digests.keep_only([content.unit for content in units])
        return self._digests.of(units)

    def accept(self, key: Key, entry: Tensor) -> None:
        """Keep an entry that another worker sent. A thread of the receiver calls this.

        While digests are computed, all entries are kept. Those of other prefixes are dropped once they are known."""
        pending = self._pending is not None
        if self._in_use and (pending or key.prefix in self._prefixes):
            self.store.put(key, entry)

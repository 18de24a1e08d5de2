"""The order of samples: one global cursor over C shards, independent of the number of pipelines.

The samples are dealt to C shards once, when the job starts. Every epoch shuffles inside each shard, and every global
batch takes its share of every shard. A pipeline serves whole shards, so its cache stays useful when the data-parallel
width changes, and the batch of a step does not depend on the width. If an epoch's last batch is short, each epoch
starts at another shard, so that any sample may be in it.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class EpochOrder:
    """Sample ids by global step, a pure function of (seed, number of samples, global batch, C)."""

    def __init__(self, *, seed: int, num_samples: int, global_batch: int, num_shards: int) -> None:
        """
        Raises:
            ValueError: there are fewer samples than shards, or a size is not positive.
        """
        if min(num_samples, global_batch, num_shards) < 1 or num_samples < num_shards:
            raise ValueError(f"cannot deal {num_samples} samples to {num_shards} shards in batches of {global_batch}")
        self.seed = seed
        self.num_samples = num_samples
        self.global_batch = min(global_batch, num_samples)
        self.num_shards = num_shards
        everything = np.random.default_rng([seed, 0]).permutation(num_samples)
        self._shards = np.array_split(everything, num_shards)  # the larger ones first
        sizes = [len(shard) for shard in self._shards]
        self._shard_of = np.empty(num_samples, dtype=np.int64)
        self._shard_of[everything] = np.repeat(np.arange(num_shards), sizes)
        self._firsts = np.cumsum([0, *sizes[:-1]])
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)
        #: Sample ids of a global step, one list for each of the C shards.
        self.batch = lru_cache(maxsize=2)(self._batch)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, including the short last one."""
        return -(-self.num_samples // self.global_batch)

    def epoch(self, step: int) -> int:
        """Epoch, from 0, that step `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Samples of global step `step`."""
        place = step % self.steps_per_epoch
        return min(self.global_batch, self.num_samples - place * self.global_batch)

    def shard_size(self, shard: int) -> int:
        """Number of samples of a shard."""
        return len(self._shards[shard])

    def shard(self, sample_id: int) -> int:
        """The shard that holds a sample."""
        return int(self._shard_of[sample_id])

    def _batch(self, step: int) -> list[list[int]]:
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.global_batch
        turns = np.arange(first, min(first + self.global_batch, self.num_samples))
        turns = (turns + self._first_turn(epoch)) % self.num_samples
        turns = turns[np.argsort(turns % self.num_shards, kind="stable")]  # shards give one sample each, in turn
        shards = turns % self.num_shards
        ids = self._shuffled(epoch)[self._firsts[shards] + turns // self.num_shards].tolist()
        ends = np.cumsum(np.bincount(shards, minlength=self.num_shards)).tolist()
        return [ids[start:end] for start, end in pairwise([0, *ends])]

    def _first_turn(self, epoch: int) -> int:
        """The turn that an epoch begins with. A short last batch takes the turns before those of the previous epoch's
        last batch, so all turns are in it equally often."""
        return -epoch * (self.num_samples % self.global_batch) % self.num_samples

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        """Shuffled sample ids, one shard after another."""
        return np.concatenate(
            [
                np.random.default_rng([self.seed, 1, epoch, number]).permutation(shard) if len(shard) > 1 else shard
                for number, shard in enumerate(self._shards)
            ]
        )

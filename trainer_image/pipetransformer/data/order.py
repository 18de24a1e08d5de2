"""The order of the training samples. It does not depend on the number of pipelines.

When the job starts, the samples are divided into C shards. Each epoch shuffles the samples within each shard, and each
global batch takes samples from all shards in turn. A pipeline trains whole shards, so most entries of its cache stay
useful when the number of pipelines changes. If the last batch of an epoch is short, each epoch starts at another shard,
so that each sample is in a short batch equally often.
"""

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class EpochOrder:
    """Gives the sample ids of each global step. They depend on seed, number of samples, global batch size and C."""

    def __init__(self, *, seed: int, num_samples: int, global_batch: int, num_shards: int) -> None:
        """
        Args:
            seed: seed of all shuffles.
            num_samples: number of training samples.
            global_batch: samples of a global step.
            num_shards: number of shards (C).

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
        """The epoch, from 0, to which the global step `step` (from 0) belongs."""
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Number of samples of the global step `step` (from 0). It is smaller at the end of an epoch."""
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
        """The first turn of an epoch. Turns number the samples of an epoch; the shards take turns.

        Each epoch begins earlier by the size of the short last batch. So over the epochs each turn is in a short batch
        equally often.
        """
        return -epoch * (self.num_samples % self.global_batch) % self.num_samples

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        """Shuffled sample ids, one shard after another."""
        return np.concatenate(
            [
                np.random.default_rng([self.seed, 1, epoch, number]).permutation(shard) if len(shard) > 1 else shard
                for number, shard in enumerate(self._shards)
            ]
        )

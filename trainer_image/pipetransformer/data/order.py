"""The order of samples: one global cursor over C shards, the same whatever the number of pipelines.

The samples are dealt to C shards once, when the job starts. Every epoch shuffles inside each shard, and every global
batch takes its share of every shard, the short last batch of an epoch included. A pipeline serves whole shards, so
what it caches of them stays useful when the data-parallel width changes, and the batch of a step never depends on
that width.
"""

from functools import lru_cache

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
        self._shards = np.array_split(everything, num_shards)
        self._shard_of = np.empty(num_samples, dtype=np.int64)
        for number, shard in enumerate(self._shards):
            self._shard_of[shard] = number
        self._starts = _starts([len(shard) for shard in self._shards], self.global_batch)
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)
        #: Sample ids of a global step, one list for each of the C shards.
        self.batch = lru_cache(maxsize=2)(self._batch)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches an epoch, the short last one included."""
        return -(-self.num_samples // self.global_batch)

    def epoch(self, step: int) -> int:
        """Epoch, from 0, that step `step` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Samples of global step `step`."""
        place = step % self.steps_per_epoch
        return min(self.global_batch, self.num_samples - place * self.global_batch)

    def shard(self, sample_id: int) -> int:
        """The shard that holds a sample."""
        return int(self._shard_of[sample_id])

    def _batch(self, step: int) -> list[list[int]]:
        epoch, place = divmod(step, self.steps_per_epoch)
        starts, ends = self._starts[place], self._starts[place + 1]
        return [ids[start:end].tolist() for ids, start, end in zip(self._shuffled(epoch), starts, ends, strict=True)]

    def _shuffle(self, epoch: int) -> list[NDArray[np.int64]]:
        return [
            np.random.default_rng([self.seed, 1, epoch, number]).permutation(shard)
            for number, shard in enumerate(self._shards)
        ]


def _starts(sizes: list[int], global_batch: int) -> list[list[int]]:
    """How much each shard has given before each batch of an epoch, and after the last: every batch takes evenly from
    all."""
    shards = np.concatenate([np.full(size, number) for number, size in enumerate(sizes)])
    shares = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    turns = shards[np.lexsort((shards, shares))]
    firsts = np.arange(0, len(turns) + global_batch, global_batch)
    given: list[list[int]] = np.stack(
        [np.searchsorted(np.flatnonzero(turns == number), firsts) for number in range(len(sizes))], axis=1
    ).tolist()
    return given

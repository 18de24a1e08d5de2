"""Which samples each pipeline trains at each step. The order of the samples does not depend on the number of pipelines.

When the job starts, the samples are divided into C shards. Each epoch shuffles the samples within each shard, and each
global batch takes samples from all shards in turn. A pipeline trains whole shards, so most entries of its cache stay
useful when the number of pipelines changes. If the last batch of an epoch is short, each epoch starts at another shard:
each sample is then in a short batch equally often. All micro-batches of one padded length have the same shape, in every
layout.
"""

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dataset import Dataset, PaddedLengths, padded_lengths

#: Micro-batches of a pipeline for each of its stages in the first layout, if the spec sets no micro-batch size.
_MICRO_BATCHES_PER_STAGE = 2
#: Number of training samples with which a freeze policy compares a layer with an earlier copy.
_PROBE_SAMPLES = 16


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
        self._everything = np.random.default_rng([seed, 0]).permutation(num_samples)
        self._shards = np.array_split(self._everything, num_shards)  # the larger ones first
        sizes = [len(shard) for shard in self._shards]
        self._shard_of = np.empty(num_samples, dtype=np.int64)
        self._shard_of[self._everything] = np.repeat(np.arange(num_shards), sizes)
        self._firsts = [0, *accumulate(sizes[:-1])]
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)
        self._cached_batch = lru_cache(maxsize=2)(self._batch)

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

    def batch(self, step: int) -> list[list[int]]:
        """Sample ids of the global step `step` (from 0), one list for each of the C shards."""
        return self._cached_batch(step)

    def shard_size(self, shard: int) -> int:
        """Number of samples of a shard."""
        return len(self._shards[shard])

    def shard(self, sample_id: int) -> int:
        """The shard that holds a sample."""
        return int(self._shard_of[sample_id])

    def _batch(self, step: int) -> list[list[int]]:
        epoch, place = divmod(step, self.steps_per_epoch)
        ids = self._shuffled(epoch)
        first = (place * self.global_batch + self._first_turn(epoch)) % self.num_samples
        over = first + self.batch_size(step) - self.num_samples
        if over <= 0:
            return self._of_turns(ids, first, self.num_samples + over)
        # After the last turn, the turns begin again at 0.
        parts = self._of_turns(ids, first, self.num_samples), self._of_turns(ids, 0, over)
        return [[*before, *after] for before, after in zip(*parts, strict=True)]

    def _of_turns(self, ids: NDArray[np.int64], start: int, stop: int) -> list[list[int]]:
        """The samples of each shard in these turns. Turn t takes sample t // C of shard t % C."""
        count = self.num_shards
        return [
            ids[first - (shard - start) // count : first - (shard - stop) // count].tolist()
            for shard, first in enumerate(self._firsts)
        ]

    def _first_turn(self, epoch: int) -> int:
        """The turn (see `_of_turns`) at which an epoch begins.

        Each epoch begins earlier by the size of the short last batch. So over the epochs each turn is in a short batch
        equally often.
        """
        return -epoch * (self.num_samples % self.global_batch) % self.num_samples

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        """Shuffled sample ids, one shard after another."""
        ids = self._everything.copy()
        # There may be a thousand shards. numpy takes a third less time with a key that is no list.
        key = np.array([self.seed, 1, epoch, 0], dtype=np.uint32)
        for number, (start, end) in enumerate(pairwise([*self._firsts, self.num_samples])):
            key[-1] = number
            if end - start > 1:
                np.random.Generator(np.random.PCG64(key)).shuffle(ids[start:end])
        return ids


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one micro-batch.

    Attributes:
        sample_ids: ids in the order of the batch dimension. Padding at the end repeats other samples.
        num_real: number of samples that are not padding. They have weight 1 in the loss, and padding has weight 0.
        length: length to which all samples are padded; None for the length in `DataInfo.input_shape`.
    """

    sample_ids: tuple[int, ...]
    num_real: int
    length: int | None = None

    @property
    def real_ids(self) -> tuple[int, ...]:
        """Ids of the samples without padding."""
        return self.sample_ids[: self.num_real]


def weights_of(micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> Tensor:
    """Return (samples,) weights in the loss: 1 for each sample, 0 for padding, one micro-batch after another."""
    weights = torch.ones(sum(len(micro_batch.sample_ids) for micro_batch in micro_batches), dtype=dtype)
    start = 0
    for micro_batch in micro_batches:
        end = start + len(micro_batch.sample_ids)
        weights[start + micro_batch.num_real : end] = 0.0
        start = end
    return weights


def default_micro_batch_size(global_batch: int, stages: int, pipelines: int) -> int:
    """The micro-batch size that gives each pipeline of the first layout two micro-batches for each stage."""
    return -(-global_batch // (_MICRO_BATCHES_PER_STAGE * stages * pipelines))


def shards_of(pipeline: int, pipelines: int, num_shards: int) -> Sequence[int]:
    """The shards whose samples a pipeline trains.

    The shards are put in bit-reversed order (van der Corput), and each pipeline takes a contiguous part of them. A
    global batch takes samples from the shards in turn. If its size is not a multiple of C, neighbouring shards give one
    sample more. Bit reversal separates neighbours, so these samples spread over all pipelines. Most samples keep their
    pipeline when R changes a little.

    Raises:
        ValueError: there are more pipelines than shards.
    """
    if pipelines > num_shards:
        raise ValueError(f"{pipelines} pipelines, but the order of the data allows only {num_shards}")
    return _spread(num_shards)[pipeline * num_shards // pipelines : (pipeline + 1) * num_shards // pipelines]


@lru_cache(maxsize=4)  # a regroup calls this for each entry of the cache
def pipelines_of(pipelines: int, num_shards: int) -> Sequence[int]:
    """By shard: the pipeline that trains its samples."""
    serves = {shard: pipeline for pipeline in range(pipelines) for shard in shards_of(pipeline, pipelines, num_shards)}
    return [serves[shard] for shard in range(num_shards)]


@lru_cache(maxsize=4)
def _spread(num_shards: int) -> Sequence[int]:
    bits = (num_shards - 1).bit_length()
    return sorted(range(num_shards), key=lambda number: f"{number:0{bits}b}"[::-1])


def deal(
    batch: Sequence[Sequence[int]],
    pipelines: int,
    micro_batch_size: int,
    lengths: PaddedLengths | None = None,
) -> list[list[MicroBatch]]:
    """Divide a global batch into the micro-batches of each pipeline. Each sample is in one of them, with weight 1.

    A pipeline whose shards have no sample in the batch gets one micro-batch of padding, because all pipelines must take
    part in a step.

    Args:
        batch: sample ids by shard, as `EpochOrder.batch` returns them.
        pipelines: data-parallel width (R), at most the number of shards.
        micro_batch_size: number of samples in each micro-batch, including padding.
        lengths: maps samples to padded lengths; None if all have one length. All samples of a micro-batch have the same
            length, and a pipeline's micro-batches are sorted by length.
    """
    padding = next(sample_id for shard in batch for sample_id in shard)
    dealt = []
    for pipeline in range(pipelines):
        ids = [i for shard in shards_of(pipeline, pipelines, len(batch)) for i in batch[shard]]
        if lengths is None:
            dealt.append(_cut(ids, micro_batch_size, padding))
            continue
        by_length: dict[int, list[int]] = defaultdict(list)
        for sample, length in zip(ids, lengths(ids), strict=True):
            by_length[length].append(sample)
        if not ids:
            by_length[lengths([padding])[0]] = []
        dealt.append(
            [
                micro_batch
                for length in sorted(by_length)
                for micro_batch in _cut(by_length[length], micro_batch_size, padding, length)
            ]
        )
    return dealt


def _cut(ids: list[int], size: int, padding: int, length: int | None = None) -> list[MicroBatch]:
    missing = -len(ids) % size if ids else size
    # Padding repeats a sample of the same pipeline if there is one. So the cache needs no entry for padding alone.
    padded = ids + [ids[0] if ids else padding] * missing
    return [
        MicroBatch(tuple(padded[start : start + size]), max(0, min(size, len(ids) - start)), length)
        for start in range(0, len(padded), size)
    ]


class Dealer:
    """Deals the samples of a job to the pipelines, as micro-batches."""

    def __init__(self, dataset: Dataset, order: EpochOrder, *, total_steps: int, steps_per_round: int = 1) -> None:
        """
        Args:
            dataset: training and held-out samples.
            order: the order of the training samples.
            total_steps: global steps of the whole job.
            steps_per_round: the most steps that a round has.
        """
        self._dataset, self._order, self._total_steps = dataset, order, total_steps
        self._lengths = padded_lengths(dataset.train, dataset.info)
        # Several callers need the same steps: a round trains them, the ledger notes them, the next two are read ahead.
        self._dealt = lru_cache(maxsize=3 + steps_per_round)(self._deal)

    def train(self, step: int, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline at one global step; none after the last step."""
        return self._dealt(step, pipelines, micro_batch_size) if step < self._total_steps else [[]] * pipelines

    def _deal(self, step: int, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        return deal(self._order.batch(step), pipelines, micro_batch_size, self._lengths)

    def test(self, pipelines: int, micro_batch_size: int) -> list[list[MicroBatch]]:
        """Micro-batches of each pipeline for an evaluation of the whole held-out split."""
        count = len(self._dataset.test)
        shards = [list(range(p * count // pipelines, (p + 1) * count // pipelines)) for p in range(pipelines)]
        return deal(shards, pipelines, micro_batch_size, padded_lengths(self._dataset.test, self._dataset.info))

    def probe(self, micro_batch_size: int) -> list[MicroBatch]:
        """Micro-batches of a few fixed training samples. A freeze policy compares a layer's outputs for them with the
        outputs of an earlier copy of the layer."""
        count = len(self._dataset.train)
        ids = random.Random(self._order.seed).sample(range(count), min(count, _PROBE_SAMPLES))
        return deal([ids], 1, micro_batch_size, self._lengths)[0]

    def pipeline_of(self, split: str, sample_id: int, pipelines: int) -> int:
        """The pipeline that uses a sample of a split (`train` or `test`)."""
        if split == "train":
            return pipelines_of(pipelines, self._order.num_shards)[self._order.shard(sample_id)]
        # Held-out samples are dealt as one shard for each pipeline.
        ends = range(1, pipelines + 1)
        part = bisect_right(ends, sample_id, key=lambda end: end * len(self._dataset.test) // pipelines)
        return pipelines_of(pipelines, pipelines)[part]

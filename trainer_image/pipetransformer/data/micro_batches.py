"""Deals a global batch to pipelines as micro-batches of one shape for each padded length, so that stages are static in
every layout."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .dataset import PaddedLengths

#: Micro-batches for each stage of the first layout, if the spec names no size.
_MICRO_BATCHES_PER_STAGE = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one micro-batch.

    Attributes:
        sample_ids: samples in the order of the batch dimension; padding at the end repeats other samples.
        num_real: number of samples that are not padding; they have weight 1, padding has weight 0.
        length: length that all samples are padded to; None for the length of the input.
    """

    sample_ids: tuple[int, ...]
    num_real: int
    length: int | None = None

    @property
    def real_ids(self) -> tuple[int, ...]:
        """The samples without padding."""
        return self.sample_ids[: self.num_real]


def weights_of(micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> Tensor:
    """(samples,) weights of all samples and padding, one micro-batch after another."""
    weights = torch.ones(sum(len(micro_batch.sample_ids) for micro_batch in micro_batches), dtype=dtype)
    start = 0
    for micro_batch in micro_batches:
        end = start + len(micro_batch.sample_ids)
        if micro_batch.num_real < len(micro_batch.sample_ids):
            weights[start + micro_batch.num_real : end] = 0.0
        start = end
    return weights


def default_micro_batch_size(global_batch: int, stages: int, pipelines: int = 1) -> int:
    """Samples of a micro-batch that fill the first layout's pipelines twice."""
    return max(1, -(-global_batch // (_MICRO_BATCHES_PER_STAGE * stages * pipelines)))


def shards_of(pipeline: int, pipelines: int, num_shards: int) -> Sequence[int]:
    """The shards that a pipeline serves.

    Batches take samples from the shards in turn, so the samples beyond a multiple of C come from neighbouring shards. A
    pipeline serves a run of the shards in bit-reversed order (van der Corput), which separates neighbours. So these
    samples spread over all pipelines, and most samples keep their pipeline when the width changes a little.

    Raises:
        ValueError: there are more pipelines than shards.
    """
    if pipelines > num_shards:
        raise ValueError(f"{pipelines} pipelines, but the data has only {num_shards} shards")
    return _spread(num_shards)[pipeline * num_shards // pipelines : (pipeline + 1) * num_shards // pipelines]


@lru_cache(maxsize=4)  # a hand-over of the cache asks for each entry
def pipelines_of(pipelines: int, num_shards: int) -> Sequence[int]:
    """The pipeline that serves each shard."""
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
    """The micro-batches of each pipeline, every sample of `batch` exactly once with weight 1.

    A pipeline whose shards give no sample gets one micro-batch of padding, because its stages run in step with the
    other pipelines.

    Args:
        batch: sample ids of each shard, as `EpochOrder.batch` gives them.
        pipelines: data-parallel width (R), at most the number of shards.
        micro_batch_size: samples of every micro-batch.
        lengths: lengths of samples, if there are several; a micro-batch has one of them, the shortest comes first.
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
    # Padding repeats a sample of the same pipeline if there is one, so that a cache computes nothing for padding alone.
    padded = ids + [ids[0] if ids else padding] * missing
    return [
        MicroBatch(tuple(padded[start : start + size]), max(0, min(size, len(ids) - start)), length)
        for start in range(0, len(padded), size)
    ]

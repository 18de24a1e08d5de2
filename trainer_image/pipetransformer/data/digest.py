"""Whether two workers, or two epochs, see the same data: stages of one pipeline read inputs and targets each by
themselves, and a cache stands for inputs that would be read again."""

import hashlib

import torch

from .dataset import Dataset, Split, read_batch

_SAMPLES = 32


def digest(dataset: Dataset, num_shards: int) -> str:
    """Of the sizes and of some targets of both splits, and of C of their order; inputs may be augmented at random, and
    are left out."""
    content = hashlib.blake2b(f"{num_shards}:".encode(), digest_size=16)
    for split in (dataset.train, dataset.test):
        content.update(f"{len(split)}:".encode())
        if len(split):
            content.update(read_batch(split, _spread(split), None)[1].contiguous().numpy().tobytes())
    return content.hexdigest()


def inputs_change(dataset: Dataset) -> bool:
    """Whether some samples, read twice, are not the same: they are augmented at random."""
    return any(
        not torch.equal(*(read_batch(split, _spread(split), None)[0] for _ in range(2)))
        for split in (dataset.train, dataset.test)
        if len(split)
    )


def _spread(split: Split) -> list[int]:
    """Ids all over the split."""
    count = min(_SAMPLES, len(split))
    return [number * len(split) // count for number in range(count)]

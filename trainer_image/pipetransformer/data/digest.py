"""Whether two workers, two epochs, or a run and the one that it goes on from, see the same data: stages of one pipeline
read inputs and targets each by themselves, a cache stands for inputs that would be read again, and samples are known by
their number."""

import hashlib

import torch

from .dataset import Dataset, Split, read_batch

_SAMPLES = 32


def digest(split: Split) -> str:
    """Of its size and of some targets; inputs may be augmented at random, and are left out."""
    content = hashlib.blake2b(f"{len(split)}:".encode(), digest_size=8)
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

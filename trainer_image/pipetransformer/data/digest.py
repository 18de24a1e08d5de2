"""Detects data that differ between workers, between epochs, or between a run and the checkpoint that it resumes.

Workers tell each other only the numbers of samples, and each stage reads samples by itself. A cache replaces inputs
that would be read again. So a run would mix different data without noticing.
"""

import hashlib

import torch

from .dataset import Dataset, Split, read_batch

_SAMPLES = 32


def digest(split: Split) -> str:
    """Digest of a split's size and of some targets. Inputs are left out, because they may be augmented at random."""
    content = hashlib.blake2b(f"{len(split)}:".encode(), digest_size=8)
    if len(split):
        content.update(read_batch(split, _spread(split), None)[1].contiguous().numpy().tobytes())
    return content.hexdigest()


def inputs_change(dataset: Dataset) -> bool:
    """Whether some samples differ when they are read twice, because they are augmented at random."""
    return any(
        not torch.equal(*(read_batch(split, _spread(split), None)[0] for _ in range(2)))
        for split in (dataset.train, dataset.test)
        if len(split)
    )


def _spread(split: Split) -> list[int]:
    """Ids of up to 32 samples, spread evenly over the split."""
    count = min(_SAMPLES, len(split))
    return [number * len(split) // count for number in range(count)]

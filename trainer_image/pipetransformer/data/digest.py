"""Detects data that differ between workers, or between a run and the checkpoint that it resumes.

Workers tell each other only the numbers of samples, and each stage reads samples by itself. So a run would mix
different data without noticing.
"""

import hashlib

import torch
from torch import Tensor

from .dataset import Split, read_batch, spread_ids


def digest(split: Split) -> str:
    """Digest of a split's size and of some targets. Inputs are left out, because they may be augmented at random."""
    content = hashlib.blake2b(f"{len(split)}:".encode(), digest_size=8)
    if len(split):
        targets = read_batch(split, spread_ids(split), None)[1]
        content.update(as_bytes(targets))
    return content.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy if it is contiguous."""
    return byte_tensor(tensor).numpy().data


def byte_tensor(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, as uint8, without a copy if it is contiguous. numpy lacks some types, such as bfloat16.

    torch refuses to view a single value with another stride than 1 as bytes, although it counts as contiguous.
    """
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)

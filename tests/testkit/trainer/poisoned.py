"""Digits of which one sample has no finite loss."""

from dataclasses import replace

import torch

from pipetransformer.data import Dataset, TensorSplit, load_dataset
from pipetransformer_contract.spec import Data

#: As `spec.data.name`.
NAME = f"{__name__}:poisoned_digits"


def poisoned_digits(path: str, dtype: torch.dtype) -> Dataset:
    """Digits with one image that is not a number. `path` is not read."""
    digits = load_dataset(Data(name="digits"), dtype=dtype)
    inputs, targets = digits.train.batch(range(len(digits.train)))
    inputs[7] = float("nan")
    return replace(digits, train=TensorSplit(inputs, targets))

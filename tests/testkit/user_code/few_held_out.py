"""The digits with 20 of them held out: in small micro-batches all would take longer to evaluate than a run to train."""

from dataclasses import replace

import torch

from pipetransformer.data import Dataset, TensorSplit
from pipetransformer.data.digits import load_digits

_HELD_OUT = 20


def load(*, path: str, dtype: torch.dtype) -> Dataset:
    """As an imported dataset."""
    digits = load_digits(path=path, dtype=dtype)
    return replace(digits, test=TensorSplit(*digits.test.batch(range(_HELD_OUT))))

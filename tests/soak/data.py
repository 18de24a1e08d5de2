"""The digits, read as slowly as from a busy disk: a step of these tiny models would else be over before anything can
go wrong in it."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer.data.dataset import Dataset, Split
from pipetransformer.data.digits import load_digits

_SECONDS = 0.03


class _Slow:
    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        time.sleep(_SECONDS)
        return self._split.batch(ids)


def slow_digits(*, path: str, dtype: torch.dtype) -> Dataset:
    """The digits; each micro-batch of the training split takes a moment."""
    digits = load_digits(path=path, dtype=dtype)
    return Dataset(train=_Slow(digits.train), test=digits.test, info=digits.info)

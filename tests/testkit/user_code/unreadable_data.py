"""Data whose samples cannot be read, for tests of what a worker says then."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipetransformer.data import DataInfo, Dataset


class Unreadable:
    """64 samples on a volume that is gone."""

    def __len__(self) -> int:
        return 64

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        raise OSError("the volume is gone")


def load(**_: Any) -> Dataset:
    """As an imported dataset."""
    return Dataset(Unreadable(), Unreadable(), DataInfo((1, 8, 8), 10))

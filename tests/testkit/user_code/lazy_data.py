"""Data that are read sample by sample, as files are, and that note who read what; specs of tests import them."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.data import DataInfo, Dataset

STEPS_PER_EPOCH = 5
BATCH = 12
_SHAPE = (1, 8, 8)
_CLASSES = 10


@dataclass(frozen=True)
class Lazy:
    """60 samples, each in one of two variants, by turns of two epochs.

    Attributes:
        log: a line `pid step sample` for each that is read.
        dtype: of inputs.
        unreadable: a sample that cannot be read.
        deadly: one that kills who reads it: always, or as long as there is no file of its name beside `log`.
    """

    log: Path
    dtype: torch.dtype = torch.float64
    unreadable: int | None = None
    deadly: int | None = None
    always: bool = False

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * BATCH

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._read(ids, None, 0)

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        return self._read(ids, step, self.augmentation_key(0, step))

    def augmentation_key(self, sample_id: int, step: int) -> int:
        return step // STEPS_PER_EPOCH // 2 % 2

    def _read(self, ids: Sequence[int], step: int | None, variant: int) -> tuple[Tensor, Tensor]:
        for sample in ids:
            with self.log.open("a") as log:
                log.write(f"{os.getpid()} {step} {sample}\n")
            if sample == self.unreadable:
                raise OSError("the volume is gone")
            if sample == self.deadly:
                self._die(self.log.with_name(str(sample)))
        inputs = np.stack([np.random.default_rng([variant, sample]).normal(size=_SHAPE) for sample in ids])
        rows = torch.tensor([[sample, sample % _CLASSES] for sample in ids])
        return torch.from_numpy(inputs).to(self.dtype), rows[:, 1]  # with a stride

    def _die(self, marker: Path) -> None:
        if self.always or not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def load(*, path: str, dtype: torch.dtype) -> Dataset:
    """As an imported dataset; `path` is that of the log."""
    return lazy(Lazy(Path(path), dtype))


def lazy(split: Lazy) -> Dataset:
    """The same samples to train on and held out."""
    return Dataset(split, split, DataInfo(_SHAPE, _CLASSES))


def noted(log: Path) -> list[tuple[int, int | None, int]]:
    """Who has read which step's sample, None for one that was read as it is."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(pid), None if step == "None" else int(step), int(sample)) for pid, step, sample in lines]

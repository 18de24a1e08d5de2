"""Splits of pictures in tables of the `datasets` library. Pixels are scaled to [-1, 1] when a picture is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dataset import DataInfo, Dataset, Task
from .processors import PictureScaling

_LARGEST_VALUE = 255.0


@dataclass(frozen=True)
class Pictures:
    """A split of a table with the columns `input` (pictures) and `target`. Inputs are scaled to [-1, 1] in `dtype`."""

    table: Any
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        images = torch.stack([_image(image) for image in rows["input"]]).to(self.dtype)
        return images / (_LARGEST_VALUE / 2) - 1, torch.as_tensor(rows["target"], dtype=torch.int64)


def scaled_pictures(
    tables: Sequence[Any], image: str, label: str, *, classes: int, labels: tuple[str, ...], dtype: torch.dtype
) -> Dataset:
    """Make a dataset of a training table and a held-out table. All pictures must have one size.

    Args:
        tables: both tables, with classes as whole numbers from 0.
        image: name of the column with pictures.
        label: name of the column with classes.
        classes: number of classes.
        labels: names of the classes; empty if they have none.
        dtype: type of the inputs.
    """
    columns = {image: "input", label: "target"}
    splits = [
        Pictures(table.select_columns(list(columns)).rename_columns(columns).with_format(None), dtype)
        for table in tables
    ]
    shape = tuple(splits[0].batch([0])[0].shape[1:])
    info = DataInfo(shape, classes, task=Task.CLASS, labels=labels)
    return Dataset(splits[0], splits[1], info, PictureScaling(shape, _LARGEST_VALUE))


def _image(image: Any) -> Tensor:
    """A picture as a tensor (channels, height, width)."""
    pixels = torch.as_tensor(np.array(image))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)

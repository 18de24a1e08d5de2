"""Splits of pictures in tables of the `datasets` library. A picture is converted to the mode of the first one, and its
pixels are scaled to [-1, 1], when it is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dataset import DataInfo, Dataset, Task
from .processors import PictureScaling

_LARGEST_VALUE = 255.0
#: PIL's modes of pictures without colour. "1" has two values, and "LA" has transparency.
_GREY = ("1", "L", "LA")
#: First letters of PIL's modes whose pixels have more than 8 bits: whole numbers of 16 or 32, and floats of 32.
_WIDE_MODES = ("I", "F")


@dataclass(frozen=True)
class Pictures:
    """A split of a table with the columns `input` (pictures) and `target`. Inputs are scaled to [-1, 1] in `dtype`.

    Attributes:
        table: the table.
        dtype: type of the inputs.
        mode: PIL's mode of all inputs: `L` (grey), `RGB` or `RGBA`; empty if the pictures are arrays.
    """

    table: Any
    dtype: torch.dtype
    mode: str

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = self.table[list(ids)]
        images = torch.stack([_pixels(picture, self.mode) for picture in rows["input"]]).to(self.dtype)
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
    plain = [table.select_columns(list(columns)).rename_columns(columns).with_format(None) for table in tables]
    mode = _mode_of_all(plain[0][0]["input"])
    splits = [Pictures(table, dtype, mode) for table in plain]
    shape = tuple(splits[0].batch([0])[0].shape[1:])
    info = DataInfo(shape, classes, task=Task.CLASS, labels=labels)
    return Dataset(splits[0], splits[1], info, PictureScaling(shape, _LARGEST_VALUE))


def _mode_of_all(first: Any) -> str:
    """The mode in which all pictures of a dataset train, from its first picture; empty if pictures are arrays."""
    mode = getattr(first, "mode", "")
    if mode in _GREY:
        return "L"
    return mode if mode in ("", "RGBA") else "RGB"


def _pixels(picture: Any, mode: str) -> Tensor:
    """A picture as a tensor (channels, height, width).

    Raises:
        ValueError: its pixels are floating-point numbers, which would be scaled wrongly. Or it would lose its colours.
    """
    array = np.array(_converted(picture, mode) if mode else picture)
    if array.dtype.kind == "f":
        raise ValueError("the pixels of a picture are floating-point numbers: scale them to 0 to 255, as whole numbers")
    pixels = torch.as_tensor(array)
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)


def _converted(picture: Any, mode: str) -> Any:
    """A picture of PIL in `mode`.

    Raises:
        ValueError: its pixels have more than 8 bits, so PIL would cut off what is larger. Or it would lose its colours.
    """
    if picture.mode.startswith(_WIDE_MODES):
        raise ValueError(
            f"a picture has pixels of more than 8 bits (PIL mode {picture.mode}): convert them to 8 bits, 0 to 255"
        )
    if mode == "L" and picture.mode not in _GREY:
        colours = np.asarray(picture.convert("RGB"))
        if (colours != colours[..., :1]).any():
            raise ValueError(
                f"a picture has colours (mode {picture.mode} of PIL), but the first one is grey, so all are read as "
                'grey: read all in one mode, by table.cast_column(COLUMN, datasets.Image(mode="RGB"))'
            )
    return picture if picture.mode == mode else picture.convert(mode)

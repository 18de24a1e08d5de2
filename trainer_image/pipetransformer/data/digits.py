"""The 1,797 scanned 8x8 digits that scikit-learn ships: real images without a download."""

import numpy as np
import torch

from pipetransformer.errors import SpecError

from .dataset import DataInfo, Dataset, Task, TensorSplit
from .processors import PictureScaling

_NUM_CLASSES = 10
_LARGEST_GREY = 16.0
_HELD_OUT_EVERY = 5


def load_digits(*, path: str, dtype: torch.dtype) -> Dataset:
    """Load images (1, 8, 8) with values scaled to [-1, 1]. Every fifth image of each class is held out.

    Raises:
        SpecError: a path is given, or scikit-learn is not installed.
    """
    if path:
        raise SpecError("spec.data.path", "must be empty for digits, which come with scikit-learn")
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise SpecError("spec.data.name", "digits needs scikit-learn: pip install pipetransformer[digits]") from error
    pixels, classes = load(return_X_y=True)
    held_out = np.zeros(len(classes), dtype=bool)
    for label in range(_NUM_CLASSES):
        held_out[np.flatnonzero(classes == label)[::_HELD_OUT_EVERY]] = True
    inputs = torch.as_tensor(pixels, dtype=dtype).reshape(-1, 1, 8, 8) / (_LARGEST_GREY / 2) - 1
    targets = torch.as_tensor(classes, dtype=torch.long)
    test = torch.as_tensor(held_out)
    return Dataset(
        train=TensorSplit(inputs[~test], targets[~test]),
        test=TensorSplit(inputs[test], targets[test]),
        info=DataInfo(
            input_shape=(1, 8, 8),
            num_classes=_NUM_CLASSES,
            task=Task.CLASS,
            labels=tuple(map(str, range(_NUM_CLASSES))),
        ),
        processor=PictureScaling((1, 8, 8), _LARGEST_GREY),
    )

"""Data that a program brings as objects: torch's map-style datasets as splits."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset, default_collate

from ..errors import SpecError
from .dataset import DataInfo, Dataset, Split, TensorSplit


class MapSplit:
    """A map-style dataset of (input, target). The same index must give the same sample on every worker."""

    def __init__(self, samples: TorchDataset[Any], dtype: torch.dtype) -> None:
        self._samples = samples
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = default_collate([self._samples[i] for i in ids])
        return _cast(inputs, self._dtype), _cast(targets, self._dtype)


def own_dataset(data: object, *, dtype: torch.dtype) -> Dataset:
    """The dataset of a program's `data`: a `Dataset`, a map-style dataset, or a pair of them (training, held out).

    Args:
        data: as `train` takes it.
        dtype: of floating-point inputs and targets.

    Raises:
        SpecError: it is none of these, or cannot be read.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, TorchDataset):
        data = (data, Subset(data, []))
    if not isinstance(data, Sequence) or len(data) != 2 or not all(hasattr(part, "__len__") for part in data):
        raise SpecError(
            "data",
            f"is {type(data).__name__}: no Dataset, nor one or two (training, held out) map-style datasets",
        )
    try:
        train, test = (_split(part, dtype) for part in data)
        inputs, targets = train.batch([0])
    except Exception as error:
        raise SpecError("data", f"sample 0: {type(error).__name__}: {error}", reason="DataUnreadable") from error
    classes = getattr(data[0], "classes", None)
    if classes is not None:
        num_classes = len(classes)
    elif isinstance(train, TensorSplit) and not targets.is_floating_point():
        num_classes = int(train.targets.max()) + 1
    else:
        num_classes = 0
    return Dataset(train=train, test=test, info=DataInfo(tuple(inputs.shape[1:]), num_classes))


def _split(samples: object, dtype: torch.dtype) -> Split:
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        inputs, targets = samples.tensors
        return TensorSplit(_cast(inputs, dtype), _cast(targets, dtype))
    return MapSplit(cast("TorchDataset[Any]", samples), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

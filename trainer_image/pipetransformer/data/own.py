"""Data that a program brings as objects: torch's map-style datasets as splits."""

from collections.abc import Mapping, Sequence, Sized
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
    kind = type(data).__name__
    if isinstance(data, TorchDataset):
        data = (data, Subset(data, []))
    if not isinstance(data, Sequence) or len(data) != 2 or not all(hasattr(part, "__len__") for part in data):
        raise SpecError(
            "data",
            f"is {kind}: no Dataset, nor one or two (training, held out) map-style datasets",
        )
    try:
        if not len(cast(Sized, data[0])):
            raise SpecError("data", "has no samples to train on")
        train, test = (_split(part, dtype) for part in data)
        if isinstance(train, MapSplit):
            _check_pair(data[0][0])
        inputs, targets = train.batch([0])
    except SpecError:
        raise
    except Exception as error:
        raise SpecError("data", f"sample 0: {type(error).__name__}: {error}", reason="DataUnreadable") from error
    info = DataInfo(tuple(inputs.shape[1:]), _num_classes(data[0], targets))
    return Dataset(train=train, test=test, info=info)


def _num_classes(samples: Any, targets: Tensor) -> int:
    """As the whole says that these are a part of, 0 if it does not."""
    while isinstance(samples, Subset):
        samples = samples.dataset
    classes = getattr(samples, "classes", None)
    if isinstance(classes, Sized):
        return len(classes)
    if isinstance(samples, TensorDataset) and not targets.is_floating_point():
        return int(samples.tensors[1].max()) + 1
    return 0


def _check_pair(sample: object) -> None:
    """Refuse what would be collated to something else than two tensors.

    Raises:
        SpecError: saying what the sample is.
    """
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
        raise SpecError(
            "data",
            f"a sample is a {type(sample).__name__}{size}, not (input, target), each a tensor or a number: "
            "choose its columns in a dataset of your own; of padded tokens make a Dataset with a PaddedSplit",
        )
    for part, name in zip(sample, ("input", "target"), strict=True):
        if isinstance(part, Mapping | Sequence):
            raise SpecError("data", f"a sample's {name} is a {type(part).__name__}, not a tensor or a number")


def _split(samples: object, dtype: torch.dtype) -> Split:
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        inputs, targets = samples.tensors
        return TensorSplit(_cast(inputs, dtype), _cast(targets, dtype))
    return MapSplit(cast("TorchDataset[Any]", samples), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

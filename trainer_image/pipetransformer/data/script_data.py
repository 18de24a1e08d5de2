"""Turns a program's map-style datasets, of torch or of the `datasets` library, into splits."""

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchDataset

from pipetransformer.errors import SpecError

from .dataset import DataInfo, Dataset, Processor, Split, Task, TensorSplit


class Table(Protocol):
    """The part of `datasets.Dataset` that is used here."""

    @property
    def column_names(self) -> list[str]: ...

    def __len__(self) -> int: ...


class MapSplit:
    """A split of a map-style dataset of (input, target). The same index must return the same sample on every worker."""

    def __init__(self, samples: TorchDataset[Any], dtype: torch.dtype) -> None:
        self._samples = samples
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        samples = [self._samples[i] for i in ids]
        try:
            inputs, targets = default_collate(samples)
        except RuntimeError:
            _check_shapes(samples, ids)
            raise
        return _cast(inputs, self._dtype), _cast(targets, self._dtype)


def script_dataset(
    data: object, *, dtype: torch.dtype, processor: Processor | None = None, task: Task | None = None
) -> Dataset:
    """Make a dataset of the argument `data` of `train`.

    Args:
        data: a `Dataset`, a map-style dataset, a table of the `datasets` library, or a pair (training, held out) of
            datasets or tables.
        dtype: type of floating-point inputs and targets.
        processor: the tokenizer or image processor that made the inputs; None if the program does not pass it.
        task: the task that the model learns; None if it is unknown.

    Raises:
        SpecError: `data` has a type that is not supported, or cannot be read.
    """
    if isinstance(data, Dataset):
        return data if processor is None else replace(data, processor=processor)
    pair = _pair(data)
    with _reading("cannot be read"):
        if not len(pair[0]):
            raise SpecError("data", "has no samples to train on")
        if all(_is_table(part) for part in pair):
            from .columns import dataset_of_tables  # imports `datasets`, which the program has imported before

            return dataset_of_tables(pair, processor, task, dtype=dtype)
        train, test = (_split(part, dtype) for part in pair)
        with _reading("sample 0"):
            if isinstance(train, MapSplit):
                _check_pair(pair[0][0])
            inputs, targets = train.batch([0])
        labels = _labels(pair[0])
        _check_names(labels, _labels(pair[1]))
        classes = len(labels) or max(_num_classes(part, targets) for part in pair)
    info = DataInfo(tuple(inputs.shape[1:]), classes, labels=labels)
    return Dataset(train=train, test=test, info=info, processor=processor)


@contextmanager
def _reading(words: str) -> Iterator[None]:
    """A context that reads the program's data. It turns an error of the data into a `SpecError` that begins with
    `words`."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        raise SpecError("data", f"{words}: {type(error).__name__}: {error}", reason="DataUnreadable") from error


def _pair(data: Any) -> tuple[Any, Any]:
    """Split a program's data into training samples and held-out samples, which may be empty.

    Raises:
        SpecError: says what to pass instead of `data`.
    """
    if isinstance(data, Mapping) and data and all(_is_table(part) for part in data.values()):
        return _pair_of_splits(data)
    if _is_table(data):
        return data, data.select([])
    if isinstance(data, TorchDataset) and not isinstance(data, IterableDataset):
        return data, Subset(data, [])
    parts = tuple(data) if isinstance(data, list | tuple) else (data,)
    for part in parts:
        if instead := _instead_of(part, len(parts)):
            raise SpecError("data", f"is {_article(type(data).__name__)}: {instead}" if part is data else instead)
    if len(parts) != 2 or not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts):
        raise SpecError(
            "data",
            f"is {_article(type(data).__name__)}: pass a Dataset, or one or two (training, held out) map-style "
            "datasets, of torch or of the datasets library",
        )
    return parts[0], parts[1]


def _pair_of_splits(data: Mapping[str, Any]) -> tuple[Any, Any]:
    held_out = [name for name in ("validation", "test") if name in data]
    if "train" not in data or len(held_out) > 1:
        raise SpecError(
            "data",
            f"has the splits {', '.join(data)}: pass the two to train on and to hold out, as "
            f'(data["train"], data["{held_out[-1] if held_out else "test"}"])',
        )
    train = data["train"]
    return train, data[held_out[0]] if held_out else train.select([])


def _instead_of(part: Any, parts: int) -> str:
    """For an object of a common type that is not a map-style dataset: words that say what to pass instead; otherwise
    empty. `parts` is the number of objects that the program passes as `data`."""
    if isinstance(part, DataLoader):
        return (
            "pass its dataset, `loader.dataset`. The trainer makes batches itself: set their size by "
            "training.global_batch_size, and num_workers by loader_processes"
        )
    if isinstance(part, IterableDataset) or _is_of_datasets(part, "IterableDataset", "IterableDatasetDict"):
        return (
            "samples of an IterableDataset have no numbers, which workers need to share them: pass a map-style "
            "dataset, with __len__ and __getitem__, or load it with streaming=False"
        )
    if isinstance(part, Tensor | np.ndarray):
        wanted = "(TensorDataset(inputs, targets), TensorDataset(held_out_inputs, held_out_targets))"
        which = "a tensor is not a dataset of (input, target)" if parts > 1 else "it has no targets"
        return f"{which}: pass {wanted}"
    return ""


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _is_table(part: object) -> bool:
    return _is_of_datasets(part, "Dataset")


def _is_of_datasets(part: object, *names: str) -> bool:
    """Whether `part` is of one of these classes of `datasets`. If it is, the program has imported the library, so this
    does not import it."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(part, tuple(getattr(library, name) for name in names))


def _labels(samples: Any) -> tuple[str, ...]:
    """Names of the classes, from the attribute `classes` that datasets of torchvision have; empty without it."""
    while isinstance(samples, Subset):
        samples = samples.dataset
    classes = getattr(samples, "classes", None)
    named = isinstance(classes, list | tuple) and all(isinstance(each, str) for each in classes)
    return tuple(classes) if named else ()  # type: ignore[arg-type]


def _check_names(training: Sequence[str], held_out: Sequence[str]) -> None:
    """Refuse held-out samples in which a class has the same number as in training, but another name, or which have more
    classes. Either list is empty if its classes have no names.

    Raises:
        SpecError: names the first such class.
    """
    for number, (ours, theirs) in enumerate(zip(training, held_out, strict=False)):
        if ours != theirs:
            raise SpecError(
                "data",
                f'class {number} is "{ours}" in the training samples, but "{theirs}" in the held-out ones: number the '
                "classes alike. ImageFolder, for example, numbers the folders that it finds",
            )
    if training and (more := held_out[len(training) :]):
        raise SpecError(
            "data",
            f'the held-out samples have the class "{more[0]}" (number {len(training)}), but the training samples have '
            f"only {len(training)} classes: hold out samples of the same classes",
        )


def _num_classes(samples: Any, targets: Tensor) -> int:
    """The number of classes of the whole dataset; 0 if it is unknown."""
    while isinstance(samples, Subset):
        samples = samples.dataset
    classes = getattr(samples, "classes", None)
    if isinstance(classes, Sized):
        return len(classes)
    if isinstance(samples, TensorDataset) and len(samples) and not targets.is_floating_point():
        return int(samples.tensors[1].max()) + 1
    return 0


def _check_pair(sample: object) -> None:
    """Refuse a sample that is not a pair of tensors or numbers, because a batch of them would not be two tensors.

    Raises:
        SpecError: names the sample's type.
    """
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        size = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
        raise SpecError(
            "data",
            f"a sample is a {type(sample).__name__}{size}, not (input, target), each a tensor or a number: "
            "select its parts in your own dataset; for padded tokens, make a Dataset with a PaddedSplit",
        )
    for part, name in zip(sample, ("input", "target"), strict=True):
        if isinstance(part, Mapping | Sequence):
            raise SpecError(
                "data",
                f"a sample's {name} is a {type(part).__name__}, not a tensor or a number: select one tensor of it in "
                "your own dataset",
            )


def _check_shapes(samples: Sequence[tuple[Any, Any]], ids: Sequence[int]) -> None:
    """Refuse samples that cannot be stacked, because their shapes differ.

    Raises:
        ValueError: names two samples, and their shapes.
    """
    for parts, name in zip(zip(*samples, strict=True), ("inputs", "targets"), strict=True):
        first, *others = map(np.shape, parts)
        for sample, shape in zip(ids[1:], others, strict=True):
            if shape != first:
                raise ValueError(
                    f"samples {ids[0]} and {sample} have {name} of shapes {tuple(first)} and {tuple(shape)}: "
                    "pad or crop them in your own dataset; for padded tokens, make a Dataset with a PaddedSplit"
                )


def _split(samples: object, dtype: torch.dtype) -> Split:
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        inputs, targets = samples.tensors
        return TensorSplit(_cast(inputs, dtype), _cast(targets, dtype))
    return MapSplit(cast("TorchDataset[Any]", samples), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

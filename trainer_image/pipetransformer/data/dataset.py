"""Types of datasets. A dataset has a training split and a held-out split, and gives samples by their ids."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from operator import index
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from pipetransformer.errors import SpecError, meant

from .patience import read_patiently

#: A target of this value is ignored, as in `cross_entropy`.
NO_TARGET = -100
#: Largest number of sample ids in an error message.
_IDS_NAMED = 16
#: Augmentation key of a sample that is read without augmentation.
_AS_IT_IS = -1
#: Largest number of samples that tell whether data differ.
_COMPARED = 32


class Task(StrEnum):
    """What the model learns to predict: the target of a sample."""

    NEXT_TOKEN = "NextToken"  #: the next token at each position; samples are packed, without padding
    MASKED_TOKEN = "MaskedToken"  #: the original token at masked positions; samples are packed, without padding
    CLASS = "Class"  #: one class for the sample; texts are padded


def as_task(name: str) -> Task:
    """The task with the name that the option `task` gives.

    Raises:
        SpecError: there is no such task.
    """
    if name not in set(Task):
        words = f'there is no task "{name}"{meant(name, Task)}: use {", ".join(Task)}'
        raise SpecError("spec.data.options.task", words)
    return Task(name)


@dataclass(frozen=True)
class DataInfo:
    """Facts about the data that a model depends on.

    Attributes:
        input_shape: shape of one input, without the batch dimension; (positions,) for tokens.
        num_classes: number of classes of a target; the vocabulary's size if targets are tokens; 0 if unknown.
        vocab_size: number of token ids; 0 if the inputs are not tokens.
        lengths: the lengths to which samples are padded, ascending. The last one is that of `input_shape`. Empty if all
            samples have one length.
        task: what a target is; None if unknown, and then any model is accepted.
        labels: names of the classes, in order; empty if they have no names.
        pad_id: id of padding; None if there is no such token.
        start_id: id at the start of a text; None if there is no such token.
        end_id: id at the end of a text; None if there is no such token.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    vocab_size: int = 0
    lengths: tuple[int, ...] = ()
    task: Task | None = None
    labels: tuple[str, ...] = ()
    pad_id: int | None = None
    start_id: int | None = None
    end_id: int | None = None

    def __post_init__(self) -> None:
        """Make all values plain, because they are compared, and written with the finished model.

        Raises:
            ValueError, TypeError: there are names for another number of classes, lengths do not ascend to that of
                `input_shape`, or a number is not whole.
        """
        shape, lengths = (tuple(map(index, each)) for each in (self.input_shape, self.lengths))
        plain: dict[str, object] = {"input_shape": shape, "lengths": lengths}
        for name in ("num_classes", "vocab_size", "pad_id", "start_id", "end_id"):
            number = getattr(self, name)
            plain[name] = None if number is None else index(number)  # it may be a number of numpy
        plain["labels"] = tuple(map(str, self.labels))
        if self.labels and len(self.labels) != self.num_classes:
            raise ValueError(f"{len(self.labels)} labels for {self.num_classes} classes")
        if lengths and (lengths != tuple(sorted(set(lengths))) or lengths[-1:] != shape[:1]):
            raise ValueError(f"lengths are {lengths}: they must ascend to that of input_shape, {shape}")
        for name, value in plain.items():
            object.__setattr__(self, name, value)


class Split(Protocol):
    """Samples with the ids 0 to len-1. An id means the same sample on every worker."""

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read samples, in the order of `ids`.

        Returns:
            Inputs (len(ids), *input_shape) and targets (len(ids), ...), on the CPU. A target is one class, or one class
            for each position, with -100 for positions to ignore.
        """
        ...


@runtime_checkable
class PaddedSplit(Split, Protocol):
    """A split whose samples are padded at the end, so that all have one length."""

    def lengths(self, ids: Sequence[int]) -> Tensor:
        """Return (len(ids),) lengths: for each sample the number of positions that are not padding, at least 1."""
        ...


def lengths_of(split: Split, ids: Sequence[int], device: torch.device) -> Tensor | None:
    """Lengths of these samples on `device`; None if the split is not padded."""
    if not _is_padded(split):
        return None
    with _reading(ids):
        return _lengths(split, ids).to(device)


#: Maps sample ids to the lengths that they are padded to.
PaddedLengths = Callable[[Sequence[int]], Sequence[int]]


def padded_lengths(split: Split, info: DataInfo) -> PaddedLengths | None:
    """A function that maps sample ids to padded lengths: for each sample the shortest of `info.lengths` that it fits.

    None if all samples have one length.
    """
    if not info.lengths or not _is_padded(split):
        return None
    padded = split

    def of(ids: Sequence[int]) -> list[int]:
        with _reading(ids):
            lengths = _lengths(padded, ids)
            if (longest := int(lengths.max())) > info.lengths[-1]:
                raise ValueError(f"a length is {longest}, but samples have {info.lengths[-1]} positions")
            return [info.lengths[bisect_left(info.lengths, used)] for used in lengths.tolist()]

    return of


def _lengths(split: PaddedSplit, ids: Sequence[int]) -> Tensor:
    """What the split says of its samples' lengths.

    Raises:
        TypeError: it is not a tensor with a whole number for each sample.
        ValueError: a length is below 1.
    """
    found: object = read_patiently(lambda: split.lengths(ids))
    if not isinstance(found, Tensor) or found.shape != (len(ids),) or found.is_floating_point():
        kind = f"a tensor {tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"lengths returned {kind} for {len(ids)} samples, not a tensor ({len(ids)},) of whole numbers")
    if (found < 1).any():
        raise ValueError("a length is below 1")
    return found


@runtime_checkable
class AugmentedSplit(Split, Protocol):
    """A training split whose samples are augmented. The variant of a sample depends only on the sample and the step."""

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """As `batch`, with the variants that the samples have at a global step (from 0)."""
        ...

    def augmentation_key(self, sample_id: int, step: int) -> int | None:
        """The number, from 0, of a sample's variant at a step. None if this variant never comes again; then it is not
        cached."""
        ...


def _is_padded(split: Split) -> TypeGuard[PaddedSplit]:
    return _implements(type(split), PaddedSplit)


def _is_augmented(split: Split) -> TypeGuard[AugmentedSplit]:
    return _implements(type(split), AugmentedSplit)


@cache
def _implements(kind: type, protocol: type) -> bool:
    """`issubclass` with a cache. It is called for every sample, and takes ten microseconds for a protocol."""
    return issubclass(kind, protocol)


def read_batch(split: Split, ids: Sequence[int], step: int | None) -> tuple[Tensor, Tensor]:
    """Read inputs and targets, as `Split.batch` returns them.

    Args:
        split: the split.
        ids: ids of the samples.
        step: global step (from 0) whose variants an augmented split returns; None to read without augmentation.

    Raises:
        SpecError: the samples cannot be read. An error that may pass was raised several times.
    """
    with _reading(ids):
        if step is not None and _is_augmented(split):
            return _checked(read_patiently(lambda: split.augmented_batch(ids, step)), len(ids))
        return _checked(read_patiently(lambda: split.batch(ids)), len(ids))


def _checked(found: object, count: int) -> tuple[Tensor, Tensor]:
    """What a split returned for `count` samples.

    Raises:
        TypeError: it is not a pair of tensors with a row for each sample, or they are not in host memory.
    """
    parts = found if isinstance(found, tuple | list) else (found,)
    if len(parts) == 2 and all(isinstance(part, Tensor) and part.shape[:1] == (count,) for part in parts):
        if not all(part.device.type == "cpu" for part in parts):
            raise TypeError(
                f"the split returned tensors on {parts[0].device} and {parts[1].device}: keep them on the CPU"
            )
        return parts[0], parts[1]
    kinds = [f"a tensor {tuple(p.shape)}" if isinstance(p, Tensor) else f"a {type(p).__name__}" for p in parts]
    raise TypeError(f"the split returned {' and '.join(kinds)} for {count} samples, not two tensors ({count}, ...)")


@contextmanager
def _reading(ids: Sequence[int]) -> Iterator[None]:
    """A context that turns any error into a `SpecError`. The dataset may be the user's code, and without this the
    trainer might take its error for a broken connection."""
    try:
        yield
    except Exception as error:
        some = ", ".join(map(str, ids[:_IDS_NAMED])) + (", ..." if len(ids) > _IDS_NAMED else "")
        message = f"one of the samples {some} cannot be read: {type(error).__name__}: {error}"
        raise SpecError("spec.data", message, reason="DataUnreadable") from error


def spread_ids(split: Split) -> list[int]:
    """Ids of up to 32 samples, spread evenly over the split."""
    count = min(_COMPARED, len(split))
    return [number * len(split) // count for number in range(count)]


def augmentation_key(split: Split, sample_id: int, step: int | None) -> int | None:
    """The number of a sample's variant at `step`: 0 if the split is not augmented, -1 without augmentation (step None).

    None if the variant never comes again.

    Raises:
        SpecError: the split's method fails, or returns something else than a whole number or None.
    """
    if not _is_augmented(split):
        return 0
    if step is None:
        return _AS_IT_IS
    with _reading([sample_id]):
        key = split.augmentation_key(sample_id, step)
        return None if key is None else index(key)  # it may be a number of numpy, which json does not write


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal. Unlike for `torch.equal`, a missing value (NaN) is equal to itself."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


class Processor(Protocol):
    """Something that makes inputs from texts or pictures, such as a tokenizer or an image processor of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Save this processor in the form that `from_pretrained` of its class reads."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A training split and a held-out split.

    Attributes:
        train: training samples.
        test: held-out samples.
        info: facts about both splits that a model depends on.
        processor: the tokenizer or image processor that made the inputs; may be None. It is saved with the
            finished model, so that `pipeline` of transformers makes the same inputs.
    """

    train: Split
    test: Split
    info: DataInfo
    processor: Processor | None = None

    def __post_init__(self) -> None:
        for name in ("train", "test"):
            if not hasattr(split := getattr(self, name), "batch") or not hasattr(split, "__len__"):
                raise TypeError(f"{name} is a {type(split).__name__}, not a Split: it needs __len__ and batch")
        if not isinstance(self.info, DataInfo):
            raise TypeError(f"info is a {type(self.info).__name__}, not a DataInfo")

    @cached_property
    def inputs_change(self) -> bool:
        """Whether some samples differ when they are read twice, because they are augmented at random.

        Call this before the first step, because it reads samples. It looks at a few, so a rare change may be seen by
        some workers only. They tell the others, which call `expect_changes`.
        """
        return self._changes[0]

    @property
    def targets_change(self) -> bool:
        """Whether some targets differ when they are read twice. Call it before the first step, as `inputs_change`."""
        return self._changes[1]

    @cached_property
    def _changes(self) -> tuple[bool, bool]:
        """Whether inputs and targets of some samples differ when they are read twice."""
        found = [False, False]
        for split in (self.train, self.test):
            if len(split):
                twice = zip(*(read_batch(split, spread_ids(split), None) for _ in range(2)), strict=True)
                found = [before or not _are_equal(*both) for before, both in zip(found, twice, strict=True)]
        return found[0], found[1]

    def expect_changes(self) -> None:
        """From now on let `inputs_change` be true, because another worker saw a sample change."""
        vars(self)["inputs_change"] = True


@dataclass(frozen=True)
class TensorSplit:
    """A split whose samples are tensors in memory."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(ids), dtype=torch.long)
        return self.inputs[index], self.targets[index]

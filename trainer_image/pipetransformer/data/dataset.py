"""What the trainer needs from a dataset: samples by id, in two splits."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from pipetransformer.errors import SpecError, meant

#: Sample ids in an error message.
_IDS_NAMED = 16
#: Augmentation key of a sample that is read without augmentation.
_AS_IT_IS = -1


class Task(StrEnum):
    """What a sample's target is."""

    NEXT_TOKEN = "NextToken"  #: the next token at each position; samples are packed
    MASKED_TOKEN = "MaskedToken"  #: the original token at masked positions; samples are packed
    CLASS = "Class"  #: one class for the sample; texts are padded


def as_task(name: str) -> Task:
    """The task that an option names.

    Raises:
        SpecError: there is no such task.
    """
    if name not in set(Task):
        words = f'there is no task "{name}"{meant(name, Task)}: use {", ".join(Task)}'
        raise SpecError("spec.data.options.task", words)
    return Task(name)


@dataclass(frozen=True)
class DataInfo:
    """What a model must know about its data.

    Attributes:
        input_shape: shape of one input, without the batch; (positions,) for tokens.
        num_classes: number of classes of a target; the vocabulary's size if targets are tokens.
        vocab_size: number of token ids; 0 if the inputs are not tokens.
        lengths: lengths that samples are padded to, ascending, the last being the input's; empty if there is only that.
        task: what a target is; None if unknown, and then any model is accepted.
        labels: names of the classes, in order; empty if they have none.
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


class Split(Protocol):
    """Samples 0..len-1, the same on every worker."""

    def __len__(self) -> int: ...

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs (len(ids), *input_shape) and targets (len(ids), ...) of these samples, in this order, on the CPU.

        A target is one class, or one class for each position, with -100 for positions to ignore.
        """
        ...


@runtime_checkable
class PaddedSplit(Split, Protocol):
    """A split whose samples are padded at their end to one length."""

    def lengths(self, ids: Sequence[int]) -> Tensor:
        """(len(ids),) number of positions of each sample that are not padding, at least 1."""
        ...


def lengths_of(split: Split, ids: Sequence[int], device: torch.device) -> Tensor | None:
    """Lengths of these samples on `device`; None if the split is not padded."""
    if not _is_padded(split):
        return None
    with _reading(ids):
        return split.lengths(ids).to(device)


#: Maps sample ids to the lengths that they are padded to.
PaddedLengths = Callable[[Sequence[int]], Sequence[int]]


def padded_lengths(split: Split, info: DataInfo) -> PaddedLengths | None:
    """A function from samples to the shortest of `info.lengths` that each fits; None if all have one length."""
    if not info.lengths or not _is_padded(split):
        return None
    padded = split

    def of(ids: Sequence[int]) -> list[int]:
        with _reading(ids):
            return [info.lengths[bisect_left(info.lengths, used)] for used in padded.lengths(ids).tolist()]

    return of


@runtime_checkable
class AugmentedSplit(Split, Protocol):
    """A training split whose samples vary with the step. A variant depends only on the step and the sample."""

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """As `batch`, with the variants of a global step."""
        ...

    def augmentation_key(self, sample_id: int, step: int) -> int | None:
        """Number, from 0, of a sample's variant at a step; None if the variant does not come again, so that it is not
        cached."""
        ...


def _is_padded(split: Split) -> TypeGuard[PaddedSplit]:
    return _implements(type(split), PaddedSplit)


def _is_augmented(split: Split) -> TypeGuard[AugmentedSplit]:
    return _implements(type(split), AugmentedSplit)


@cache
def _implements(kind: type, protocol: type) -> bool:
    """`issubclass`, cached: it is asked for every sample, and Python takes ten microseconds for a protocol."""
    return issubclass(kind, protocol)


def read_batch(split: Split, ids: Sequence[int], step: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets in their variants at `step`, or without augmentation if it is None.

    Raises:
        SpecError: the samples cannot be read.
    """
    with _reading(ids):
        if step is not None and _is_augmented(split):
            return split.augmented_batch(ids, step)
        return split.batch(ids)


@contextmanager
def _reading(ids: Sequence[int]) -> Iterator[None]:
    """Turns any error into a `SpecError`. A dataset may be the user's code, and its errors must not look like a broken
    connection."""
    try:
        yield
    except Exception as error:
        some = ", ".join(map(str, ids[:_IDS_NAMED])) + (", ..." if len(ids) > _IDS_NAMED else "")
        message = f"one of the samples {some} cannot be read: {type(error).__name__}: {error}"
        raise SpecError("spec.data", message, reason="DataUnreadable") from error


def augmentation_key(split: Split, sample_id: int, step: int | None) -> int | None:
    """Number of the sample's variant at `step`; 0 if there is only one."""
    if not _is_augmented(split):
        return 0
    return _AS_IT_IS if step is None else split.augmentation_key(sample_id, step)


class Processor(Protocol):
    """Makes inputs from texts or pictures, such as a tokenizer or an image processor of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Save it in the form that its `from_pretrained` reads."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A training split and a held-out one.

    Attributes:
        train: training samples.
        test: held-out samples.
        info: what a model must know about both.
        processor: the tokenizer or image processor that made the inputs. It is saved with the finished model, so that
            `pipeline` of transformers can make them, too.
    """

    train: Split
    test: Split
    info: DataInfo
    processor: Processor | None = None


@dataclass(frozen=True)
class TensorSplit:
    """A split in memory."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(ids), dtype=torch.long)
        return self.inputs[index], self.targets[index]

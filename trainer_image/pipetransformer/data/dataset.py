"""What the trainer needs of a dataset: samples by id, in two splits."""

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

#: In an error's message.
_IDS_NAMED = 16
#: The variant of a sample of an augmented split that is read as it is.
_AS_IT_IS = -1


class Task(StrEnum):
    """What a sample's target is."""

    NEXT_TOKEN = "NextToken"  #: at each position the token that follows; samples are packed
    MASKED_TOKEN = "MaskedToken"  #: at some positions the token that was masked there; samples are packed
    CLASS = "Class"  #: one for the sample; of text, which is padded


def as_task(name: str) -> Task:
    """What an option calls a task.

    Raises:
        SpecError: there is none of this name.
    """
    if name not in set(Task):
        words = f'there is no task "{name}"{meant(name, Task)}: use {", ".join(Task)}'
        raise SpecError("spec.data.options.task", words)
    return Task(name)


@dataclass(frozen=True)
class DataInfo:
    """What a model must know of its data.

    Attributes:
        input_shape: of one input, without the batch; (positions,) for tokens.
        num_classes: of each target: the labels, or the vocabulary where the target is the next token.
        vocab_size: number of token ids, 0 where the inputs are no tokens.
        lengths: positions that padded samples come in, ascending up to the input's; empty when all come in that one.
        task: what a target is; None where nobody says it, and then no model is refused for it.
        labels: names of the classes, in their order; empty where they have none.
        pad_id: id of padding; None where no token stands for it.
        start_id: id that begins a text; None where none does.
        end_id: id that ends a text; None where none does.
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

        A target is a class, or one for each position, -100 where there is none.
        """
        ...


@runtime_checkable
class PaddedSplit(Split, Protocol):
    """A split whose samples are padded at their end to one length."""

    def lengths(self, ids: Sequence[int]) -> Tensor:
        """(len(ids),) positions of each sample that are no padding, at least 1."""
        ...


def lengths_of(split: Split, ids: Sequence[int], device: torch.device) -> Tensor | None:
    """Lengths of these samples on `device`; None where nothing is padded."""
    if not _is_padded(split):
        return None
    with _reading(ids):
        return split.lengths(ids).to(device)


#: Positions that each of some samples is padded to.
PaddedLengths = Callable[[Sequence[int]], Sequence[int]]


def padded_lengths(split: Split, info: DataInfo) -> PaddedLengths | None:
    """The shortest of `info.lengths` that a sample fits; None where there is one length for all."""
    if not info.lengths or not _is_padded(split):
        return None
    padded = split

    def of(ids: Sequence[int]) -> list[int]:
        with _reading(ids):
            return [info.lengths[bisect_left(info.lengths, used)] for used in padded.lengths(ids).tolist()]

    return of


@runtime_checkable
class AugmentedSplit(Split, Protocol):
    """A training split that shows a sample in another variant at another step, a function of step and sample alone."""

    def augmented_batch(self, ids: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """What `batch` gives, as seen at a global step."""
        ...

    def augmentation_key(self, sample_id: int, step: int) -> int | None:
        """Number, from 0, of the variant that a sample shows at a step; None when it is not seen again and is not worth
        caching."""
        ...


def _is_padded(split: Split) -> TypeGuard[PaddedSplit]:
    return _implements(type(split), PaddedSplit)


def _is_augmented(split: Split) -> TypeGuard[AugmentedSplit]:
    return _implements(type(split), AugmentedSplit)


@cache
def _implements(kind: type, protocol: type) -> bool:
    """Asked for every sample, and Python's own answer takes ten microseconds."""
    return issubclass(kind, protocol)


def read_batch(split: Split, ids: Sequence[int], step: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets as training sees them at `step`, or as they are where it is None.

    Raises:
        SpecError: they cannot be read.
    """
    with _reading(ids):
        if step is not None and _is_augmented(split):
            return split.augmented_batch(ids, step)
        return split.batch(ids)


@contextmanager
def _reading(ids: Sequence[int]) -> Iterator[None]:
    """A dataset may be anybody's code, and what it raises must not look like a broken connection."""
    try:
        yield
    except Exception as error:
        some = ", ".join(map(str, ids[:_IDS_NAMED])) + (", ..." if len(ids) > _IDS_NAMED else "")
        message = f"one of the samples {some} cannot be read: {type(error).__name__}: {error}"
        raise SpecError("spec.data", message, reason="DataUnreadable") from error


def augmentation_key(split: Split, sample_id: int, step: int | None) -> int | None:
    """Which variant of the sample `read_batch` gives, 0 where there is only one."""
    if not _is_augmented(split):
        return 0
    return _AS_IT_IS if step is None else split.augmentation_key(sample_id, step)


class Processor(Protocol):
    """What makes inputs of texts or pictures, such as a tokenizer or an image processor of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write it as its `from_pretrained` reads it."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A training split and a held-out one.

    Attributes:
        train: to train on.
        test: held out.
        info: what a model must know of both.
        processor: what made the inputs. It is saved with the finished model, so that `pipeline` can make them, too.
    """

    train: Split
    test: Split
    info: DataInfo
    processor: Processor | None = None


@dataclass(frozen=True)
class TensorSplit:
    """A split that fits memory."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(ids), dtype=torch.long)
        return self.inputs[index], self.targets[index]

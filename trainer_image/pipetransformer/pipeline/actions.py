"""What a schedule is: how a batch becomes chunks, and in which order each worker computes on them.

A schedule only says what happens when; the executor does it. So a schedule can cut samples into slices of tokens, give
a worker several spans, or step the optimizer in the middle of a round, and no other part of the trainer knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pipetransformer.data import MicroBatch


class ActionKind(StrEnum):
    FORWARD = "Forward"
    BACKWARD = "Backward"  #: gradients of input and weights at once
    INPUT_GRADIENT = "InputGradient"  #: of the input only, for the span before; its weights' turn comes later
    WEIGHT_GRADIENT = "WeightGradient"
    REDUCE = "Reduce"  #: the span's gradients are complete: sum them over the pipelines
    STEP = "Step"  #: the span's weights change


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a worker does on its span `span`. `chunk` means nothing for `Reduce` and `Step`."""

    kind: ActionKind
    span: int
    chunk: int = -1


@dataclass(frozen=True, slots=True)
class Chunk:
    """What flows through the spans at once: whole samples, or a slice of their tokens.

    Attributes:
        micro_batch: the samples.
        tokens: positions of each sample, None for all. Slices of one micro-batch share their context's `memory`.
    """

    micro_batch: MicroBatch
    tokens: range | None = None


class Schedule(Protocol):
    """The order of a round. It starts and ends quiescent: every chunk has passed every span in both directions."""

    def chunks(self, micro_batches: Sequence[MicroBatch]) -> list[Chunk]:
        """Cuts what a pipeline was dealt. All workers of the pipeline get the same answer."""
        ...

    def actions(self, owners: Sequence[int], num_chunks: int) -> list[list[Action]]:
        """What each worker of a pipeline does, in order.

        Args:
            owners: worker of each span, spans in the order of the model. A worker may own several.
            num_chunks: chunks of the round.

        Returns:
            Actions by worker. Whatever one waits for must come earlier in the order of the worker that gives it.
        """
        ...


class InOrder:
    """Chunks are the micro-batches as they were dealt. Mixed into schedules that cut nothing."""

    def chunks(self, micro_batches: Sequence[MicroBatch]) -> list[Chunk]:
        return [Chunk(micro_batch) for micro_batch in micro_batches]


class AllForwardAllBackward(InOrder):
    """Every chunk forward, then every chunk backward (GPipe, Huang et al., 2019, section 2.2), over any spans.

    Chunks go backward in the reverse order, as slices of tokens need it: a later slice attends to the earlier ones.
    """

    def actions(self, owners: Sequence[int], num_chunks: int) -> list[list[Action]]:
        workers: list[list[Action]] = [[] for _ in range(max(owners) + 1)]
        for span, owner in enumerate(owners):
            workers[owner] += [Action(ActionKind.FORWARD, span, chunk) for chunk in range(num_chunks)]
        for span, owner in reversed(list(enumerate(owners))):
            workers[owner] += [Action(ActionKind.BACKWARD, span, chunk) for chunk in reversed(range(num_chunks))]
            workers[owner].append(Action(ActionKind.REDUCE, span))
        return workers

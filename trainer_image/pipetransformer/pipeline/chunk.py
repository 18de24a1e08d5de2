"""A chunk: what passes through the spans of one worker, a micro-batch or a slice of its tokens. At the end of the last
span a target takes its output: the loss in training, metrics in an evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pipetransformer.cache import PrefixOutputs
from pipetransformer.errors import ModelError, RunningModel
from pipetransformer.models import MicroBatchContext, PipelineModel, check_loss
from pipetransformer.models.metrics import LOSS, Metric, name_of
from pipetransformer.schedules import RoundShape

_LOSS = RunningModel("loss")


@dataclass(slots=True)
class Chunk:
    """A micro-batch of a round, or a slice of its tokens, on one worker.

    Attributes:
        micro_batch: place of the micro-batch in the round.
        context: what units may know of the chunk, such as its step and samples.
        shape: shape of the chunk's activations between units.
        prefix: returns the output of the frozen units that the first span starts with, from the cache or computed;
            only on the first span's worker.
        frozen_output: the same output, if `PREFIX` actions have computed it; None otherwise.
        frozen_input: input of the next frozen unit that a `PREFIX` action of this worker computes.
        labels: (samples, ...) labels; only on the last span's worker.
        weights: (samples,) weights of the samples; only on the last span's worker.
        loss: summed loss, once the last span has trained it.
        weight: summed weight of that loss.
    """

    micro_batch: int
    context: MicroBatchContext
    shape: tuple[int, ...]
    prefix: PrefixOutputs | None = None
    frozen_output: Tensor | None = None
    frozen_input: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    loss: Tensor | None = None
    weight: Tensor | None = None

    def first_input(self) -> Tensor:
        """The input of the first span's first unit that trains: the output of the frozen units before it."""
        if self.frozen_output is not None:
            output, self.frozen_output = self.frozen_output, None
            return output
        assert self.prefix is not None
        return self.prefix.take(self.micro_batch, self.context)


class Chunks(Protocol):
    """The chunks of a round, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Chunk: ...


@dataclass(slots=True)
class StepChunks:
    """The chunks of a round of several steps. It makes the chunks of a step, which reads their samples, when the first
    of them is needed.

    Attributes:
        shape: the shape of the round.
        make: makes the chunks of a step, by the step's number in the round.
    """

    shape: RoundShape
    make: Callable[[int], list[Chunk]]
    _made: list[Chunk] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return self.shape.chunks

    def __getitem__(self, number: int, /) -> Chunk:
        while len(self._made) <= number:
            self._made += self.make(self.shape.step_of(len(self._made)))
        return self._made[number]


class Target(Protocol):
    """Takes the outputs of the last span."""

    def take(self, output: Tensor, chunk: Chunk) -> Tensor:
        """Take the last span's output of a chunk. Returns the tensor where the chunk's backward starts."""
        ...


class Loss:
    """Computes each chunk's loss."""

    def __init__(self, model: PipelineModel) -> None:
        self._model = model

    def take(self, output: Tensor, chunk: Chunk) -> Tensor:
        """Compute the chunk's summed loss and its weight, and keep both in the chunk. Returns the loss."""
        assert chunk.labels is not None and chunk.weights is not None
        with _LOSS:
            before = output.grad_fn
            sums = self._model.loss(output, chunk.labels, chunk.weights)
            loss, weight = _scalars("loss", sums, output.device)
            if not isinstance(sums[0], Tensor):
                raise TypeError(
                    f"the sum of losses is a {type(sums[0]).__name__}, which has no gradient. Return a tensor"
                )
            # If all samples have weight 0, the loss may not depend on the output. Then make it depend, with gradient 0.
            if output.requires_grad and not loss.requires_grad and not weight:
                loss = loss + output.flatten()[:0].sum()
            if chunk.micro_batch == 0:
                check_loss(loss, before)
            chunk.loss, chunk.weight = loss.detach(), weight.detach()
        chunk.labels = chunk.weights = None  # a round of many steps keeps its chunks to the end
        return loss


class Scores:
    """Sums metrics over all chunks.

    Attributes:
        sums: (metrics, 2) sums of numerators and denominators in float64, on the CPU.
    """

    def __init__(self, metrics: Sequence[Metric] = ()) -> None:
        self._metrics = metrics
        self.sums = torch.zeros(len(metrics), 2, dtype=torch.float64)

    def take(self, output: Tensor, chunk: Chunk) -> Tensor:
        """Add the chunk's samples to the sums."""
        assert chunk.labels is not None and chunk.weights is not None
        for index, metric in enumerate(self._metrics):
            name = name_of(metric)
            with RunningModel(name if name == LOSS else f"metric {name}"):
                parts = _scalars(name, metric(output, chunk.labels, chunk.weights), output.device)
                self.sums[index] += torch.stack([part.double() for part in parts]).cpu()
        return output


def _scalars(what: str, sums: object, device: torch.device) -> tuple[Tensor, Tensor]:
    """The two sums that the loss or metric named `what` returned, as tensors.

    Raises:
        ModelError: it returned something else than two scalars.
    """
    if not isinstance(sums, tuple | list) or len(sums) != 2:  # a tensor of two elements could be unpacked, too
        kind = f"{len(sums)} values" if isinstance(sums, tuple | list) else f"a {type(sums).__name__}"
        raise ModelError(f"{what} returned {kind}: it must return two scalars, a sum and its weight")
    if any(isinstance(each, Tensor) and each.is_meta for each in sums):
        raise ModelError(
            f"{what} computes with a parameter of the model, which has no values here: compute that part in the head,"
            " or use training.optimizer.weightDecay"
        )
    first, second = (
        each.to(device) if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64, device=device)
        for each in sums
    )
    if first.dim() or second.dim():
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ModelError(f"{what} returned sums of the shapes {shapes}: both must be scalars")
    return first, second

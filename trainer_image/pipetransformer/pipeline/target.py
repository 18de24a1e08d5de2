"""What takes the output of the last span: the loss in training, metrics in an evaluation."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipetransformer.errors import ModelError, RunningModel
from pipetransformer.models import PipelineModel, check_loss
from pipetransformer.models.metrics import LOSS, Metric, name_of

from .chunk import Chunk

_LOSS = RunningModel("loss")


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

"""Computes the loss of a round, or the metrics of an evaluation, from the last stage's outputs."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipetransformer.errors import ModelError, RunningModel
from pipetransformer.models import PipelineModel
from pipetransformer.models.metrics import Metric, name_of

_LOSS = RunningModel("loss")


class Target:
    """Labels and weights of the current samples, and the sums so far.

    A pipeline schedule splits one tensor into micro-batches, so it gets row numbers instead of labels. Schedules hold
    `loss` and `score`, and so this object. It must not hold the runner, because a reference cycle would keep the
    stages' memory until the garbage collector runs.
    """

    def __init__(self, model: PipelineModel) -> None:
        self._model = model
        self._labels = self._sample_weights = self._scores = torch.empty(0)
        self._weights: list[Tensor] = []
        self._metrics: Sequence[Metric] = ()

    def set(self, labels: Tensor, sample_weights: Tensor) -> None:
        """Set the labels and weights (samples, ...) of the next batch."""
        self._labels, self._sample_weights = labels, sample_weights

    def loss(self, output: Tensor, rows: Tensor | slice) -> Tensor:
        """Sum of the losses of these rows. Their weight is kept for `take_weights`."""
        with _LOSS:
            sums = self._model.loss(output, self._labels[rows], self._sample_weights[rows])
            if not isinstance(sums[0], Tensor):
                raise TypeError(f"its sum is a {type(sums[0]).__name__}, which has no gradient: return the tensor")
            loss, weight = _scalars("loss", sums, output.device)
            # A loss may skip samples of weight 0.
            if output.requires_grad and not loss.requires_grad and not weight:
                loss = loss + output.flatten()[:0].sum()
            self._weights.append(weight.detach())
        return loss

    def take_weights(self) -> list[Tensor]:
        """Summed weight of each micro-batch since the last call."""
        weights, self._weights = self._weights, []
        return weights

    def begin_scores(self, metrics: Sequence[Metric]) -> None:
        """Sum these metrics from now on."""
        self._metrics, self._scores = metrics, torch.zeros(len(metrics), 2, dtype=torch.float64)

    def score(self, output: Tensor, rows: Tensor | slice) -> Tensor:
        """Add these rows to the metrics. Returns a zero, which a schedule takes for their loss."""
        labels, weights = self._labels[rows], self._sample_weights[rows]
        for index, metric in enumerate(self._metrics):
            with RunningModel(f"metric {name_of(metric)}"):
                parts = _scalars(name_of(metric), metric(output, labels, weights), output.device)
                self._scores[index] += torch.stack([part.double() for part in parts]).cpu()
        return output.new_zeros(())

    def take_scores(self) -> Tensor:
        """(metrics, 2) sums of numerators and denominators in float64, on the CPU."""
        scores, self._metrics, self._scores = self._scores, (), torch.empty(0)
        return scores


def _scalars(what: str, sums: Iterable[Tensor | float], device: torch.device) -> tuple[Tensor, Tensor]:
    """The two sums that `what` returned, as tensors.

    Raises:
        ModelError: they are not scalars.
    """
    first, second = (
        each.to(device) if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64, device=device)
        for each in sums
    )
    if first.dim() or second.dim():
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ModelError(f"{what} returned sums of the shapes {shapes}: both must be scalars")
    return first, second

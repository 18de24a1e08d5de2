"""The vote that ends a round: every worker sums all workers' ballots, which are a few float64 each.

Everything that follows a round (commit, clipping, skipping, freezing, regroup) is a pure function of these sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipetransformer.elastic.transport.exchange import Exchange


class StepSums(NamedTuple):
    """A step's sums over all workers, or one worker's part of them.

    Attributes:
        loss_sum: weighted sum of the losses of all samples.
        weight: sum of the weights of all samples.
        square_norm: squared norm of the summed (not yet divided) gradient.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    square_norm: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return self.weight > 0 and math.isfinite(self.loss_sum) and math.isfinite(self.square_norm)

    @property
    def loss(self) -> float:
        """Mean loss."""
        return self.loss_sum / self.weight

    @property
    def gradient_norm(self) -> float:
        """Global norm of the mean gradient."""
        return math.sqrt(self.square_norm) / self.weight


@dataclass
class Vote:
    """One worker's ballot before the reduction; afterwards the sums, which are the same on all workers.

    Attributes:
        saw_next: members that know of a newer generation.
        leaving: members that were told to stop.
        writing: members that still write their part of a checkpoint.
        loss_sum: weighted sum of the losses of all samples; only last stages contribute.
        weight: sum of the weights of all samples; only last stages contribute.
        square_norms: squared norm of the summed (not yet divided) gradient of each unit; only pipeline 0 contributes.
        similarities: similarities that the freeze policy asked for, the same on all workers.
        behind: members whose callbacks lag behind; only the leader has callbacks.
        save: members whose clock says that a checkpoint is due; only the leader looks.
        computing: seconds that the computations of all workers took in the round.
        cold: first workers of pipelines whose frozen layers must stay on the device, because their cache lacks samples.
        earlier: the other steps of a round of several, whose last step the sums above are of.
    """

    saw_next: float = 0.0
    leaving: float = 0.0
    writing: float = 0.0
    loss_sum: float = 0.0
    weight: float = 0.0
    square_norms: list[float] = field(default_factory=list)
    similarities: list[float] = field(default_factory=list)
    behind: float = 0.0
    save: float = 0.0
    computing: float = 0.0
    cold: float = 0.0
    earlier: list[StepSums] = field(default_factory=list)

    @property
    def last(self) -> StepSums:
        """The last step of the round."""
        return StepSums(self.loss_sum, self.weight, math.fsum(self.square_norms))

    @property
    def num_steps(self) -> int:
        """Steps of the round."""
        return 1 + len(self.earlier)

    @property
    def finite(self) -> bool:
        """Whether losses and gradients of all steps are finite. They are not for a batch without targets, which has no
        mean loss."""
        last = self.weight > 0 and math.isfinite(self.loss_sum) and all(map(math.isfinite, self.square_norms))
        return last and all(step.finite for step in self.earlier)

    @property
    def non_finite_unit(self) -> int | None:
        """The unit whose backward made the gradients non-finite; None if all are finite.

        A backward passes non-finite values down, so this is the highest unit of the lowest non-finite run. Units
        without trained parameters show nothing. A unit far above may be non-finite only by a parameter shared with a
        low one.
        """
        found = None
        for unit, square in enumerate(self.square_norms):
            if not math.isfinite(square):
                found = unit
            elif square > 0 and found is not None:
                break
        return found

    @property
    def loss(self) -> float:
        """Mean loss of the step."""
        return self.last.loss

    @property
    def gradient_norm(self) -> float:
        """Global norm of the mean gradient."""
        return self.last.gradient_norm

    @property
    def unit_norms(self) -> list[float]:
        """Norm of the mean gradient of each unit."""
        return [math.sqrt(square) / self.weight for square in self.square_norms]

    def gradient_scale(self, max_norm: float | None) -> float:
        """Return the factor for the summed gradients: division by the weight, and clipping by the global norm."""
        scale = 1.0 / self.weight
        if max_norm is not None and self.gradient_norm > max_norm:
            scale *= max_norm / self.gradient_norm
        return scale

    def to_list(self) -> list[float]:
        """List all that the commit of a step depends on. `similarities`, and all from `behind` on, matter only after
        it."""
        return [self.saw_next, self.leaving, self.writing, self.loss_sum, self.weight, *self.square_norms]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> "Vote":
        saw_next, leaving, writing, loss_sum, weight, *square_norms = values
        return cls(saw_next, leaving, writing, loss_sum, weight, square_norms)

    def reduce(self, ballots: Exchange) -> "Vote":
        """Sum over all members, except `similarities`, which all have already."""
        own = self.to_list()
        after = [self.behind, self.save, self.computing, self.cold]
        row = [*own, *after, *(value for step in self.earlier for value in step)]
        sums = ballots.sum([*row, *[0.0] * (ballots.values - len(row))])
        behind, save, computing, cold, *earlier = sums[len(own) : len(row)]
        fields = len(StepSums._fields)
        return replace(
            Vote.from_list(sums[: len(own)]),
            similarities=self.similarities,
            behind=behind,
            save=save,
            computing=computing,
            cold=cold,
            earlier=[StepSums(*earlier[start : start + fields]) for start in range(0, len(earlier), fields)],
        )

    @staticmethod
    def length(units: int, most_steps: int = 1) -> int:
        """Return the length of a ballot for a model of `units` units, and rounds of up to `most_steps` steps."""
        earlier = (most_steps - 1) * len(StepSums._fields)
        return len(Vote(square_norms=[0.0] * units).to_list()) + 4 + earlier

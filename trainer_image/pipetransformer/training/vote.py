"""The vote that ends a round. Each worker has a ballot of a few float64 numbers; every worker gets their sums.

What follows a round (commit, clipping, skipping, freezing, regroup) is a pure function of these sums. So all workers do
the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipetransformer.elastic.transport.exchange import Exchange


class StepSums(NamedTuple):
    """The sums of one step over all workers, or one worker's part of these sums.

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
        """Mean loss over all samples of the step."""
        return self.loss_sum / self.weight

    @property
    def gradient_norm(self) -> float:
        """Global norm of the mean gradient."""
        return math.sqrt(self.square_norm) / self.weight


@dataclass
class Vote:
    """One worker's ballot. `reduce` returns a vote that holds the sums over all members, the same on all workers.

    For a round of several steps, `loss_sum`, `weight` and `square_norms` are those of its last step.

    Attributes:
        saw_next: number of members that know of a newer generation. Only the leader looks.
        leaving: number of members that were told to stop.
        writing: number of members that still write their part of a checkpoint.
        loss_sum: weighted sum of the losses of all samples; only last stages contribute.
        weight: sum of the weights of all samples; only last stages contribute.
        square_norms: squared norm of the summed (not yet divided) gradient of each unit; one worker contributes each.
        similarities: similarities of samples that the freeze policy asked for. They are the same on all workers already
            before the vote.
        behind: number of members whose callbacks lag behind. Only the leader has callbacks.
        save: number of members that say that a checkpoint is due, by their clock or because a user asked. Only the
            leader looks.
        computing: seconds that the computations of all workers took in the round.
        keeps_layers_on_device: number of pipelines whose first worker cannot move more frozen layers to host memory.
            For example, its cache lacks samples.
        earlier: sums of the earlier steps in a round of several.
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
    keeps_layers_on_device: float = 0.0
    earlier: list[StepSums] = field(default_factory=list)

    @property
    def last(self) -> StepSums:
        """The sums of the last step in the round."""
        return StepSums(self.loss_sum, self.weight, math.fsum(self.square_norms))

    @property
    def num_steps(self) -> int:
        """The number of steps in the round."""
        return 1 + len(self.earlier)

    @property
    def finite(self) -> bool:
        """Whether losses and gradients of all steps in the round are finite. A batch without targets counts as not
        finite, because it has no mean loss."""
        return all(step.finite for step in [*self.earlier, self.last])

    @property
    def non_finite_unit(self) -> int | None:
        """Index of the unit whose backward made the gradients non-finite; None if all are finite.

        A backward passes non-finite values down, to lower units. So this is the highest unit of the lowest run of
        neighbouring non-finite units. Units without trained parameters have norm 0 and are ignored. Higher runs do not
        count: such a unit may be non-finite only because it shares a parameter with a low unit.
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
        """Mean loss of the last step."""
        return self.last.loss

    @property
    def gradient_norm(self) -> float:
        """Global norm of the mean gradient."""
        return self.last.gradient_norm

    @property
    def unit_norms(self) -> list[float]:
        """Norm of the mean gradient of each unit, in the last step."""
        return [math.sqrt(square) / self.weight for square in self.square_norms]

    def gradient_scale(self, max_norm: float | None) -> float:
        """Return the factor that turns summed gradients into mean gradients with a global norm of at most `max_norm`.
        With None they are not clipped."""
        scale = 1.0 / self.weight
        if max_norm is not None and self.gradient_norm > max_norm:
            scale *= max_norm / self.gradient_norm
        return scale

    def to_list(self) -> list[float]:
        """Return the numbers of the last step that its commit depends on."""
        return [self.loss_sum, self.weight, *self.square_norms]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> "Vote":
        """Make a vote from the result of `to_list`. All other fields have their defaults."""
        loss_sum, weight, *square_norms = values
        return cls(loss_sum=loss_sum, weight=weight, square_norms=square_norms)

    def reduce(self, exchange: Exchange) -> "Vote":
        """Exchange the ballots and return their sum. `similarities` are not summed, because they are the same on all
        members already.

        Args:
            exchange: exchanges the numbers. All members call this in the same round.

        Raises:
            RuntimeError: a connection broke.
        """
        own = self.to_list()
        others = [self.saw_next, self.leaving, self.writing, self.behind, self.save, self.computing]
        row = [*own, *others, self.keeps_layers_on_device, *(value for step in self.earlier for value in step)]
        sums = exchange.sum(row)
        saw_next, leaving, writing, behind, save, computing, keeps_layers, *earlier = sums[len(own) :]
        fields = len(StepSums._fields)
        return replace(
            Vote.from_list(sums[: len(own)]),
            saw_next=saw_next,
            leaving=leaving,
            writing=writing,
            similarities=self.similarities,
            behind=behind,
            save=save,
            computing=computing,
            keeps_layers_on_device=keeps_layers,
            earlier=[StepSums(*earlier[start : start + fields]) for start in range(0, len(earlier), fields)],
        )

"""The interface of a freeze policy, and the steps after which it decides."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class FreezeObservation:
    """What a policy decides by. All workers know it after the vote of a step. Before training there is one with step 0.

    Attributes:
        step: number of committed steps, which is also the index of the next step.
        epoch: number of finished epochs.
        boundary: number of frozen layers.
        num_layers: number of layers (L).
        unit_gradient_norms: L2 norms of the global gradient at the last step: of the embedding, each layer and the head
            (L + 2 numbers, 0 for frozen units). A parameter that several units share counts in the last of them. A unit
            that shares all its parameters with later units has the norm of these parameters. Empty at step 0 and after
            a step that was skipped because it was not finite.
        learning_rate: learning rate of the last step, 0 at step 0.
        loss: mean training loss of the last step; None at step 0 and after a skipped step.
        held_out_loss: held-out loss if the model was evaluated after the last step; otherwise None.
        similarities: a flat (n, n) matrix with normalised rows: how similar the outputs of the first layer that trains
            are for n fixed samples, with the weights before the step. In an asynchronous round of several steps, with
            those after its last step. Empty unless `needs_similarities` asked for it.
    """

    step: int
    epoch: int
    boundary: int
    num_layers: int
    unit_gradient_norms: Sequence[float]
    learning_rate: float = 0.0
    similarities: Sequence[float] = ()
    loss: float | None = None
    held_out_loss: float | None = None


class FreezePolicy(ABC):
    """Decides the frozen boundary after each step.

    Each worker asks its own copy, so a decision must depend only on the observation and the policy's state. A policy
    that remembers something between steps returns it from `state_dict`, so that it survives regroups and checkpoints.

    Attributes:
        known_ahead: whether decisions depend only on `step`, `epoch`, `boundary` and `num_layers`. Then
            `pipetransformer plan` says when layers will freeze.
    """

    known_ahead: ClassVar[bool] = False

    @abstractmethod
    def decide(self, observation: FreezeObservation) -> int:
        """Number of layers, 0 to `num_layers`, to be frozen from the next step on. Below `observation.boundary`, layers
        train again."""

    def needs_similarities(self, step: int) -> bool:
        """Whether the observation after `step` committed steps needs `similarities`, which cost extra forwards."""
        del step
        return False

    def next_decision(self, step: int) -> int | None:
        """The next number of committed steps, above `step`, after which the policy may act; None if it never will.

        An asynchronous schedule has rounds of several steps, and asks the policy only after a round. So it ends a round
        at this number. By default the policy may decide after each step, so each round has one step.
        """
        return step + 1

    def state_dict(self) -> dict[str, Any]:
        """The policy's state, JSON-able, to resume another copy with."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        del state


@dataclass(frozen=True)
class Instants:
    """A policy decides after these numbers of committed steps: start + interval, start + 2 * interval and so on."""

    start: int
    interval: int

    def number(self, step: int) -> int | None:
        """Number (T, from 1) of the decision after `step` committed steps; None if there is none."""
        number, between = divmod(step - self.start, self.interval)
        return None if between or number < 1 else number

    def after(self, step: int) -> int:
        """The number of committed steps, above `step`, before the next decision."""
        return self.start + max(1, (step - self.start) // self.interval + 1) * self.interval


def ceil_share(value: float) -> int:
    """Ceiling that tolerates rounding errors: 4.000000000000001 gives 4."""
    return -int(-(value - 1e-9) // 1)

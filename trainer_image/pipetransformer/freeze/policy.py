"""The interface of a freeze policy, and the instants of its decisions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FreezeObservation:
    """What all ranks know after a step's vote. A policy is also asked once with step 0, before training.

    Attributes:
        step: number of committed steps, which is also the index of the next step.
        epoch: number of finished epochs.
        boundary: number of frozen layers.
        num_layers: number of layers (L).
        unit_gradient_norms: L2 norms of the global gradient of the embedding, each layer and the head (L + 2 numbers, 0
            for frozen ones) at the last step. A parameter that several units share counts in the last of them; a unit
            that shares all its parameters with later units has the norm of those. Empty at step 0 and after a step that
            was skipped because it was not finite.
        learning_rate: learning rate of the last step, 0 at step 0.
        loss: mean training loss of the last step; None at step 0 and after a skipped step.
        held_out_loss: held-out loss if the model was evaluated after the last step; otherwise None.
        similarities: if the policy needs them, the similarities of a fixed set of samples in the output of the first
            layer that trains: a flat (n, n) matrix with normalised rows, by the weights before the step.
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

    Every rank asks its own copy, so a decision must depend only on the observation and the policy's state. A policy
    that remembers something between steps returns it from `state_dict`, so that regroups and checkpoints keep it.
    """

    @abstractmethod
    def decide(self, observation: FreezeObservation) -> int:
        """Number of layers to freeze from the next step on, 0 to `num_layers`; may be below `observation.boundary`."""

    def needs_similarities(self, step: int) -> bool:
        """Whether the observation after `step` committed steps needs `similarities`, which cost extra forwards."""
        del step
        return False

    def next_decision(self, step: int) -> int | None:
        """Committed steps, above `step`, after which the policy may next move the boundary; None if it never will.

        Asynchronous schedules ask the policy only between rounds of several steps, and end a round there. By default
        each step may be one, so rounds have one step.
        """
        return step + 1

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, to resume another copy of the policy with."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        del state


@dataclass(frozen=True)
class Instants:
    """Steps after which a policy may act: every `interval` steps after the first `start` steps."""

    start: int
    interval: int

    def number(self, step: int) -> int | None:
        """Number (T, from 1) of the decision after `step` committed steps; None if there is none."""
        number, between = divmod(step - self.start, self.interval)
        return None if between or number < 1 else number

    def after(self, step: int) -> int:
        """The next such step above `step`."""
        return self.start + max(1, (step - self.start) // self.interval + 1) * self.interval


def ceil_share(value: float) -> int:
    """Ceiling that tolerates rounding errors: 4.000000000000001 gives 4."""
    return -int(-(value - 1e-9) // 1)
